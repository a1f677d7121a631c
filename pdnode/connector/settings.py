"""What an engine's processes must know of the node, and what ties their life to it."""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pdnode.reaper import private_segments, unlink_all

if TYPE_CHECKING:
    from pdnode.vllm_compat import VllmConfig


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Travels as vLLM's ``kv_connector_extra_config``. One per engine start."""

    node_pid: int
    index_name: str
    segment_prefix: str
    engine_id: str
    slot: int
    boot_id: int
    """Random per engine start: names this life of the engine, never a pid."""
    lease_s: float
    fingerprint: str
    """Hex digest of all that two engines must agree on before one may read the other's KV."""
    kv_flag: str = "--kv-cache-memory-bytes"
    gpu: bool = False
    """The KV is in GPU memory, which vLLM allocates."""
    kv_paths: tuple[str, ...] = ()
    """How this engine reads the KV of the engine in each slot; a missing one is ``shm``."""
    kv_served: tuple[str, ...] = ()
    """The ways in which other engines read this one's."""
    ranks: tuple[int, ...] = ()
    """Tensor parallel size of the engine in each slot; a missing one is 1."""
    kv_heads: int = 1
    """Of the model, over all ranks of an engine."""
    pool_name: str = ""
    """Of the node's KV pool; empty: there is none."""

    def pool_of(self, rank: int) -> str:
        return f"{self.pool_name}{rank}"

    def kv_path_from(self, owner: int) -> str:
        return self.kv_paths[owner] if owner < len(self.kv_paths) else "shm"

    def ranks_of(self, slot: int) -> int:
        return self.ranks[slot] if slot < len(self.ranks) else 1

    def to_extra_config(self) -> dict[str, Any]:
        return {"pdnode": asdict(self)}

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ConnectorSettings:
        assert vllm_config.kv_transfer_config is not None
        return cls(**vllm_config.kv_transfer_config.kv_connector_extra_config["pdnode"])


def watch_node(node_pid: int) -> None:
    """End this process at once when the launcher's process ends, however it ended."""
    try:
        fd = os.pidfd_open(node_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
        # vLLM's rings: the reaper may come too late to see which were ours.
        unlink_all(private_segments(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="pdnode-node-watch", daemon=True).start()
