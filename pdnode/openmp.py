"""The cores and threads that vLLM gives a CPU worker, for a worker that is forked.

vLLM says them in OpenMP's environment variables, which it sets while it makes the worker's process.
OpenMP reads those when it is loaded: a spawned worker's does, a forked one's was loaded long before.
Such a worker would run a thread on every core of the machine, and so would every other engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = "OMP_NUM_THREADS"
CORES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
"""Of GNU's, of Intel's and of any OpenMP; vLLM sets one of them, and lists each core by its number."""
NUMBER = re.compile(r"\d+")


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch starts no other, and what it compiles is for one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def obey_in_children() -> None:
    """From now on a forked child does what these variables say where they are not as they are now."""
    before = _asked()
    os.register_at_fork(after_in_child=lambda: _obey(before))


def _asked() -> dict[str, str]:
    return {name: os.environ[name] for name in (THREADS, *CORES) if name in os.environ}


def _obey(before: dict[str, str]) -> None:
    asked = _asked()
    if asked == before:
        return
    # Threads that this one starts inherit its cores, OpenMP's among them.
    if cores := {int(n) for name in CORES for n in NUMBER.findall(asked.get(name, ""))}:
        os.sched_setaffinity(0, cores)
    if THREADS in asked:
        import torch

        torch.set_num_threads(int(asked[THREADS]))
