"""Placement on a simulated clock: the real ``place``, engines that only cost time.

traces.py    who asks what, and when
engine.py    one engine: a queue, passes that take time, a cache of blocks that runs full
routers.py   the real placement, and what it is compared with
node.py      the clock, and a request's way through the engines
"""
