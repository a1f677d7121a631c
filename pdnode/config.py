"""A command line becomes one frozen NodeConfig, or one sentence that says why not.

Parsed once, checked once, nothing is filled in later. In this order, cheap before dear:

    our flags            flags.split        milliseconds
    vLLM's version       vllm_args          from the installed metadata
    flags we refuse      refusals.early
    devices              assign.assign      from the cores and GPUs of this box
    model and port       _early_checks      where they are spelled out
    vLLM's own parser    vllm_args.parse    imports vLLM: seconds
    port, memory, model  checks
    the embedded model   default_model      converted once, only when it is really needed
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdnode import checks, default_model, flags, kvpath, refusals, turns, vllm_args
from pdnode.assign import Assignment, Machine, assign
from pdnode.device import CpuDevice, Device
from pdnode.errors import ConfigError
from pdnode.flags import FLOWS
from pdnode.nvml import NoNvml, discover_nvml
from pdnode.placement import PlacementConfig
from pdnode.topology import discover_cpu

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
"""vLLM's, needed before vLLM is imported."""
SHARED_GPU_MEMORY = "0.45"
"""Of one GPU for each of two engines: weights and KV of both, and some air."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    engine_id: str
    """``prefill-0``, ``decode-0``, ..."""
    slot: int
    """0.. over all engines of the node: prefill first, then decode."""
    role: str
    device: Device
    tensor_parallel_size: int
    vllm_args: tuple[str, ...]
    """A ``vllm serve`` command line (without "vllm serve") for ``vllm_args.parse``. The engines of
    a node differ in --tensor-parallel-size alone."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    model: str
    """A folder or a hub id."""
    engines: tuple[EngineSpec, ...]
    host: str
    port: int
    flow: str
    placement: PlacementConfig
    roles: str
    """``fixed``: they change only when somebody asks. ``auto``: the node changes them too."""
    asked_kv_path: str
    """``auto``, or the path that every pair takes."""
    strict: bool
    dry_run: bool
    index_entries: int
    """Requests that one engine can offer at once."""
    kv_cache_bytes: int
    """Of one rank, as vLLM's --kv-cache-memory-bytes; an engine has tensor_parallel_size of them.
    0 on GPUs when vLLM takes what --gpu-memory-utilization leaves."""
    kv_pool_bytes: int
    """Of the node, for all ranks together; 0: no pool."""
    trace_path: Path | None
    record_path: Path | None
    start_timeout_s: float
    health_timeout_s: float
    drain_timeout_s: float
    lease_s: float
    frontend_args: argparse.Namespace
    """vLLM's serve arguments for the front end, with model, host and port as above."""
    warnings: tuple[str, ...]
    not_checked: tuple[str, ...]
    """What only a start can tell, for --dry-run."""

    @property
    def prefill(self) -> tuple[EngineSpec, ...]:
        return tuple(engine for engine in self.engines if engine.role == "prefill")

    @property
    def decode(self) -> tuple[EngineSpec, ...]:
        return tuple(engine for engine in self.engines if engine.role == "decode")

    def kv_path(self, owner: EngineSpec, reader: EngineSpec) -> str:
        return kvpath.between(self.asked_kv_path, owner.device, reader.device)


def parse(argv: Sequence[str]) -> NodeConfig:
    """Raises ConfigError; SystemExit(0) after ``--help``."""
    argv = list(argv)
    if any(arg in ("-h", "--help") or arg.startswith("--help=") for arg in argv):
        _help(argv)
    cpu_build = vllm_args.check_version()
    if "--config" in argv:
        argv = vllm_args.expand_config_file(argv)
    own, rest = flags.split(argv)
    refusals.early(rest)
    kvpath.check_ranks(own.kv_path, own.prefill_tp, own.decode_tp)
    assignment = kvpath.prepared(own.kv_path, assign(own, _machine(cpu_build)))
    _early_checks(rest)
    return _build(own, rest, assignment)


def _help(argv: Sequence[str]) -> None:
    flags.own_parser().print_help()
    print("\nand every flag of `vllm serve` (--help=all lists them):\n", flush=True)
    vllm_args.print_help(argv)
    raise SystemExit(0)


def _machine(cpu_build: bool) -> Machine:
    gpus, because = None, ""
    try:
        gpus = discover_nvml()
    except NoNvml as error:
        because = str(error)
    return Machine(discover_cpu(), gpus, because, os.environ.get("CUDA_VISIBLE_DEVICES"), cpu_build)


