"""Head slices between engines of different tensor parallel size, against plain torch indexing."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ipc.copy import HostCopier, plan
from ipc.errors import CopyRefused
from ipc.heads import HeadSlice, head_reads, held
from ipc.records import KVLayout

HEADS, LAYERS, TOKENS, CONTENT, BASE = 8, 3, 4, 6, 32
# Axes in memory, of [layers, blocks, heads, tokens, content].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4),
}  # fmt: skip
SIZES = ((1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (16, 2), (2, 16))


class Rank:
    """The KV of one rank: `cache` is [layers, blocks, heads, tokens, content] over its bytes."""

    def __init__(self, order: str, blocks: int, heads: int, seed: int):
        shape = (LAYERS, blocks, heads, TOKENS, CONTENT)
        axes = ORDERS[order]
        steps, step = [0] * 5, 1
        for axis in reversed(axes):
            steps[axis], step = step, step * shape[axis]
        noise = torch.Generator().manual_seed(seed)
        self.bytes = torch.randint(0, 256, (BASE + step,), generator=noise, dtype=torch.uint8)
        self.cache = self.bytes.as_strided(shape, steps, BASE)
        page = heads * TOKENS * CONTENT
        self.layout = KVLayout(blocks, LAYERS, page, steps[1], steps[0], BASE)
        self.layout.validate(self.bytes.numel())


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(SIZES))
    orders = draw(st.tuples(*[st.sampled_from(sorted(ORDERS))] * 2))
    blocks = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    n = draw(st.integers(0, min(blocks)))
    ids = [draw(st.permutations(range(count)))[:n] for count in blocks]
    if draw(st.booleans()):  # Runs, as an allocator gives them.
        ids = [sorted(each) for each in ids]
    return sizes, orders, blocks, ids


@given(cases())
@example(((1, 2), ("LBHNC", "LBHNC"), (9, 5), [[2, 3, 4, 8], [0, 1, 2, 4]]))
@example(((2, 1), ("BLNHC", "LBHNC"), (5, 9), [[0, 1, 2, 4], [2, 3, 4, 8]]))
def test_every_rank_gets_its_heads_and_nothing_else(case):
    (src_tp, dst_tp), orders, blocks, (src_ids, dst_ids) = case
    sources = [
        Rank(orders[0], blocks[0], len(held(HEADS, src_tp, rank)), rank) for rank in range(src_tp)
    ]
    for source, rank in zip(sources, range(src_tp), strict=True):
        # Ranks that hold the same heads hold the same bytes.
        twin = next(r for r in range(src_tp) if held(HEADS, src_tp, r) == held(HEADS, src_tp, rank))
        source.cache.copy_(sources[twin].cache)
    for rank in range(dst_tp):
        mine = held(HEADS, dst_tp, rank)
        target = Rank(orders[1], blocks[1], len(mine), 100 + rank)
        before, expected = target.bytes.clone(), target.cache.clone()
        for place, head in enumerate(mine):
            owner = next(r for r in range(src_tp) if head in held(HEADS, src_tp, r))
            at = head - held(HEADS, src_tp, owner).start
            expected[:, dst_ids, place] = sources[owner].cache[:, src_ids, at]
        moved = 0
        for owner, heads in head_reads(HEADS, src_tp, dst_tp, rank, TOKENS):
            heads = heads._replace(src_order=orders[0][2:], dst_order=orders[1][2:])
            made = plan(sources[owner].layout, target.layout, src_ids, dst_ids, heads)
            moved += HostCopier().copy(
                made, sources[owner].bytes.data_ptr(), target.bytes.data_ptr(),
                src_nbytes=sources[owner].bytes.numel(), dst_nbytes=target.bytes.numel(),
            )  # fmt: skip
        assert torch.equal(target.cache, expected)
        assert moved == len(src_ids) * LAYERS * target.layout.page_bytes
        assert torch.equal(target.bytes[:BASE], before[:BASE])


def test_half_of_the_heads_is_one_piece_a_page_or_a_token():
    whole, half = Rank("LBHNC", 8, 8, 0).layout, Rank("LBHNC", 8, 4, 0).layout
    heads = head_reads(HEADS, 1, 2, 1, TOKENS)[0][1]
    made = plan(whole, half, range(8), range(8), heads)
    assert [(s.nbytes, s.rows) for s in made.strips] == [(4 * TOKENS * CONTENT, 8 * LAYERS)]
    by_token = heads._replace(src_order="NHC", dst_order="NHC")
    made = plan(whole, half, range(8), range(8), by_token)
    assert [(s.nbytes, s.rows) for s in made.strips] == [(4 * CONTENT, 8 * LAYERS * TOKENS)]


def test_all_heads_of_a_page_are_copied_like_the_page():
    layout = Rank("BLNHC", 8, 8, 0).layout
    heads = HeadSlice(8, TOKENS, 8, 8, src_order="NHC", dst_order="NHC")
    assert plan(layout, layout, [1, 2, 5], [3, 4, 5], heads) == plan(
        layout, layout, [1, 2, 5], [3, 4, 5]
    )


def test_more_ranks_than_heads_share_the_reading():
    """Two heads on four ranks: each is held twice, and each destination rank asks another one."""
    assert [list(held(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    asked = [[rank for rank, _ in head_reads(2, 4, 2, rank, TOKENS)] for rank in range(2)]
    assert asked == [[0], [3]]


@pytest.mark.parametrize(
    "heads",
    [
        HeadSlice(5, TOKENS, 4, 8),
        HeadSlice(4, TOKENS, 4, 8, dst_first=5),
        HeadSlice(1, TOKENS, 4, 8, src_first=-1),
        HeadSlice(0, TOKENS, 4, 8),
        HeadSlice(4, TOKENS + 1, 4, 8),
        HeadSlice(4, TOKENS, 8, 8),
        HeadSlice(4, TOKENS, 4, 8, src_order="NCH"),
    ],
)
def test_heads_that_are_not_in_a_page_are_refused(heads):
    half, whole = Rank("LBHNC", 8, 4, 0).layout, Rank("LBHNC", 8, 8, 0).layout
    with pytest.raises(CopyRefused):
        plan(half, whole, [0], [0], heads)


@pytest.mark.parametrize("kv_heads,tp,rank", [(8, 3, 0), (8, 2, 2), (3, 4, 1)])
def test_heads_that_do_not_divide_are_refused(kv_heads, tp, rank):
    with pytest.raises(CopyRefused):
        held(kv_heads, tp, rank)
