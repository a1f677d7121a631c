"""Is the process at the other end of a segment alive? The kernel knows: it drops dead locks.

Each end holds an open-file-description lock on one byte of the segment's file. Nobody ever waits
for such a lock; it is only asked about. No pids (they are reused), no heartbeats (a stopped process
is alive). The lock goes when the descriptor is closed, by `release` or by death; children made by
`fork` without `exec` would keep it, so use spawn.
"""

import errno
import fcntl
import os
import struct

from ipc.errors import SegmentMissing
from ipc.segment import SHM_DIR

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid


class Alive:
    """One end's proof of life, and its question about the others."""

    def __init__(self, segment_name: str):
        try:
            self._fd = os.open(f"{SHM_DIR}/{segment_name}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SegmentMissing(f"no segment {segment_name!r} in {SHM_DIR}") from None

    def hold(self, byte: int) -> bool:
        """Take a byte; False when a living process has it."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def held(self, byte: int) -> bool:
        """Whether another open file (another process) holds the byte."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
