"""Pairing on recorded boxes: the slowest link that a hand-off needs is as fast as the box allows.

Link counts and speeds as ``nvidia-smi topo -m`` and ``nvlink -s`` show them on such machines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from pdnode.device import CpuDevice, GpuDevice, format_ids
from pdnode.topology import (
    NO_PEER_ACCESS,
    Box,
    Core,
    CpuBox,
    Gpu,
    Link,
    discover_cpu,
    needed_ranks,
    pair,
    split_gpus,
)


def gpu(index: int, name: str = "", numa_node: int = 0) -> Gpu:
    return Gpu(f"GPU-{index:08x}", index, name, numa_node)


def box(n_gpus: int, link: Callable[[int, int], Link], name: str = "") -> Box:
    gpus = tuple(gpu(i, name, numa_node=i * 2 // n_gpus) for i in range(n_gpus))
    links = {
        (a.uuid, b.uuid): link(a.index or 0, b.index or 0)
        for a, b in itertools.permutations(gpus, 2)
    }
    return Box(gpus, links)


def half(n_gpus: int) -> Callable[[int, int], bool]:
    return lambda a, b: (a < n_gpus // 2) == (b < n_gpus // 2)


DGX_H100 = box(8, lambda a, b: Link(True, 18, 26.562, "SYS"), "NVIDIA H100 80GB HBM3")


def _a100_bridges(a: int, b: int) -> Link:
    bridged = {a, b} in ({0, 1}, {2, 3})
    return Link(True, 12 if bridged else 0, 25.0, "NODE" if a // 2 == b // 2 else "SYS")


A100_BRIDGES = box(4, _a100_bridges, "NVIDIA A100 80GB PCIe")


def _l20(a: int, b: int) -> Link:
    same_switch, same_socket = a // 2 == b // 2, half(8)(a, b)
    return Link(True, ancestor="PIX" if same_switch else "NODE" if same_socket else "SYS")


L20_PCIE = box(8, _l20, "NVIDIA L20")

# P2P works below one root complex only, as on many two-socket servers.
TWO_SOCKETS = box(
    4, lambda a, b: Link(half(4)(a, b), ancestor="PHB" if half(4)(a, b) else "SYS"), "NVIDIA A10"
)

MIG = Box(tuple(Gpu(f"MIG-{i}", None, "NVIDIA A100-SXM4-40GB") for i in range(4)))

ONE_GPU = box(1, lambda a, b: NO_PEER_ACCESS, "NVIDIA H200")


def indices(groups: tuple[tuple[Gpu, ...], ...]) -> list[list[int | None]]:
    return [[gpu.index for gpu in group] for group in groups]


def pick(where: Box, *numbers: int) -> list[Gpu]:
    return [where.gpus[i] for i in numbers]


def test_dgx_h100_keeps_the_given_order_because_all_links_are_equal() -> None:
    pairing = pair(DGX_H100, pick(DGX_H100, 5, 1, 0, 4), pick(DGX_H100, 7, 6, 2, 3), 2, 2)
    assert indices(pairing.prefill) == [[5, 1], [0, 4]]
    assert indices(pairing.decode) == [[7, 6], [2, 3]]
    assert pairing.partner == (0, 1)
    assert {(link.kind, link.path) for link in pairing.links} == {("nvlink", "cuda-ipc")}
    assert pairing.slowest_gb_per_s == pytest.approx(18 * 26.562)


def test_nvlink_bridges_decide_the_partners() -> None:
    pairing = pair(A100_BRIDGES, pick(A100_BRIDGES, 0, 2), pick(A100_BRIDGES, 3, 1), 1, 1)
    assert pairing.partner == (1, 0)
    assert pairing.slowest_gb_per_s == 300
    kinds = {(e.prefill, e.decode): (e.kind, e.path) for e in pairing.links}
    assert kinds[0, 1] == ("nvlink", "cuda-ipc")
    assert kinds[0, 0] == ("pcie-p2p", "cuda-ipc")


def test_nvlink_bridges_decide_the_ranks_of_a_decode_engine() -> None:
    pairing = pair(A100_BRIDGES, pick(A100_BRIDGES, 0, 2), pick(A100_BRIDGES, 3, 1), 2, 2)
    assert indices(pairing.prefill) == [[0, 2]]
    assert indices(pairing.decode) == [[1, 3]]
    assert pairing.links[0].kind == "nvlink"


def test_split_gives_bridged_gpus_to_different_roles() -> None:
    prefill, decode = split_gpus(A100_BRIDGES, A100_BRIDGES.gpus, 1, 1)
    pairing = pair(A100_BRIDGES, prefill, decode, 1, 1)
    assert pairing.slowest_gb_per_s == 300


def test_split_keeps_bridges_inside_tensor_parallel_engines() -> None:
    shuffled = pick(A100_BRIDGES, 0, 2, 1, 3)
    prefill, decode = split_gpus(A100_BRIDGES, shuffled, 2, 2)
    assert [gpu.index for gpu in prefill] == [0, 1]
    assert [gpu.index for gpu in decode] == [2, 3]


def test_pcie_box_pairs_gpus_below_one_switch() -> None:
    pairing = pair(L20_PCIE, pick(L20_PCIE, 0, 2, 4, 6), pick(L20_PCIE, 7, 5, 3, 1), 1, 1)
    assert pairing.partner == (3, 2, 1, 0)
    assert {link.path for link in pairing.links} == {"cuda-ipc"}
    assert {link.kind for link in pairing.links} == {"pcie-p2p"}
    assert pairing.slowest_gb_per_s == 22


def test_pcie_box_splits_every_switch_between_the_roles() -> None:
    prefill, decode = split_gpus(L20_PCIE, L20_PCIE.gpus, 1, 1)
    assert [gpu.index // 2 for gpu in prefill if gpu.index is not None] == [0, 1, 2, 3]
    assert pair(L20_PCIE, prefill, decode, 1, 1).slowest_gb_per_s == 22


def test_two_sockets_pair_within_a_socket_and_stage_across() -> None:
    pairing = pair(TWO_SOCKETS, pick(TWO_SOCKETS, 0, 2), pick(TWO_SOCKETS, 3, 1), 1, 1)
    assert pairing.partner == (1, 0)
    paths = {(e.prefill, e.decode): e.path for e in pairing.links}
    assert paths == {(0, 0): "staged", (0, 1): "cuda-ipc", (1, 0): "cuda-ipc", (1, 1): "staged"}


def test_one_rank_without_peer_access_stages_the_whole_hand_off() -> None:
    pairing = pair(TWO_SOCKETS, pick(TWO_SOCKETS, 0, 1), pick(TWO_SOCKETS, 2, 3), 2, 2)
    assert pairing.links[0].path == "staged"


def test_mig_slices_are_staged() -> None:
    pairing = pair(MIG, pick(MIG, 0, 1), pick(MIG, 2, 3), 1, 1)
    assert {link.path for link in pairing.links} == {"staged"}
    prefill, decode = split_gpus(MIG, MIG.gpus, 1, 1)
    assert (prefill, decode) == (list(MIG.gpus[:2]), list(MIG.gpus[2:]))


def test_one_gpu_serves_both_roles() -> None:
    prefill, decode = split_gpus(ONE_GPU, ONE_GPU.gpus, 1, 1)
    assert prefill == decode == list(ONE_GPU.gpus)
    assert pair(ONE_GPU, prefill, decode, 1, 1).links[0].path == "cuda-ipc"


@pytest.mark.parametrize("tps", [(2, 1), (2, 2)])
def test_one_gpu_cannot_be_split_into_larger_engines(tps: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 GPUs"):
        split_gpus(ONE_GPU, ONE_GPU.gpus, *tps)


def test_odd_gpu_goes_to_prefill() -> None:
    prefill, decode = split_gpus(DGX_H100, DGX_H100.gpus[:5], 1, 1)
    assert (len(prefill), len(decode)) == (3, 2)


def test_unequal_engines_share_out_the_partners() -> None:
    pairing = pair(L20_PCIE, pick(L20_PCIE, 0, 2, 4, 6), pick(L20_PCIE, 1, 5), 1, 1)
    assert sorted(pairing.partner) == [0, 0, 1, 1]
    assert pairing.partner == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "prefill_tp, decode_tp, expected",
    [
        (1, 1, [(0, 0)]),
        (2, 2, [(0, 0), (1, 1)]),
        (1, 2, [(0, 0), (0, 1)]),
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (2, 4, [(0, 0), (0, 1), (1, 2), (1, 3)]),
    ],
)
def test_only_ranks_with_common_heads_are_needed(
    prefill_tp: int, decode_tp: int, expected: list[tuple[int, int]]
) -> None:
    assert list(needed_ranks(prefill_tp, decode_tp)) == expected


def test_different_tp_counts_only_the_needed_links() -> None:
    pairing = pair(A100_BRIDGES, pick(A100_BRIDGES, 0), pick(A100_BRIDGES, 2, 3), 1, 2)
    assert pairing.links[0].kind == "pcie-p2p"
    assert pairing.slowest_gb_per_s == 10


def test_no_permutation_of_the_given_gpus_changes_the_slowest_link() -> None:
    best = 22.0
    for order in itertools.permutations((1, 3, 5, 7)):
        pairing = pair(L20_PCIE, pick(L20_PCIE, 0, 2, 4, 6), pick(L20_PCIE, *order), 1, 1)
        assert pairing.slowest_gb_per_s == best


# ---- devices


def test_gpu_device_shows_its_own_gpus_first_then_the_peers() -> None:
    device = GpuDevice(tuple(pick(DGX_H100, 2, 3)), tuple(pick(DGX_H100, 0, 1)), DGX_H100)
    assert device.env() == {
        "CUDA_VISIBLE_DEVICES": "GPU-00000002,GPU-00000003,GPU-00000000,GPU-00000001",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert device.describe() == "GPU 2, GPU 3"


def test_mig_device_shows_its_slice_alone() -> None:
    prefill, decode = (GpuDevice((MIG.gpus[i],), (MIG.gpus[1 - i],), MIG) for i in (0, 1))
    assert prefill.env()["CUDA_VISIBLE_DEVICES"] == "MIG-0"
    assert prefill.kv_path_to(decode) == "staged"


def test_shared_gpu_is_named_once() -> None:
    only = ONE_GPU.gpus
    device = GpuDevice(only, only, ONE_GPU)
    assert device.env()["CUDA_VISIBLE_DEVICES"] == "GPU-00000000"
    assert (device.kv_path_to(device), device.link_to(device)) == ("cuda-ipc", "same GPU")


def test_cpu_device_binds_every_rank() -> None:
    device = CpuDevice(((0, 1, 2), (4, 6)))
    assert device.env() == {"VLLM_CPU_OMP_THREADS_BIND": "0-2|4,6"}
    assert device.describe() == "CPU cores 0-2 | 4,6"
    assert device.kv_path_to(device) == "shm"


@pytest.mark.parametrize(
    "ids, text", [([0], "0"), ([3, 1, 2], "1-3"), ([0, 2, 3, 7], "0,2-3,7"), ([], "")]
)
def test_format_ids(ids: list[int], text: str) -> None:
    assert format_ids(ids) == text


# ---- cores


def cores(*rows: tuple[int, int, int]) -> CpuBox:
    return CpuBox(tuple(Core(cpu, node, (node, core)) for cpu, node, core in rows))


@pytest.mark.parametrize(
    "where, expected",
    [
        pytest.param(cores((0, 0, 0), (1, 0, 1)), ([0], [1]), id="two cores"),
        pytest.param(cores((0, 0, 0)), ([0], [0]), id="one core"),
        pytest.param(cores((0, 0, 0), (1, 0, 0)), ([0], [1]), id="two threads of one core"),
        pytest.param(cores((0, 0, 0), (1, 0, 1), (2, 0, 2)), ([0, 1], [2]), id="odd"),
        pytest.param(
            cores((0, 0, 0), (4, 0, 0), (1, 0, 1), (5, 0, 1)), ([0, 4], [1, 5]), id="siblings"
        ),
        pytest.param(
            cores((0, 0, 0), (2, 0, 1), (1, 1, 0), (3, 1, 1)), ([0, 2], [1, 3]), id="two sockets"
        ),
    ],
)
def test_halves_of_the_cores(where: CpuBox, expected: tuple[list[int], list[int]]) -> None:
    assert where.halves() == expected


def test_discover_cpu_reads_sysfs(tmp_path: Path) -> None:
    found = discover_cpu()
    assert found.cpus
    for core in found.cores:
        folder = tmp_path / "cpu" / f"cpu{core.cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "node1").mkdir()
        (folder / "topology" / "physical_package_id").write_text("1\n")
        (folder / "topology" / "core_id").write_text("7\n")
    recorded = discover_cpu(tmp_path)
    assert {(core.node, core.physical) for core in recorded.cores} == {(1, (1, 7))}


def test_discover_cpu_without_sysfs_takes_every_cpu_for_a_core(tmp_path: Path) -> None:
    found = discover_cpu(tmp_path)
    assert [core.physical for core in found.cores] == [(0, core.cpu) for core in found.cores]
