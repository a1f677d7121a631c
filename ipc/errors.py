"""Everything `ipc` raises, as one tree.

IpcError
├── SegmentError              one POSIX shared-memory object
│   ├── SegmentExists         create: the name is taken
│   ├── SegmentMissing        attach: nobody has that name
│   ├── NoSharedMemory        create: /dev/shm is too small (.nbytes, .free_bytes, .flag)
│   ├── SegmentForeign        attach: not ours, cut off, or of another version
│   └── RegionRefused         attach: another boot, generation, fingerprint or size than agreed
├── LookupFault               the index
│   ├── IndexFull             insert, publish: no room (.live, .capacity, .flag)
│   ├── EntryExists           insert: this transfer id is already in the owner's table
│   ├── NotOwner              a write to bytes that belong to another process
│   ├── BootMismatch          insert: the node's control line names another boot of this engine
│   ├── PoolTooSmall          pool: a share has no room for one block (.nbytes, .share_bytes, .flag)
│   └── StaleRead             the record moved on while it was read, or was torn by a death
├── CopyRefused               plan, copy: layouts that do not fit, or a piece outside its region
├── WaitTimeout               the budget is spent (also a TimeoutError)
├── PeerGone                  the OTHER side died or was replaced (also a ConnectionError)
└── PipeError                 the KV pipe
    ├── PipeClosed            this side or the other closed it on purpose
    ├── PipeBusy              this end already has a process
    ├── FrameTooLarge         a frame above the pipe's limit (.nbytes, .limit_bytes)
    └── TensorUnsupported     sparse, quantized or meta: its bytes alone are not the tensor

What a user or another process can cause has a type here; `assert` is kept for our own bugs.
"""


class IpcError(Exception):
    """The root: `except IpcError` catches all that this package raises on purpose."""


class SegmentError(IpcError):
    """Something about one shared-memory object."""


class SegmentExists(SegmentError):
    """The name is taken."""


class SegmentMissing(SegmentError):
    """No object has that name."""


class NoSharedMemory(SegmentError):
    """There is not enough shared memory. Says what was asked, what is free, which flag to turn."""

    def __init__(self, name: str, purpose: str, nbytes: int, free_bytes: int, flag: str):
        self.nbytes, self.free_bytes, self.flag = nbytes, free_bytes, flag
        super().__init__(
            f"no shared memory for {purpose}: segment {name!r} needs {nbytes:,} bytes, /dev/shm "
            f"has {free_bytes:,} free; lower {flag}, or give /dev/shm more (docker run --shm-size)"
        )


class SegmentForeign(SegmentError):
    """The object is not one of ours, is cut off, or was written by another version."""


class RegionRefused(SegmentError):
    """A KV region that is not the one agreed upon. The sentence names both values."""


class LookupFault(IpcError):
    """Something about the index."""


class IndexFull(LookupFault):
    """No room for the entry. Nothing was changed."""

    def __init__(self, what: str, live: int, capacity: int, flag: str = "--index-entries"):
        self.live, self.capacity, self.flag = live, capacity, flag
        super().__init__(f"index full: {what}; {live} of {capacity} entries are live; raise {flag}")


class EntryExists(LookupFault):
    """This transfer id is live in the owner's table already."""


class NotOwner(LookupFault):
    """A process tried to write bytes that belong to another one."""


class BootMismatch(LookupFault):
    """The boot id of the caller is not the one in the engine's control line."""


class PoolTooSmall(LookupFault):
    """One engine's share of the pool cannot hold a single block."""

    def __init__(self, nbytes: int, share_bytes: int, flag: str = "--kv-pool-gib"):
        self.nbytes, self.share_bytes, self.flag = nbytes, share_bytes, flag
        super().__init__(
            f"a block of {nbytes:,} bytes does not fit into this engine's share of the pool, "
            f"{share_bytes:,} bytes; raise {flag}"
        )


class StaleRead(LookupFault):
    """The record changed while it was read, or its writer died inside the write."""


class CopyRefused(IpcError):
    """The copy would be wrong: nothing was moved."""


class WaitTimeout(IpcError, TimeoutError):
    """The time budget is spent. Says what was seen last."""


class PeerGone(IpcError, ConnectionError):
    """The other side died, or another process has taken its place."""


class PipeError(IpcError):
    """Something about the KV pipe."""


class PipeClosed(PipeError):
    """One side closed the pipe; the message says which."""


class PipeBusy(PipeError):
    """This end of the pipe already belongs to a living process."""


class FrameTooLarge(PipeError):
    """A frame above the limit of the pipe."""

    def __init__(self, nbytes: int, limit_bytes: int):
        self.nbytes, self.limit_bytes = nbytes, limit_bytes
        super().__init__(
            f"a frame of {nbytes:,} bytes is above this pipe's limit of {limit_bytes:,} "
            "(max_frame_bytes)"
        )


class TensorUnsupported(PipeError):
    """A tensor that is more than its bytes."""
