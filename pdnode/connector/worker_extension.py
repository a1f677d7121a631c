"""What we ask of a worker that is no connector's business: vLLM's hook for that, ``worker_extension_cls``."""

from __future__ import annotations

from typing import Any

from pdnode.connector import generators

PATH = "pdnode.connector.worker_extension.WorkerExtension"
METHOD = "pdnode_made_ready"
FILE_STORE = "file://"


class WorkerExtension:
    def pdnode_made_ready(self) -> str:
        """Called once in each worker. Returns the file by which an engine's ranks found each other,
        or "": vLLM leaves it behind when a worker is killed."""
        worker: Any = self
        generators.keep_states(worker.model_runner)
        init_method: str = worker.distributed_init_method
        return init_method.removeprefix(FILE_STORE) if init_method.startswith(FILE_STORE) else ""
