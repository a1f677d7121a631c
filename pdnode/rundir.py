"""The node's private directory (sockets, logs, lock) and its names in shared memory.

One directory per node life under a 0700 base of this user. Its lock is held by the launcher as long
as it lives: whoever gets the lock of a directory knows that its node is gone and may clear it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pdnode import reaper
from pdnode.errors import NodeStartError

LOGS = "logs"
LOGS_KEPT = 5


def base_dir() -> Path:
    """Short on purpose: a Unix socket path has 107 bytes."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"pdnode-{os.getuid()}"


def segment_prefix(boot_id: str) -> str:
    return f"pdnode.{os.getuid()}.{boot_id}"


class RunDir:
    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.segment_prefix = segment_prefix(boot_id)
        base = base_dir()
        base.mkdir(mode=0o700, exist_ok=True)
        self._refuse_foreign(base)
        self.path = base / boot_id
        self.path.mkdir(mode=0o700)
        self.log_dir = _new_log_dir(base, boot_id)
        self._lock = _try_lock(self.path / "lock")
        self._reaper = self._start_reaper()

    @staticmethod
    def _refuse_foreign(base: Path) -> None:
        stat = base.lstat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
            raise NodeStartError(
                f"{base} belongs to uid {stat.st_uid} with mode {stat.st_mode & 0o777:o}, and pdnode "
                "keeps its sockets only in a directory of its own user with mode 700; remove it or "
                "set XDG_RUNTIME_DIR"
            )

    def _start_reaper(self) -> subprocess.Popen:
        os.environ[reaper.MARK] = self.boot_id
        pidfd = os.pidfd_open(os.getpid())
        try:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    reaper.__file__,
                    str(pidfd),
                    self.boot_id,
                    str(self.path),
                    self.segment_prefix,
                ],
                pass_fds=(pidfd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Remove what is left. The reaper goes when the launcher's process does."""
        reaper.remove_leftovers(self.path, self.segment_prefix)
        os.close(self._lock)


def _new_log_dir(base: Path, boot_id: str) -> Path:
    """Logs outlive their node, or nobody could read why it ended; the newest few are kept.

    And those of every node that runs: the restart of an engine goes on writing there.
    """
    logs = base / LOGS
    logs.mkdir(mode=0o700, exist_ok=True)
    ended = [path for path in logs.iterdir() if not (base / path.name).exists()]
    old = sorted(ended, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in old[LOGS_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)
    path = logs / boot_id
    path.mkdir(mode=0o700)
    return path


def open_log(path: Path) -> int:
    """A file descriptor to append to. Somebody may have tidied up: no engine stays down for that."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def make_private(run_dir: Path) -> None:
    """Mode 600 for every file and socket: a second lock behind the directory's 700."""
    for path in run_dir.iterdir():
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o600)


def sweep_dead() -> list[str]:
    """Clear what nodes of this user left behind that are no longer alive; never a living one's."""
    cleared = []
    base = base_dir()
    for path in base.iterdir() if base.is_dir() else ():
        if path.name == LOGS:
            continue
        lock = _try_lock(path / "lock")
        if lock is None:
            continue
        files = reaper.recorded_files(path)
        reaper.kill_marked(path.name)
        reaper.unlink_all(files)
        reaper.remove_leftovers(path, segment_prefix(path.name))
        os.close(lock)
        cleared.append(path.name)
    return cleared


def _try_lock(path: Path) -> int | None:
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
