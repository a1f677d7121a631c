"""Plans against the plainest possible reference: one page at a time."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.copy import HostCopier, plan
from ipc.errors import CopyRefused
from ipc.records import KVLayout

PAGE = 24
LAYERS = 5


def layouts(num_blocks: int, gap: int, base: int, layers: int = LAYERS) -> dict[str, KVLayout]:
    """Named by the order in memory: layers, blocks; `gap` bytes lie unused behind each row."""
    inner_blocks = num_blocks * PAGE + gap
    inner_layers = layers * PAGE + gap
    return {
        "LB": KVLayout(num_blocks, layers, PAGE, PAGE, inner_blocks, base),
        "BL": KVLayout(num_blocks, layers, PAGE, inner_layers, PAGE, base),
        "LB-spaced": KVLayout(num_blocks, layers, PAGE, 2 * PAGE, 2 * inner_blocks, base),
        "BL-spaced": KVLayout(num_blocks, layers, PAGE, 2 * inner_layers, 2 * PAGE, base),
    }


def reference(src: KVLayout, dst: KVLayout, source, target, src_ids, dst_ids) -> np.ndarray:
    expected = target.copy()
    for layer in range(src.num_layers):
        for a, b in zip(src_ids, dst_ids, strict=True):
            at = src.base_offset_bytes + a * src.block_stride_bytes + layer * src.layer_stride_bytes
            to = dst.base_offset_bytes + b * dst.block_stride_bytes + layer * dst.layer_stride_bytes
            expected[to : to + PAGE] = source[at : at + PAGE]
    return expected


def random_bytes(layout: KVLayout, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, layout.extent_bytes + 7, dtype=np.uint8)


def copy_arrays(plan_, source: np.ndarray, target: np.ndarray) -> int:
    return HostCopier().copy(
        plan_, source.ctypes.data, target.ctypes.data,
        src_nbytes=source.nbytes, dst_nbytes=target.nbytes,
    )  # fmt: skip


@st.composite
def cases(draw):
    kinds = ["LB", "BL", "LB-spaced", "BL-spaced"]
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    layers = draw(st.sampled_from([1, LAYERS]))
    src, dst = (
        layouts(n, draw(st.sampled_from([0, 40])), draw(st.sampled_from([0, 64])), layers)[
            draw(st.sampled_from(kinds))
        ]
        for n in sizes
    )
    n = draw(st.integers(0, min(sizes)))
    if draw(st.booleans()):
        src_ids = draw(st.permutations(range(sizes[0])))[:n]
        dst_ids = draw(st.permutations(range(sizes[1])))[:n]
    else:  # Runs, as an allocator gives them.
        a, b = draw(st.integers(0, sizes[0] - n)), draw(st.integers(0, sizes[1] - n))
        src_ids, dst_ids = list(range(a, a + n)), list(range(b, b + n))
        if draw(st.booleans()) and n > 2:
            dst_ids[n // 2 :] = reversed(dst_ids[n // 2 :])
    return src, dst, src_ids, dst_ids


@given(cases())
def test_copy_equals_the_page_by_page_reference(case):
    src, dst, src_ids, dst_ids = case
    source, target = random_bytes(src, 1), random_bytes(dst, 2)
    expected = reference(src, dst, source, target, src_ids, dst_ids)
    made = plan(src, dst, src_ids, dst_ids)
    moved = copy_arrays(made, source, target)
    assert moved == made.total_bytes == len(src_ids) * src.num_layers * PAGE
    np.testing.assert_array_equal(target, expected)


@given(cases())
def test_pieces_of_a_plan_say_the_same_as_its_strips(case):
    src, dst, src_ids, dst_ids = case
    source, target = random_bytes(src, 1), random_bytes(dst, 2)
    expected = reference(src, dst, source, target, src_ids, dst_ids)
    made = plan(src, dst, src_ids, dst_ids)
    for at, to, nbytes in zip(made.src_off, made.dst_off, made.nbytes, strict=True):
        target[to : to + nbytes] = source[at : at + nbytes]
    np.testing.assert_array_equal(target, expected)


def test_one_run_is_one_strip_whatever_the_number_of_layers():
    lb, bl = layouts(100, 0, 0)["LB"], layouts(100, 0, 0)["BL"]
    assert len(plan(lb, lb, range(10, 20), range(50, 60)).strips) == 1
    assert plan(lb, lb, range(10, 20), range(50, 60)).nbytes.tolist() == [10 * PAGE] * LAYERS
    assert plan(bl, bl, range(10, 20), range(50, 60)).nbytes.tolist() == [10 * LAYERS * PAGE]


def test_runs_break_where_either_side_jumps():
    lb = layouts(100, 0, 0)["LB"]
    made = plan(lb, lb, [1, 2, 3, 4, 9], [5, 6, 8, 9, 10])
    assert [strip.nbytes // PAGE for strip in made.strips] == [2, 2, 1]


@pytest.mark.parametrize("src_ids,dst_ids", [([0], [10]), ([-1], [0]), ([20], [0]), ([0, 1], [0])])
def test_blocks_outside_a_layout_and_uneven_lists_are_refused(src_ids, dst_ids):
    with pytest.raises(CopyRefused):
        plan(layouts(20, 0, 0)["LB"], layouts(10, 0, 0)["LB"], src_ids, dst_ids)


def test_layouts_that_differ_are_refused_with_both_values():
    lb = layouts(20, 0, 0)["LB"]
    with pytest.raises(CopyRefused, match="num_layers differs: source 5, destination 1"):
        plan(lb, layouts(20, 0, 0, layers=1)["LB"], [0], [0])
    with pytest.raises(CopyRefused, match="page_bytes"):
        plan(lb, KVLayout(20, LAYERS, 8, 8, 160), [0], [0])


@pytest.mark.parametrize("short", ["source", "destination"])
def test_nothing_moves_when_a_piece_is_outside_a_region(short):
    lb = layouts(20, 0, 0)["LB"]
    source, target = random_bytes(lb, 1), np.zeros(lb.extent_bytes, np.uint8)
    made = plan(lb, lb, [0, 5, 19], [0, 5, 19])
    sizes = {"src_nbytes": lb.extent_bytes, "dst_nbytes": lb.extent_bytes}
    sizes["src_nbytes" if short == "source" else "dst_nbytes"] -= 1
    with pytest.raises(CopyRefused, match=short):
        HostCopier().copy(made, source.ctypes.data, target.ctypes.data, **sizes)
    assert not target.any()


@pytest.mark.parametrize(
    "broken",
    [
        KVLayout(0, 1, 8, 8, 8),
        KVLayout(4, 2, 8, 7, 64),
        KVLayout(4, 2, 8, 8, 24),
        KVLayout(4, 2, 8, 8, 32, -8),
        KVLayout(4, 2, 8, 8, 32, 1),
    ],
)
def test_layout_that_overlaps_or_does_not_fit_is_refused(broken):
    with pytest.raises(CopyRefused):
        broken.validate(64)


@pytest.mark.parametrize("kind", ["LB", "BL", "LB-spaced", "BL-spaced"])
def test_layout_knows_its_order_and_extent(kind):
    layout = layouts(7, 16, 32)[kind]
    layout.validate(layout.extent_bytes)
    assert layout.order == kind[:2]
    with pytest.raises(CopyRefused):
        layout.validate(layout.extent_bytes - 1)


def test_other_threads_run_during_a_copy():
    """If the copy held the GIL, no loop of the other thread could fall inside it."""
    big = KVLayout(1, 4, 64 << 20, 64 << 20, 64 << 20)
    source, target = np.ones(256 << 20, np.uint8), np.ones(256 << 20, np.uint8)
    done, loops = threading.Event(), []

    def count() -> None:
        while not done.is_set():
            loops.append(None)

    thread = threading.Thread(target=count)
    made = plan(big, big, [0], [0])
    thread.start()
    before = len(loops)
    copy_arrays(made, source, target)
    during = len(loops) - before
    done.set()
    thread.join()
    assert during > 100
