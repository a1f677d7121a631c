"""File descriptors to peers of the same user, over a socket in the abstract namespace.

Nothing is left behind by a death: the name goes with the socket. A descriptor of device memory
cannot be re-opened through /proc, so it must be sent (SCM_RIGHTS).
"""

import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence

from ipc.errors import PeerGone, RegionRefused, WaitTimeout

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SEND_S = 5.0


class Door:
    """Hands `fds` to every process of this user that asks, until `close`."""

    def __init__(self, fds: Sequence[int]):
        self.name = f"pdnode-{secrets.token_hex(8)}"
        self._fds = list(fds)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(16)
        threading.Thread(target=self._serve, name="pdnode-door", daemon=True).start()

    def close(self) -> None:
        try:
            # Wakes `accept`; closing alone would leave the thread in it.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Closed before.
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(_SEND_S)
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            return
        try:
            socket.send_fds(peer, [b"f"], self._fds)
        except OSError:
            pass  # The peer went away while it was served: it gets nothing, others still do.


def fetch(name: str, count: int, timeout_s: float) -> list[int]:
    """`count` descriptors from the door `name`. Raises PeerGone, WaitTimeout, RegionRefused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(timeout_s)
        try:
            door.connect("\0" + name)
            _, fds, _, _ = socket.recv_fds(door, 1, count)
        except TimeoutError:
            raise WaitTimeout(f"door {name!r} gave no descriptors in {timeout_s} s") from None
        except OSError as error:
            raise PeerGone(f"nobody is behind door {name!r}: {error.strerror}") from None
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        raise RegionRefused(f"door {name!r} gave {len(fds)} descriptors, expected {count}")
    return fds
