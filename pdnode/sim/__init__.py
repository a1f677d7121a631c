"""A node on a simulated clock: the real ``placement.place``, engines that only cost time.

work.py      what is asked: requests and conversations
engine.py    one engine: a queue, passes that take time, a cache of blocks that runs full
router.py    the real placement, fed with what a front end would know
node.py      the clock, and a request's way through the engines
"""