def _early_checks(rest: Sequence[str]) -> None:
    """Model and port, where they are spelled so plainly that no parser of vLLM's is needed."""
    peek = flags.Parser(add_help=False, allow_abbrev=False)
    peek.add_argument("--model", default=rest[0] if rest and rest[0][:1] != "-" else None)
    peek.add_argument("--host", default=DEFAULT_HOST)
    peek.add_argument("--port", type=int, default=DEFAULT_PORT)
    peek.add_argument("--uds")
    seen, others = peek.parse_known_args(list(rest))
    if any(arg.startswith(("--mo", "--ho", "--po", "--ud")) for arg in others):
        return  # perhaps an abbreviation, which vLLM's parser will expand
    if seen.model is not None:
        checks.model(seen.model, ask_hub=False)
    if seen.uds is None:
        checks.port(seen.host, seen.port)


def _build(own: argparse.Namespace, rest: list[str], assignment: Assignment) -> NodeConfig:
    if sys.stderr.isatty() and not own.dry_run:
        print("pdnode: loading vLLM", file=sys.stderr, flush=True)
    parsed = vllm_args.parse(rest)
    refusals.late(parsed)
    if own.trace and parsed.disable_log_stats:
        raise ConfigError(
            "--trace shows the engines' own times, which --disable-log-stats switches off: leave one "
            "of the two out"
        )
    _pool(own, parsed, assignment)
    _flow(own, parsed)
    host = parsed.host or DEFAULT_HOST
    if parsed.uds is None:
        checks.port(host, parsed.port)
    on_cpu = assignment.prefill[0].kind == "cpu"
    kv_bytes, memory_args = (
        _memory(own, parsed, assignment) if on_cpu else _gpu_memory(parsed, assignment)
    )
    model, model_args, model_note = _model(own, parsed)
    if parsed.model is None and on_cpu and not _asks_to_compile(rest):
        # For 135M parameters on a CPU, compiling takes minutes at every start and gains little.
        model_args.append("--enforce-eager")
    serve_args = [*model_args, *rest, *memory_args]
    engines = _engines(own, assignment, serve_args)
    frontend = vllm_args.parse(serve_args)
    frontend.host = host
    if not any(arg.startswith("--uvicorn-log-level") for arg in rest):
        # The terminal is for what a person must read; a line per request hides it.
        frontend.uvicorn_log_level = "warning"
    return NodeConfig(
        model=model,
        engines=engines,
        host=host,
        port=parsed.port,
        flow=own.flow,
        placement=PlacementConfig(
            prefill_policy=own.prefill_policy,
            decode_policy=own.decode_policy,
            split=own.split,
            stretch=_stretch(own, parsed),
            share_prefixes=True,
        ),
        roles=own.roles,
        asked_kv_path=own.kv_path,
        strict=own.strict,
        dry_run=own.dry_run,
        index_entries=own.index_entries,
        kv_cache_bytes=kv_bytes,
        kv_pool_bytes=own.kv_pool_gib * checks.GIB,
        trace_path=checks.writable("--trace", own.trace),
        record_path=checks.writable("--record-trace", own.record_trace),
        start_timeout_s=own.start_timeout,
        health_timeout_s=own.health_timeout,
        drain_timeout_s=own.drain_timeout,
        lease_s=own.lease,
        frontend_args=frontend,
        warnings=(
            *assignment.warnings,
            *_environment_warnings(on_cpu),
            *kvpath.warnings(own.kv_path, engines, own.strict),
        ),
        not_checked=(*assignment.not_checked, *filter(None, [model_note])),
    )


def _engines(
    own: argparse.Namespace, assignment: Assignment, serve_args: list[str]
) -> tuple[EngineSpec, ...]:
    placed = [("prefill", i, device) for i, device in enumerate(assignment.prefill)]
    placed += [("decode", i, device) for i, device in enumerate(assignment.decode)]
    return tuple(
        _engine(role, i, slot, device, getattr(own, f"{role}_tp"), serve_args)
        for slot, (role, i, device) in enumerate(placed)
    )


def _engine(
    role: str, i: int, slot: int, device: Device, tp: int, serve_args: list[str]
) -> EngineSpec:
    tp_args = ["--tensor-parallel-size", str(tp)] if tp > 1 else []
    return EngineSpec(f"{role}-{i}", slot, role, device, tp, (*serve_args, *tp_args))


def _stretch(own: argparse.Namespace, parsed: argparse.Namespace) -> float:
    """0: prompts in vLLM's own order, or in that of a scheduler that the user chose."""
    theirs = parsed.scheduling_policy != "fcfs" or parsed.scheduler_cls is not None
    return 0.0 if theirs or own.prompt_order == "arrival" else turns.STRETCH


def _flow(own: argparse.Namespace, parsed: argparse.Namespace) -> None:
    if own.flow != FLOWS[0] and parsed.enable_prefix_caching is False:
        raise ConfigError(
            f"--flow {own.flow} hands KV over through the decode engine's prefix cache: leave "
            "--no-enable-prefix-caching out, or use --flow prefill-first"
        )


