"""What this box has, and which GPUs and cores should work together.

Two halves. ``discover_nvml`` and ``discover_cpu`` read the machine into plain records; everything
else is pure, so that a box nobody here owns can be recorded and tested.

    Box(gpus, links)     GPUs in NVML order and one Link per ordered pair of GPUs
    CpuBox(cores)        the cores this process may use, with NUMA node and physical core
    pair(...)            groups of GPUs -> engines, ranks and partners, slowest needed link first
    split_gpus(...)      which GPUs should prefill and which decode when the user did not say

Facts about NVML and its Python module: nvidia-ml-py 13, ``pynvml.py``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# NVML's common ancestors, near to far, with the GB/s a PCIe 4.0 x16 read reaches across each. Only
# their order decides a pairing; the node measures the real numbers at start.
PCIE_GB_PER_S = {"PIX": 22.0, "PXB": 20.0, "PHB": 18.0, "NODE": 15.0, "SYS": 10.0}
SAME_GPU_GB_PER_S = 1000.0
STAGED_FACTOR = 0.25
"""Without peer access a byte crosses PCIe twice and waits for the host in between."""

# Above this many candidates a search would delay the start; such boxes are NVSwitch boxes, where
# every candidate is equal.
MAX_CANDIDATES = 50_000


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG slice. Without a driver only what the flag said is known."""

    uuid: str
    """``GPU-...`` or ``MIG-...``; empty when it could not be looked up."""
    index: int | None = None
    """NVML index (PCI bus order); None for a MIG slice or a UUID that was not looked up."""
    name: str = ""
    numa_node: int | None = None

    @property
    def is_mig(self) -> bool:
        return self.uuid.startswith("MIG-")

    @property
    def cuda_name(self) -> str:
        """How CUDA_VISIBLE_DEVICES names it: by UUID where known, which no order can change."""
        return self.uuid or str(self.index)

    def __str__(self) -> str:
        return self.uuid if self.index is None else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class Link:
    """From one GPU to another: may it read the other's memory, and over what."""

    p2p_read: bool
    nvlinks: int = 0
    nvlink_gb_per_s: float = 0.0
    """GB/s of one NVLink in one direction."""
    ancestor: str = "SYS"

    @property
    def gb_per_s(self) -> float:
        pcie = PCIE_GB_PER_S.get(self.ancestor, PCIE_GB_PER_S["SYS"])
        if not self.p2p_read:
            return pcie * STAGED_FACTOR
        return max(self.nvlinks * self.nvlink_gb_per_s, pcie)

    @property
    def kind(self) -> str:
        if not self.p2p_read:
            return "staged"
        return "nvlink" if self.nvlinks else "pcie-p2p"

    @property
    def path(self) -> str:
        return "cuda-ipc" if self.p2p_read else "staged"


SAME_GPU = Link(p2p_read=True, nvlinks=1, nvlink_gb_per_s=SAME_GPU_GB_PER_S, ancestor="PIX")
NO_PEER_ACCESS = Link(p2p_read=False)


@dataclass(frozen=True, slots=True)
class Box:
    gpus: tuple[Gpu, ...]
    links: dict[tuple[str, str], Link] = field(default_factory=dict, hash=False)
    """(reader's UUID, owner's UUID) -> Link; a pair that is missing has no peer access."""

    def link(self, reader: Gpu, owner: Gpu) -> Link:
        if reader.is_mig or owner.is_mig:
            # CUDA IPC does not cross MIG slices, not even within one slice of one GPU.
            return NO_PEER_ACCESS
        if reader.uuid == owner.uuid:
            return SAME_GPU
        return self.links.get((reader.uuid, owner.uuid), NO_PEER_ACCESS)


@dataclass(frozen=True, slots=True)
class EngineLink:
    """Decode engine ``decode`` reads the KV of prefill engine ``prefill``; engines by position."""

    prefill: int
    decode: int
    kind: str
    path: str
    gb_per_s: float
    """Of the slowest link that a rank of the decode engine needs."""


@dataclass(frozen=True, slots=True)
class Pairing:
    prefill: tuple[tuple[Gpu, ...], ...]
    """GPUs of each prefill engine in rank order."""
    decode: tuple[tuple[Gpu, ...], ...]
    partner: tuple[int, ...]
    """For each prefill engine the decode engine that reads it fastest, shared out evenly."""
    links: tuple[EngineLink, ...]
    """Every pair, prefill-major."""

    @property
    def slowest_gb_per_s(self) -> float:
        return min(self._partner_speeds())

    @property
    def total_gb_per_s(self) -> float:
        return sum(self._partner_speeds())

    def _partner_speeds(self) -> list[float]:
        return [e.gb_per_s for e in self.links if self.partner[e.prefill] == e.decode]


