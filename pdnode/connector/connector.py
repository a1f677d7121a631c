"""The facade that vLLM builds twice per engine: once beside its scheduler, once in each worker."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from pdnode.connector.metadata import PdMetadata
from pdnode.connector.scheduler import SchedulerHalf
from pdnode.connector.settings import ConnectorSettings, watch_node
from pdnode.connector.worker import WorkerHalf
from pdnode.vllm_compat import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    cached_blocks,
)

if TYPE_CHECKING:
    import torch

    from pdnode.vllm_compat import (
        BlockPool,
        KVCacheBlocks,
        KVCacheConfig,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )


class PdConnector(KVConnectorBase_V1):
    """Hands KV over by shared memory. One half is None in each process, on purpose."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.from_vllm(vllm_config)
        watch_node(settings.node_pid)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                settings,
                vllm_config.cache_config.block_size,
                vllm_config.parallel_config.tensor_parallel_size,
            )
        else:
            self._worker = WorkerHalf(
                settings, vllm_config.parallel_config.rank, kv_cache_config.num_blocks
            )

    @property
    def requires_kv_delivery(self) -> bool:
        # A prefill leg emits one token and is done: it cannot be preempted with a hand-off pending,
        # and D recomputes what it cannot load.
        return False

    # --- scheduler ---------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self._scheduler is not None
        manager = self._kv_cache_manager
        self._scheduler.bind_block_pool(gpu_block_pool, partial(cached_blocks, manager))

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        assert self._scheduler is not None
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        # Called at the end of every step's accounting.
        assert self._scheduler is not None
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduler.loaded(connector_output.kv_connector_worker_meta)
        self._scheduler.progressed()

    def has_pending_block_frees(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.make_room()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool:
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    def has_pending_push_work(self) -> bool:
        # vLLM asks this on every turn of its loop, idle ones too: the place to let go of blocks
        # that a peer has copied, without keeping the loop spinning for it.
        assert self._scheduler is not None
        self._scheduler.idle()
        return False

    # --- worker ------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager | None:
        assert self._worker is not None
        return self._worker.kv_memory()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.publish(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PdMetadata)
        self._worker.load([*metadata.loads, *metadata.prefix_loads, *metadata.pool_loads])

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Loads are synchronous in the step, and blocks are pinned by reference, not by request:
        # vLLM is never asked to wait for anything.
        return KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self):
        assert self._worker is not None
        return self._worker.take_report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        # After the forward: what it has just filled may go into the pool.
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PdMetadata)
        if metadata.stores:
            self._worker.store(metadata.stores)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
