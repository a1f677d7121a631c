"""What must happen when the launcher is gone, done by a process that cannot die with it.

Standard library only, so that it costs a few megabytes and starts in milliseconds. It sleeps on the
launcher's pidfd; when the launcher has ended, in whatever way, it kills every process that carries
the node's mark in its environment and removes the node's segments and run directory.

The mark is an environment variable: every descendant inherits it, in every phase of its start, with
no cooperation. Pids are never remembered, so none can be mistaken.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "PDNODE_BOOT_ID"
SHM_DIR = Path("/dev/shm")
KILL_DEADLINE_S = 5.0


def marked(boot_id: str) -> list[int]:
    """Pids of this user's processes that carry the node's mark, this process excepted."""
    wanted = f"{MARK}={boot_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_marked(boot_id: str) -> list[int]:
    """SIGKILL them until none is left; returns those that outlive the deadline."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    segments: set[Path] = set()
    while (pids := marked(boot_id)) and time.monotonic() < deadline:
        # Before the first is killed: its children would end with it, unseen.
        segments |= segments_of_stopped(pids)
        _signal(pids, signal.SIGKILL)
        time.sleep(0.02)
    unlink_all(segments)
    return pids


def segments_of_stopped(pids: Iterable[int]) -> set[Path]:
    """SIGSTOP, so that they make no more; then the private segments of all of them."""
    pids = list(pids)
    _signal(pids, signal.SIGSTOP)
    return set().union(*map(private_segments, pids))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def unlink_all(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


FILES_SUFFIX = ".files"


def record_files(run_dir: Path, name: str, paths: Iterable[Path]) -> None:
    """For the day these processes are gone before anybody could look at their maps."""
    record = Path(run_dir, name + FILES_SUFFIX)
    record.touch(mode=0o600)
    record.write_text("\n".join(map(str, paths)))


def recorded_files(run_dir: Path) -> set[Path]:
    found: set[Path] = set()
    for path in run_dir.glob(f"*{FILES_SUFFIX}"):
        found |= {Path(line) for line in path.read_text().splitlines() if line}
    return found


PRIVATE = tuple(f"{SHM_DIR}/{name}" for name in ("psm_", "sem.mp-", "vllm_dist_"))
"""Rings of vLLM's executor, locks, and where the CPU ranks of an engine add up their tensors."""


def private_segments(pid: int) -> set[Path]:
    """Segments that Python and vLLM made for this process and its workers, in whose names nothing says
    whose they are: a SIGKILL leaves nobody to unlink them."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            name = line.rpartition(" ")[2]
            if name.startswith(PRIVATE):
                found.add(Path(name))
    return found


def remove_leftovers(run_dir: Path, segment_prefix: str) -> list[str]:
    """Unlink the node's segments, then its run directory. Returns the names that were there."""
    removed = []
    for path in SHM_DIR.glob(f"{segment_prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path.name)
    shutil.rmtree(run_dir, ignore_errors=True)
    return removed


def main(argv: list[str]) -> int:
    pidfd, boot_id, run_dir, segment_prefix = int(argv[0]), argv[1], Path(argv[2]), argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    files = recorded_files(run_dir)
    left = kill_marked(boot_id)
    unlink_all(files)
    remove_leftovers(run_dir, segment_prefix)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
