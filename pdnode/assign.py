"""Placement flags and a machine in, devices of the engines out. Pure, and refuses contradictions.

Who gets what, in this order:

    --prefill-gpus and --decode-gpus    exactly those; a role's engines = its GPUs / its TP size
    --prefill-cpus and --decode-cpus    exactly those; a role's engines divide its cores
    neither                             the visible GPUs in halves, else the allowed cores in halves
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdnode.device import CpuDevice, Device, GpuDevice, format_ids
from pdnode.errors import ConfigError
from pdnode.flags import CPU_LISTS, GPU_LISTS
from pdnode.topology import Box, CpuBox, Gpu, pair, split_gpus


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a placement depends on besides the flags."""

    cpu: CpuBox
    gpus: Box | None
    """None when they cannot be asked, for ``no_gpus_because``."""
    no_gpus_because: str
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES of the launcher."""
    cpu_build: bool
    """The installed vLLM is the CPU build."""


@dataclass(frozen=True, slots=True)
class Assignment:
    prefill: tuple[Device, ...]
    decode: tuple[Device, ...]
    warnings: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    shares_gpu: bool = False
    """Both roles run on one GPU, so each may use less than half of its memory."""


def assign(flags: argparse.Namespace, machine: Machine) -> Assignment:
    """Raises ConfigError."""
    on_gpus = _both_sides(flags, GPU_LISTS)
    on_cpus = _both_sides(flags, CPU_LISTS)
    if on_gpus and on_cpus:
        raise ConfigError(
            f"{_given(flags, GPU_LISTS)} and {_given(flags, CPU_LISTS)} contradict each other: "
            "prefill and decode run either both on GPUs or both on CPU cores"
        )
    if on_gpus or on_cpus:
        _needs_both_sides(flags, machine.cpu, GPU_LISTS if on_gpus else CPU_LISTS)
    if on_gpus:
        return _named_gpus(flags, machine)
    visible = (_visible(machine) or []) if machine.gpus else []
    if visible and not on_cpus and not machine.cpu_build:
        return _all_gpus(flags, machine, visible)
    return _cpus(flags, machine, unused_gpus=len(visible) if not on_cpus else 0)


def _both_sides(flags: argparse.Namespace, names: Sequence[str]) -> bool:
    return any(getattr(flags, name) is not None for name in names)


def _given(flags: argparse.Namespace, names: Sequence[str]) -> str:
    return " ".join(
        f"{_flag(name)} {getattr(flags, name)}"
        for name in names
        if getattr(flags, name) is not None
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _needs_both_sides(flags: argparse.Namespace, cpu: CpuBox, names: Sequence[str]) -> None:
    missing = [name for name in names if getattr(flags, name) is None]
    if not missing:
        return
    (given,) = (name for name in names if name not in missing)
    if names is GPU_LISTS:
        taken = parse_ids(_flag(given), getattr(flags, given))
        example = str(next(i for i in range(len(taken) + 1) if i not in taken))
    else:
        taken = _cores(given, getattr(flags, given), cpu)
        example = format_ids([core for core in cpu.cpus if core not in taken])
        if not example:
            raise ConfigError(
                f"{_given(flags, names)} takes every core this process may use: leave at least "
                f"one for {_flag(missing[0])}"
            )
    raise ConfigError(
        f"{_given(flags, names)} names only one side: add {_flag(missing[0])}, "
        f"for example {_flag(missing[0])} {example}"
    )


def parse_ids(flag: str, text: str) -> list[int | str]:
    """``0-2,GPU-8f3a`` -> [0, 1, 2, "GPU-8f3a"]. Raises ConfigError."""
    ids: list[int | str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", item):
            first, last = int(match[1]), int(match[2] or match[1])
            if not first <= last < first + 4096:
                raise ConfigError(f"{flag} {text}: {item} is not a range")
            ids += range(first, last + 1)
        else:
            ids.append(item)
    if not ids:
        raise ConfigError(f"{flag} names nothing: both sides need at least one, such as {flag} 0")
    if twice := {str(i) for i in ids if ids.count(i) > 1}:
        raise ConfigError(f"{flag} {text} names {', '.join(sorted(twice))} twice")
    return ids


# ---- CPU


def _cores(name: str, text: str, cpu: CpuBox) -> list[int]:
    flag = _flag(name)
    ids = parse_ids(flag, text)
    if words := [i for i in ids if isinstance(i, str)]:
        raise ConfigError(f"{flag} {text}: {words[0]} is not a core or a range such as 0-3")
    if unknown := [i for i in ids if i not in cpu.cpus]:
        raise ConfigError(
            f"{flag} {text}: this process may not use core {format_ids(unknown)}; "
            f"it may use {format_ids(cpu.cpus)}"
        )
    return cpu.sort(ids)


def _cpus(flags: argparse.Namespace, machine: Machine, unused_gpus: int) -> Assignment:
    if not machine.cpu_build:
        raise ConfigError(
            "engines on CPU cores need the CPU build of vLLM: install pdnode[cpu], or run on a "
            "machine with GPUs"
        )
    warnings: list[str] = []
    if unused_gpus:
        warnings.append(
            f"{unused_gpus} GPU(s) stay unused: the installed vLLM is the CPU build; "
            "install pdnode[cuda]"
        )
    prefill, decode = _core_sides(flags, machine.cpu, warnings)
    return Assignment(
        _core_engines("prefill", prefill, flags.prefill_engines or 1, flags.prefill_tp, warnings),
        _core_engines("decode", decode, flags.decode_engines or 1, flags.decode_tp, warnings),
        tuple(warnings),
    )


def _core_sides(
    flags: argparse.Namespace, cpu: CpuBox, warnings: list[str]
) -> tuple[list[int], list[int]]:
    if flags.prefill_cpus is None:
        prefill, decode = cpu.halves()
        if prefill == decode:
            warnings.append(
                f"prefill and decode share core {format_ids(prefill)}, the only one this process "
                "may use, so they slow each other down"
            )
        return prefill, decode
    prefill, decode = (_cores(name, getattr(flags, name), cpu) for name in CPU_LISTS)
    if both := set(prefill) & set(decode):
        raise ConfigError(
            f"core {format_ids(sorted(both))} is in both --prefill-cpus {flags.prefill_cpus} and "
            f"--decode-cpus {flags.decode_cpus}: give every core to one side"
        )
    return prefill, decode


def _core_engines(
    role: str, cores: list[int], n_engines: int, tp: int, warnings: list[str]
) -> tuple[CpuDevice, ...]:
    if n_engines > len(cores):
        warnings.append(
            f"{n_engines} {role} engines share {len(cores)} core(s) ({format_ids(cores)}), so they "
            f"slow each other down: name more with --{role}-cpus or lower --{role}-engines"
        )
    groups = share_out(cores, n_engines)
    if short := [group for group in groups if len(group) < tp]:
        warnings.append(
            f"--{role}-tp {tp} puts {tp} ranks on {len(short[0])} core(s) of a {role} engine, so "
            f"they slow each other down: name more with --{role}-cpus or lower --{role}-tp"
        )
    return tuple(CpuDevice(tuple(map(tuple, share_out(group, tp)))) for group in groups)


def share_out(cores: Sequence[int], n: int) -> list[list[int]]:
    """``n`` neighbouring groups, as even as possible; with fewer cores than that, one core each."""
    if n > len(cores):
        return [[cores[i % len(cores)]] for i in range(n)]
    size, extra = divmod(len(cores), n)
    starts = [i * size + min(i, extra) for i in range(n + 1)]
    return [list(cores[a:b]) for a, b in itertools.pairwise(starts)]


# ---- GPU


def _visible(machine: Machine) -> list[Gpu] | None:
    """The launcher's GPUs in CUDA's order; None if neither driver nor environment names them."""
    if machine.visible_devices is None:
        return list(machine.gpus.gpus) if machine.gpus else None
    found: list[Gpu] = []
    for token in filter(None, (part.strip() for part in machine.visible_devices.split(","))):
        gpu = _by_token(token, machine.gpus)
        # CUDA ignores an entry that names nothing, and everything behind it.
        if gpu is None:
            break
        found.append(gpu)
    return found


def _by_token(token: str, box: Box | None) -> Gpu | None:
    """One entry of CUDA_VISIBLE_DEVICES: an NVML index, or the beginning of a UUID."""
    if box is None:
        return Gpu("", int(token)) if token.isdigit() else Gpu(token) if _is_uuid(token) else None
    if token.isdigit():
        return next((gpu for gpu in box.gpus if gpu.index == int(token)), None)
    return _by_uuid(token, box.gpus) if _is_uuid(token) else None


def _is_uuid(token: str) -> bool:
    return token.upper().startswith(("GPU-", "MIG-"))


def _by_uuid(prefix: str, gpus: Sequence[Gpu]) -> Gpu | None:
    found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(prefix.lower())]
    return found[0] if len(found) == 1 else None


def _named_gpus(flags: argparse.Namespace, machine: Machine) -> Assignment:
    _may_use_gpus(flags, machine)
    visible = _visible(machine)
    prefill, decode = (_gpus(name, getattr(flags, name), visible, machine) for name in GPU_LISTS)
    if both := [str(gpu) for gpu in prefill if gpu in decode]:
        raise ConfigError(
            f"{', '.join(both)} is in both --prefill-gpus {flags.prefill_gpus} and --decode-gpus "
            f"{flags.decode_gpus}: give every GPU to one side (on a box with one GPU leave both "
            "flags out, then the roles share it)"
        )
    return _gpu_engines(flags, machine, prefill, decode)


def _may_use_gpus(flags: argparse.Namespace, machine: Machine) -> None:
    if flags.dry_run:
        return
    if machine.gpus is None:
        raise ConfigError(
            f"{_given(flags, GPU_LISTS)} cannot be used: {machine.no_gpus_because}; use "
            "--prefill-cpus and --decode-cpus, or see the plan with --dry-run"
        )
    if machine.cpu_build:
        raise ConfigError(
            f"{_given(flags, GPU_LISTS)} cannot be used: the installed vLLM is the CPU build; "
            "install pdnode[cuda], or use --prefill-cpus and --decode-cpus"
        )


def _gpus(name: str, text: str, visible: list[Gpu] | None, machine: Machine) -> list[Gpu]:
    flag = _flag(name)
    gpus = [_gpu(flag, i, visible) for i in parse_ids(flag, text)]
    if twice := [str(gpu) for gpu in gpus if gpus.count(gpu) > 1]:
        raise ConfigError(f"{flag} {text} names {twice[0]} twice")
    return gpus


def _gpu(flag: str, id_: int | str, visible: list[Gpu] | None) -> Gpu:
    if isinstance(id_, str) and not _is_uuid(id_):
        raise ConfigError(f"{flag}: {id_} is neither a GPU number nor a UUID such as GPU-8f3a...")
    if visible is None:
        return Gpu("", id_) if isinstance(id_, int) else Gpu(id_)
    found = (
        _by_uuid(id_, visible)
        if isinstance(id_, str)
        else visible[id_]
        if id_ < len(visible)
        else None
    )
    if found is None:
        there = ", ".join(f"{i} ({gpu})" for i, gpu in enumerate(visible)) or "none"
        raise ConfigError(f"{flag}: there is no GPU {id_}; visible here: {there}")
    return found


def _all_gpus(flags: argparse.Namespace, machine: Machine, visible: list[Gpu]) -> Assignment:
    assert machine.gpus is not None
    try:
        prefill, decode = split_gpus(machine.gpus, visible, flags.prefill_tp, flags.decode_tp)
    except ValueError:
        raise ConfigError(
            f"the {len(visible)} visible GPU(s) cannot be split into prefill engines of "
            f"--prefill-tp {flags.prefill_tp} and decode engines of --decode-tp {flags.decode_tp}: "
            "lower one, or name the GPUs with --prefill-gpus and --decode-gpus"
        ) from None
    return _gpu_engines(flags, machine, prefill, decode)


def _gpu_engines(
    flags: argparse.Namespace, machine: Machine, prefill: list[Gpu], decode: list[Gpu]
) -> Assignment:
    for role, gpus in (("prefill", prefill), ("decode", decode)):
        _whole_engines(flags, role, gpus)
    box = machine.gpus
    pairing = pair(box or Box(()), prefill, decode, flags.prefill_tp, flags.decode_tp)
    shares_gpu = prefill == decode
    warnings = []
    if shares_gpu:
        warnings.append(f"prefill and decode share {prefill[0]}, the only one visible")
    return Assignment(
        tuple(GpuDevice(own, tuple(decode), box) for own in pairing.prefill),
        tuple(GpuDevice(own, tuple(prefill), box) for own in pairing.decode),
        tuple(warnings),
        _not_checked(machine),
        shares_gpu,
    )


def _whole_engines(flags: argparse.Namespace, role: str, gpus: Sequence[Gpu]) -> None:
    tp, n_engines, n_gpus = (
        getattr(flags, f"{role}_tp"),
        getattr(flags, f"{role}_engines"),
        len(gpus),
    )
    if tp > 1 and any(gpu.is_mig for gpu in gpus):
        raise ConfigError(
            f"--{role}-tp {tp} needs {tp} GPUs in one process, and CUDA shows it one MIG slice "
            f"only: use --{role}-tp 1, or whole GPUs"
        )
    if n_gpus % tp:
        raise ConfigError(
            f"{n_gpus} {role} GPU(s) cannot be divided into engines of --{role}-tp {tp}: change "
            f"--{role}-tp, or name a multiple of {tp} GPUs with --{role}-gpus"
        )
    if n_engines not in (None, n_gpus // tp):
        raise ConfigError(
            f"--{role}-engines {n_engines} contradicts {n_gpus} GPU(s) / --{role}-tp {tp} = "
            f"{n_gpus // tp} engine(s): leave --{role}-engines out, it divides CPU cores"
        )


def _not_checked(machine: Machine) -> tuple[str, ...]:
    notes = []
    if machine.gpus is None:
        notes.append(
            f"that these GPUs exist, and may read each other's memory: {machine.no_gpus_because}"
        )
    if machine.cpu_build:
        notes.append("that vLLM runs on these GPUs: the CPU build is installed, not pdnode[cuda]")
    return tuple(notes)
