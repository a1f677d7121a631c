"""One of vLLM's own schedulers with our scheduler half in it, without a model or a worker."""

from __future__ import annotations

import secrets

from ipc.index import Index
from ipc.records import Role, State
from pdnode import vllm_args
from pdnode.connector import connector as facade
from pdnode.connector.metadata import LoadReport
from pdnode.connector.settings import ConnectorSettings
from pdnode.engine import kv_transfer_config
from pdnode.vllm_compat import engine_config, order_prompts

MAX_LEN = 512


def index_of(engines: int, entries: int = 64, name: str = "") -> Index:
    """An index in which so many engines are ready (boot id: slot + 1), with one slot to spare."""
    index = Index.create(
        name or f"pdtest-{secrets.token_hex(6)}",
        engine_slots=engines + 1,
        entries_per_engine=entries,
        node_boot_id=5,
    )
    for slot in range(engines):
        index.set_control(
            slot, engine_id=f"e{slot}", role=Role.BOTH, state=State.READY, boot_id=slot + 1,
            restarts=0,
        )  # fmt: skip
    return index


def scheduler(
    index_name: str,
    slot: int,
    model: str,
    *,
    block_size: int,
    blocks: int,
    chunk: int | None = None,
    ahead: bool = False,
    lease_s: float = 60.0,
    kv_paths: tuple[str, ...] = (),
):
    """(scheduler, block hasher). ``chunk``: tokens of a step. ``ahead``: asynchronous scheduling."""
    import torch
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    settings = ConnectorSettings(
        node_pid=0, index_name=index_name, segment_prefix="", engine_id=f"e{slot}", slot=slot,
        boot_id=slot + 1, lease_s=lease_s, fingerprint="", kv_paths=kv_paths,
    )  # fmt: skip
    limits = ["--max-num-batched-tokens", str(chunk), "--max-num-seqs", "8"] if chunk else []
    args = vllm_args.parse(
        ["--model", model, "--block-size", str(block_size), "--max-model-len", str(MAX_LEN),
         "--dtype", "float32", "--enforce-eager", *limits,
         "--async-scheduling" if ahead else "--no-async-scheduling"]
    )  # fmt: skip
    transfer = kv_transfer_config(f"e{slot}", extra_config=settings.to_extra_config())
    config = engine_config(args, transfer)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    order_prompts(config)
    made = config.scheduler_config.get_scheduler_cls()(
        config,
        cache,
        StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
    )
    return made, get_request_block_hasher(block_size, hash_fn)


def model_output(ids, sampled, report: LoadReport, invalid: set[int]):
    """What a worker gives for a step."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
        kv_connector_output=KVConnectorOutput(
            kv_connector_worker_meta=report if report.done or report.failed else None,
            invalid_block_ids=invalid,
        ),
    )


def without_process_ties(monkeypatch) -> None:
    """A test is no engine: it keeps its process group, and does not end with a node."""
    monkeypatch.setattr(facade, "watch_node", lambda pid: None)
