"""The CUDA back end of `ipc`: KV in GPU memory, mapped by a peer process, copied by the GPU.

    driver.py     the driver API, call by call; the only file that imports cuda.bindings
    batch.py      cuMemcpyBatchAsync, both ABIs, through a function pointer
    device.py     a GPU by UUID, and its primary context
    record.py     what one region says of itself, in one page of shared memory
    share.py      memory -> a handle that another process can open, or a refusal
    vmm.py        memory made with cuMemCreate: map, export, import
    door.py       file descriptors to peers, over a socket
    holds.py      who uses a piece of memory, and when it may go
    mapping.py    a peer's memory in this process; `close_dead`
    memory.py     CudaRegion: create, export, attach, close, unlink
    kernels.py    the gather kernel (the only file that imports triton); launch.py loads, starts it
    crossover.py  copy engine or kernel? measured once
    copy.py       CudaCopier: a plan -> one submission on a stream of its own -> a Ticket

Life of a mapping: the owner writes a record (memory.py, CudaRegion.create or .export); the peer
reads it, opens the handle, copies a known pattern through it and compares (CudaRegion.attach);
copies pin both regions until the GPU has finished (copy.py, submit); `close` or `close_dead` stop
new copies, wait for the running ones and unmap (holds.py).

Nothing here imports torch, and `import ipc` imports nothing of this package.
"""
