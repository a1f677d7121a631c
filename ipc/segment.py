"""One POSIX shared-memory object: create, attach, close, unlink; and sweep what the dead left.

`posix_fallocate` takes the pages at creation. `ftruncate` alone would succeed on a full tmpfs and
kill the process with SIGBUS at the first touch. `multiprocessing.shared_memory` is not used because
before Python 3.13 it unlinks a segment when ANY process that attached it exits.
"""

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Callable

import numpy as np
import posix_ipc

from ipc.errors import NoSharedMemory, SegmentError, SegmentExists, SegmentForeign, SegmentMissing

SHM_DIR = "/dev/shm"
PAGE_BYTES = mmap.PAGESIZE
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; madvise(2)

# Through ctypes and not mmap.madvise: populating 1 GiB takes seconds, and this releases the GIL.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """A mapped shared-memory object. The creator unlinks it; everybody closes their own mapping.

    name: without the slash; nbytes: whole pages; buf: the `mmap`; address: where byte 0 is mapped.
    """

    def __init__(self, name: str, buf: mmap.mmap, readonly: bool):
        self.name = name
        self.nbytes = len(buf)
        self.readonly = readonly
        self.buf: mmap.mmap | None = buf
        self.address = np.frombuffer(buf, np.uint8).ctypes.data

    @classmethod
    def create(cls, name: str, nbytes: int, *, purpose: str, flag: str) -> "Segment":
        """Make a zeroed object of at least `nbytes` bytes (rounded up to pages), mode 0600.

        Raises SegmentExists; NoSharedMemory naming `purpose`, the numbers and `flag`.
        """
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        shm = _open(name, posix_ipc.O_CREX)
        try:
            _allocate(shm.fd, name, size, purpose, flag)
            return cls(name, mmap.mmap(shm.fd, size), readonly=False)
        except BaseException:
            unlink(name)
            raise
        finally:
            shm.close_fd()

    @classmethod
    def attach(cls, name: str, *, readonly: bool = False) -> "Segment":
        """Map an existing object. Raises SegmentMissing; SegmentForeign when it is empty."""
        shm = _open(name, 0)
        try:
            size = os.fstat(shm.fd).st_size
            if size < PAGE_BYTES or size % PAGE_BYTES:
                raise SegmentForeign(f"segment {name!r} is {size} bytes: not whole pages, cut off")
            access = mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE
            return cls(name, mmap.mmap(shm.fd, size, access=access), readonly)
        finally:
            shm.close_fd()

    def populate(self, write: bool) -> None:
        """Touch every page now, not in the first request. Contents stay; old kernels ignore it."""
        advice = _MADV_POPULATE_WRITE if write and not self.readonly else _MADV_POPULATE_READ
        _libc.madvise(self.address, self.nbytes, advice)

    def close(self) -> None:
        """Forget the mapping. Memory goes when the last view of it (a tensor, say) goes."""
        buf, self.buf = self.buf, None
        if buf is None:
            return
        try:
            buf.close()
        except BufferError:
            pass  # A view still uses it; its death unmaps. Unmapping now would be a crash later.

    def unlink(self) -> bool:
        """Take the name away; mappings stay valid. False when it was gone already."""
        return unlink(self.name)


def unlink(name: str) -> bool:
    """Take a name out of /dev/shm. False when there was none."""
    try:
        posix_ipc.unlink_shared_memory("/" + name)
    except posix_ipc.ExistentialError:
        return False
    return True


def names(prefix: str) -> list[str]:
    """The names in /dev/shm that start with `prefix`, sorted."""
    return sorted(name for name in os.listdir(SHM_DIR) if name.startswith(prefix))


def sweep(prefix: str, keep: Callable[[str], bool]) -> list[str]:
    """Unlink every name with `prefix` that `keep` does not want; return those removed."""
    return [name for name in names(prefix) if not keep(name) and unlink(name)]


def _open(name: str, flags: int) -> posix_ipc.SharedMemory:
    if not _NAME.fullmatch(name):
        raise SegmentError(f"segment name {name!r}: 1 to 63 of letters, digits, '_', '.', '-'")
    try:
        return posix_ipc.SharedMemory("/" + name, flags=flags, mode=0o600)
    except posix_ipc.ExistentialError:
        if flags:
            raise SegmentExists(f"segment {name!r} exists already in {SHM_DIR}") from None
        raise SegmentMissing(f"no segment {name!r} in {SHM_DIR}") from None


def _allocate(fd: int, name: str, size: int, purpose: str, flag: str) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # EFBIG: more than a file may be; for the user the same story as a full tmpfs.
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(fd, 0)  # Give back what was taken before the tmpfs was full, then count.
        stat = os.statvfs(SHM_DIR)
        free = stat.f_bavail * stat.f_frsize
        raise NoSharedMemory(name, purpose, size, free, flag) from None
