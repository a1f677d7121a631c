"""Placement on a simulated clock (pdnode.sim), against other routers.

traces.py    who asks what, and when
routers.py   what the real placement is compared with
node.py      the hardware, and the best any placement could do on it
"""