def needed_ranks(prefill_tp: int, decode_tp: int) -> Iterator[tuple[int, int]]:
    """(prefill rank, decode rank) whose KV heads overlap: the only links a hand-off uses."""
    for p, d in itertools.product(range(prefill_tp), range(decode_tp)):
        # Rank r of n holds the heads [r/n, (r+1)/n) of the whole.
        if p * decode_tp < (d + 1) * prefill_tp and d * prefill_tp < (p + 1) * decode_tp:
            yield p, d


def engine_link(
    box: Box, owner: Sequence[Gpu], reader: Sequence[Gpu], indices: tuple[int, int] = (0, 0)
) -> EngineLink:
    needed = [box.link(reader[d], owner[p]) for p, d in needed_ranks(len(owner), len(reader))]
    slowest = min(needed, key=lambda link: link.gb_per_s)
    # One rank without peer access makes the hand-off wait for its staged copy.
    staged = next((link for link in needed if not link.p2p_read), slowest)
    return EngineLink(*indices, staged.kind, staged.path, slowest.gb_per_s)


def pair(
    box: Box, prefill: Sequence[Gpu], decode: Sequence[Gpu], prefill_tp: int, decode_tp: int
) -> Pairing:
    """Ranks and partners such that the slowest link a hand-off needs is as fast as possible.

    An engine keeps the GPUs its position in the list gives it, because the user chose them. Free
    are the order of the ranks inside a decode engine, and which decode engine serves which prefill
    engine first. Ties keep the given order.
    """
    owners, readers = _groups(prefill, prefill_tp), _groups(decode, decode_tp)
    reachable = {
        (i, j): _best_rank_order(box, reader, [owner])[0][0]
        for i, owner in enumerate(owners)
        for j, reader in enumerate(readers)
    }
    partner = _partners(reachable, len(owners), len(readers))
    for j, reader in enumerate(readers):
        served = [owner for i, owner in enumerate(owners) if partner[i] == j]
        readers[j] = _best_rank_order(box, reader, served or owners)[1]
    links = tuple(
        engine_link(box, owner, reader, (i, j))
        for i, owner in enumerate(owners)
        for j, reader in enumerate(readers)
    )
    return Pairing(tuple(owners), tuple(readers), partner, links)


def _groups(gpus: Sequence[Gpu], tp: int) -> list[tuple[Gpu, ...]]:
    return [tuple(gpus[i : i + tp]) for i in range(0, len(gpus), tp)]


def _best_rank_order(
    box: Box, reader: tuple[Gpu, ...], owners: Sequence[tuple[Gpu, ...]]
) -> tuple[tuple[float, float], tuple[Gpu, ...]]:
    """((slowest, total GB/s), the reader's GPUs in the order that reaches them)."""

    def worth(order: tuple[Gpu, ...]) -> tuple[float, float]:
        speeds = [
            box.link(order[d], owner[p]).gb_per_s
            for owner in owners
            for p, d in needed_ranks(len(owner), len(order))
        ]
        return min(speeds), sum(speeds)

    every = {box.link(gpu, peer).gb_per_s for gpu in reader for owner in owners for peer in owner}
    orders = itertools.permutations(reader) if len(every) > 1 else [reader]
    best = max(orders, key=worth)
    return worth(best), best


