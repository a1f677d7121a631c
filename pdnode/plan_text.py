"""What ``--dry-run`` prints: the engines, their arguments, and how KV would travel."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence

from pdnode.config import EngineSpec, NodeConfig

MIB = 1 << 20


def render(config: NodeConfig) -> str:
    """The whole plan, without a final newline."""
    return "\n".join(
        (
            "pdnode plan: nothing was started",
            "",
            *_head(config),
            "",
            *table(("engine", "role", "device", "TP", "environment"), _engines(config)),
            "",
            *table(("KV from", "to", "path", "link"), _paths(config)),
            "",
            "vLLM arguments of every engine (and --tensor-parallel-size where TP is not 1):",
            "  " + shlex.join(_common_args(config)),
            *_notes("not checked", config.not_checked),
            *_notes("warnings", config.warnings),
        )
    )


def _head(config: NodeConfig) -> Iterator[str]:
    uds = config.frontend_args.uds
    yield f"model  {config.model}"
    yield f"serve  {uds or f'http://{config.host}:{config.port}'}"
    yield f"flow   {config.flow}{', strict' if config.strict else ''}"
    yield f"KV     {_kv(config)}"


def _kv(config: NodeConfig) -> str:
    if not config.kv_cache_bytes:
        return "what vLLM's --gpu-memory-utilization leaves on each GPU"
    n_ranks = sum(engine.tensor_parallel_size for engine in config.engines)
    where = "/dev/shm" if config.engines[0].device.kind == "cpu" else "GPU memory"
    return (
        f"{config.kv_cache_bytes // MIB} MiB per rank, "
        f"{config.kv_cache_bytes * n_ranks // MIB} MiB of {where} for {n_ranks} rank(s)"
    )


def _engines(config: NodeConfig) -> Iterator[tuple[str, ...]]:
    for engine in config.engines:
        environment = " ".join(f"{k}={shlex.quote(v)}" for k, v in engine.device.env().items())
        yield (
            engine.engine_id,
            engine.role,
            engine.device.describe(),
            str(engine.tensor_parallel_size),
            environment,
        )


def _paths(config: NodeConfig) -> Iterator[tuple[str, ...]]:
    for p, d in itertools.product(config.prefill, config.decode):
        yield p.engine_id, d.engine_id, config.kv_path(p, d), p.device.link_to(d.device)


def _common_args(config: NodeConfig) -> Sequence[str]:
    def without_tp(engine: EngineSpec) -> Sequence[str]:
        cut = -2 if engine.tensor_parallel_size > 1 else None
        return engine.vllm_args[:cut]

    return without_tp(config.engines[0])


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Lines of columns that are wide enough."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _notes(title: str, notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield from ("", f"{title}:", *(f"  - {note}" for note in notes))
