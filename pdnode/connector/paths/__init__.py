"""How a worker gets at the KV of its peers: one class per path, one verb, ``load``.

    base.py      what every path has: this worker's memory, the peers it is connected to
    shm.py       map the peer's segment, copy from it
    cuda_ipc.py  map the peer's GPU memory, let the GPU copy from it
    staged.py    ask the peer's worker to send, receive through a ring in host memory
    serving.py   the other end of that: one thread in the owner's worker, for all its readers
    wire.py      what the two say to each other
    movers.py    between KV and host memory: the CPU, or the worker's GPU

Which path leads to which peer is decided in ``pdnode/kvpath.py`` and told in the settings.
"""
