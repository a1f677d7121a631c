"""The node's engines as its config has them, none of them started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pdnode import fingerprint, vllm_args
from pdnode.connector import replay, worker_extension
from pdnode.connector.settings import ConnectorSettings
from pdnode.engine import Engine, kv_transfer_config
from pdnode.vllm_compat import engine_config, order_prompts

if TYPE_CHECKING:
    from pdnode.config import EngineSpec, NodeConfig
    from pdnode.nursery import Nursery
    from pdnode.rundir import RunDir
    from pdnode.vllm_compat import VllmConfig


def build(
    config: NodeConfig, run_dir: RunDir, index: str, pool: str, nursery: Nursery | None
) -> list[Engine]:
    """``index`` and ``pool``: names of the shared memory that engines meet in (pool: or empty)."""
    engines = []
    for spec in config.engines:
        template = _template(config, spec)
        settings = ConnectorSettings(
            node_pid=os.getpid(),
            index_name=index,
            segment_prefix=f"{run_dir.segment_prefix}.{spec.engine_id}",
            engine_id=spec.engine_id,
            slot=spec.slot,
            boot_id=0,
            lease_s=config.lease_s,
            fingerprint=fingerprint.of(template),
            gpu=spec.device.kind == "gpu",
            kv_paths=tuple(config.kv_path(owner, spec) for owner in config.engines),
            kv_served=tuple({config.kv_path(spec, reader): None for reader in config.engines}),
            ranks=tuple(engine.tensor_parallel_size for engine in config.engines),
            kv_heads=template.model_config.get_total_num_kv_heads(),
            pool_name=pool,
        )
        engines.append(
            Engine(
                spec,
                template,
                settings,
                run_dir.path,
                run_dir.log_dir,
                log_stats=not config.frontend_args.disable_log_stats,
                nursery=nursery,
            )
        )
    return engines


def _template(config: NodeConfig, spec: EngineSpec) -> VllmConfig:
    """vLLM's config of the engine, as it is before each of its boots."""
    args = vllm_args.parse(spec.vllm_args)
    if config.trace_path is not None:
        args.enable_logging_iteration_details = True  # when an engine's steps were
    args.logits_processors = [*(args.logits_processors or ()), replay.PATH]
    args.worker_extension_cls = worker_extension.name_with(args.worker_extension_cls)
    template = engine_config(args, kv_transfer_config(spec.engine_id))
    if config.placement.stretch:
        order_prompts(template)
    return template