# ---- memory


def _pool(own: argparse.Namespace, parsed: argparse.Namespace, assignment: Assignment) -> None:
    """Raises ConfigError for a pool that could not serve these engines."""
    if not own.kv_pool_gib:
        return
    asked = f"--kv-pool-gib {own.kv_pool_gib}"
    if assignment.prefill[0].kind != "cpu":
        raise ConfigError(f"{asked} is for CPU engines so far: leave it out")
    if own.prefill_tp != own.decode_tp:
        raise ConfigError(
            f"{asked} needs blocks of one kind: --prefill-tp {own.prefill_tp} and --decode-tp "
            f"{own.decode_tp} must be equal"
        )
    if parsed.enable_prefix_caching is False:
        raise ConfigError(f"{asked} is a prefix cache: leave --no-enable-prefix-caching out")


def _memory(
    own: argparse.Namespace, parsed: argparse.Namespace, assignment: Assignment
) -> tuple[int, list[str]]:
    """(KV bytes of one rank, vLLM arguments to add) on CPU, where the KV lives in /dev/shm."""
    devices = assignment.prefill + assignment.decode
    n_ranks = sum(len(device.rank_cores) for device in devices if isinstance(device, CpuDevice))
    asked = _asked_kv_bytes(parsed)
    pool_bytes = own.kv_pool_gib * checks.GIB
    kv_bytes = asked or checks.default_kv_bytes(n_ranks, pool_bytes)
    index_bytes = checks.index_bytes(own.index_entries, len(devices) + 1)
    pipe_bytes = kvpath.pipe_bytes(own.kv_path, assignment.prefill, assignment.decode)
    checks.shm(kv_bytes, n_ranks, index_bytes + pipe_bytes, pool_bytes)
    return kv_bytes, [] if asked else ["--kv-cache-memory-bytes", str(kv_bytes)]


def _asked_kv_bytes(parsed: argparse.Namespace) -> int | None:
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not text.isdigit() and text:
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE={text} is not a whole number of GiB")
    from_env, from_flag = int(text or 0) * checks.GIB, parsed.kv_cache_memory_bytes
    if from_env and from_flag and from_env != from_flag:
        # vLLM would silently take the variable.
        raise ConfigError(
            f"VLLM_CPU_KVCACHE_SPACE={text} ({from_env} bytes) contradicts --kv-cache-memory-bytes "
            f"{from_flag}: unset the variable or leave the flag out"
        )
    if from_flag is not None and from_flag < checks.MIB:
        raise ConfigError(
            f"--kv-cache-memory-bytes {from_flag} is too little for any KV: give at least 64 MiB "
            f"({64 * checks.MIB})"
        )
    return from_flag or from_env or None


def _gpu_memory(parsed: argparse.Namespace, assignment: Assignment) -> tuple[int, list[str]]:
    asked = parsed.kv_cache_memory_bytes
    default = vllm_args.default("gpu_memory_utilization")
    shrink = assignment.shares_gpu and not asked and parsed.gpu_memory_utilization == default
    return asked or 0, ["--gpu-memory-utilization", SHARED_GPU_MEMORY] if shrink else []


def _environment_warnings(on_cpu: bool) -> list[str]:
    name = "VLLM_CPU_OMP_THREADS_BIND"
    warnings = []
    if on_cpu and name in os.environ:
        warnings = [
            f"{name}={os.environ[name]} is ignored: --prefill-cpus and --decode-cpus decide"
        ]
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        warnings.append(
            "PROMETHEUS_MULTIPROC_DIR is set: /metrics has no pdnode:* metrics; unset it"
        )
    return warnings


# ---- model


def _model(
    own: argparse.Namespace, parsed: argparse.Namespace
) -> tuple[str, list[str], str | None]:
    """(model, vLLM arguments to put in front, what was not checked)."""
    if parsed.model is not None:
        return parsed.model, [], checks.model(parsed.model, ask_hub=not own.dry_run)
    model = default_model.NAME if own.dry_run else _embedded_model()
    name = [] if parsed.served_model_name else ["--served-model-name", default_model.NAME]
    return model, ["--model", model, *name], None


def _asks_to_compile(rest: Sequence[str]) -> bool:
    asking = ("-O", "-cc", "--compilation-config", "--optimization-level", "--no-enforce-eager")
    return any(arg.startswith(asking) for arg in rest)


def _embedded_model() -> str:
    try:
        return str(default_model.ensure())
    except default_model.DefaultModelError as error:
        raise ConfigError(" ".join(str(error).split())) from error