def _partners(
    speeds: dict[tuple[int, int], float], n_prefill: int, n_decode: int
) -> tuple[int, ...]:
    """One decode engine per prefill engine, no decode engine used more often than needed."""
    seats = [j for _ in range(-(-n_prefill // n_decode)) for j in range(n_decode)]
    if len(set(speeds.values())) == 1:
        return tuple(seats[:n_prefill])

    def slowest_then_total(chosen: tuple[int, ...]) -> tuple[float, float]:
        found = [speeds[i, j] for i, j in enumerate(chosen)]
        return min(found), sum(found)

    candidates = itertools.islice(itertools.permutations(seats, n_prefill), MAX_CANDIDATES)
    return max(candidates, key=slowest_then_total)


def split_gpus(
    box: Box, gpus: Sequence[Gpu], prefill_tp: int, decode_tp: int
) -> tuple[list[Gpu], list[Gpu]]:
    """Halve the GPUs between the roles: fast links inside an engine first, then between partners.

    A tensor parallel engine uses its inner links in every layer of every step, a hand-off only once
    per request. An odd GPU goes to prefill, which is limited by compute. Raises ValueError when the
    halves cannot be whole engines.
    """
    if len(gpus) == 1 and prefill_tp == decode_tp == 1:
        return list(gpus), list(gpus)
    size = _prefill_share(len(gpus), prefill_tp, decode_tp)
    contiguous = list(gpus[:size]), list(gpus[size:])
    if len({box.link(a, b).gb_per_s for a, b in itertools.permutations(gpus, 2)}) == 1:
        return contiguous

    def worth(chosen: tuple[Gpu, ...]) -> tuple[float, float, float]:
        rest = [gpu for gpu in gpus if gpu not in chosen]
        pairing = pair(box, chosen, rest, prefill_tp, decode_tp)
        inner = min(
            (_inner_gb_per_s(box, group) for group in pairing.prefill + pairing.decode),
            default=0.0,
        )
        return inner, pairing.slowest_gb_per_s, pairing.total_gb_per_s

    # Each candidate costs a pairing, so this search is kept to boxes of up to eight GPUs.
    if len(gpus) > 8:
        return contiguous
    best = max(itertools.combinations(gpus, size), key=worth)
    return list(best), [gpu for gpu in gpus if gpu not in best]


def _prefill_share(n_gpus: int, prefill_tp: int, decode_tp: int) -> int:
    sizes = [
        size for size in range(prefill_tp, n_gpus, prefill_tp) if (n_gpus - size) % decode_tp == 0
    ]
    if not sizes:
        raise ValueError(f"{n_gpus} GPUs do not make engines of {prefill_tp} and of {decode_tp}")
    return min(sizes, key=lambda size: (abs(2 * size - n_gpus), -size))


def _inner_gb_per_s(box: Box, group: Sequence[Gpu]) -> float:
    speeds = [box.link(a, b).gb_per_s for a, b in itertools.permutations(group, 2)]
    return min(speeds, default=SAME_GPU_GB_PER_S)


@dataclass(frozen=True, slots=True)
class Core:
    cpu: int
    """The number the kernel and taskset use."""
    node: int
    physical: tuple[int, int]
    """(package, core): hyperthreads of one physical core share it."""


@dataclass(frozen=True, slots=True)
class CpuBox:
    cores: tuple[Core, ...]
    """Those in this process's affinity mask, ordered so that neighbours share a node and a core."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(core.cpu for core in self.cores)

    def sort(self, cpus: Sequence[int]) -> list[int]:
        return [cpu for cpu in self.cpus if cpu in set(cpus)]

    def halves(self) -> tuple[list[int], list[int]]:
        """Cores for prefill and decode. An odd core goes to prefill: it is limited by compute and
        scales with cores, while decode waits for memory. A physical core is not shared out unless
        there is only one; a single core serves both.
        """
        if len(self.cores) == 1:
            return list(self.cpus), list(self.cpus)
        physical = list(dict.fromkeys(core.physical for core in self.cores))
        if len(physical) == 1:
            cut = -(-len(self.cores) // 2)
            return list(self.cpus[:cut]), list(self.cpus[cut:])
        first = set(physical[: -(-len(physical) // 2)])
        return (
            [core.cpu for core in self.cores if core.physical in first],
            [core.cpu for core in self.cores if core.physical not in first],
        )


def discover_cpu(sysfs: Path = Path("/sys/devices/system")) -> CpuBox:
    cores = [_core(sysfs, cpu) for cpu in os.sched_getaffinity(0)]
    return CpuBox(tuple(sorted(cores, key=lambda core: (core.node, core.physical, core.cpu))))


def _core(sysfs: Path, cpu: int) -> Core:
    folder = sysfs / "cpu" / f"cpu{cpu}"
    node = next((int(path.name[4:]) for path in folder.glob("node[0-9]*")), 0)
    package, core = (
        _read_int(folder / "topology" / name, default)
        # Containers without this part of sysfs: take every logical CPU for a core.
        for name, default in (("physical_package_id", 0), ("core_id", cpu))
    )
    return Core(cpu, node, (package, core))


def _read_int(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
