"""What we ask of a worker that is no connector's business: vLLM's hook for that, ``worker_extension_cls``.

vLLM takes the name of one class. Where the user has one too, it gets a name of ours that says which is
his, and resolves it, in each worker, to a class made there that derives from both.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from pdnode.connector import generators
from pdnode.vllm_compat import compile_logprobs, init_logger

logger = init_logger(__name__)

METHOD = "pdnode_made_ready"
FILE_STORE = "file://"


class WorkerExtension:
    def pdnode_made_ready(self) -> str:
        """Called once in each worker. Returns the file by which an engine's ranks found each other,
        or "": vLLM leaves it behind when a worker is killed."""
        worker: Any = self
        generators.keep_states(worker.model_runner)
        _warm(worker)
        init_method: str = worker.distributed_init_method
        return init_method.removeprefix(FILE_STORE) if init_method.startswith(FILE_STORE) else ""


def _warm(worker: Any) -> None:
    try:
        compile_logprobs(worker.device)
    except Exception:
        # For example no C++ compiler on the machine: that costs nobody anything who asks for none.
        logger.exception("a request for logprobs would end this engine; compiling for them failed")


PATH = f"{__name__}.{WorkerExtension.__name__}"
_AND, _DOT = "+", "/"


def name_with(theirs: str) -> str:
    """The name of a class that is ours and, unless "", the user's. Raises ValueError, saying why not.

    Imports the user's module, as each worker will.
    """
    if not theirs or theirs == PATH:
        return PATH
    _combined(theirs)
    return f"{PATH}{_AND}{theirs.replace('.', _DOT)}"


def __getattr__(name: str) -> type:
    """How vLLM gets at such a class: as an attribute of this module, whose name may have no dot."""
    ours, plus, theirs = name.partition(_AND)
    if not plus or ours != WorkerExtension.__name__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _combined(theirs.replace(_DOT, "."))


@functools.cache
def _combined(theirs: str) -> type:
    module, _, name = theirs.rpartition(".")
    try:
        base = getattr(importlib.import_module(module), name)
        both = type(name, (base, WorkerExtension), {})
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if getattr(both, METHOD) is not WorkerExtension.pdnode_made_ready:
        raise ValueError(f"its {METHOD} is in the place of the node's own: give it another name")
    return both
