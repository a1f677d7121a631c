"""What a stopped node must not leave on the machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
ANONYMOUS = re.compile(rf"{SHARED_MEMORY}/((?:psm_|sem\.mp-|vllm_dist_)\S+)")
"""Names that Python's multiprocessing and vLLM make; nothing in them says whose they are."""


def names_of(boot_id: str) -> list[str]:
    """Names in shared memory that a node made itself."""
    return sorted(path.name for path in SHARED_MEMORY.iterdir() if boot_id in path.name)


def anonymous_names(pids: Iterable[int]) -> frozenset[str]:
    """Names that vLLM made in these processes, as far as they have them mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(ANONYMOUS.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
    return frozenset(found)


def still_there(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if (SHARED_MEMORY / name).exists())
