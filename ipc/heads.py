"""Which heads of a page go where, for engines of different tensor parallel size. Arithmetic only.

A page holds the heads of one rank for the tokens of one block, all equal in size:

    HNC (LBHNC, BLHNC)   │ head 0: token 0, 1, ... │ head 1: token 0, 1, ... │   a slice is one piece
    NHC (LBNHC, BLNHC)   │ token 0: head 0, 1, ... │ token 1: head 0, 1, ... │   one piece a token

Ranks hold equal runs of heads; where there are more ranks than heads, runs of ranks hold one head
each, the same one (as vLLM shards attention).
"""

from typing import NamedTuple

from ipc.errors import CopyRefused

ORDERS = ("HNC", "NHC")


class HeadSlice(NamedTuple):
    """Heads src_first, ... of a source page become dst_first, ... of the destination's; `count` of
    them.

    `tokens` of a block; `src_heads`, `dst_heads` in a page. The orders may differ only where what a
    head keeps of one token is contiguous in both (not on vLLM's CPU backend, whose heads hold all
    keys, then all values).
    """

    count: int
    tokens: int
    src_heads: int
    dst_heads: int
    src_first: int = 0
    dst_first: int = 0
    src_order: str = "HNC"
    dst_order: str = "HNC"

    def content_bytes(self, src_page_bytes: int, dst_page_bytes: int) -> int:
        """What a head keeps of one token. Raises CopyRefused when the numbers contradict."""
        if {self.src_order, self.dst_order} - set(ORDERS) or min(self.count, self.tokens) < 1:
            raise CopyRefused(f"{self}: orders are {', '.join(ORDERS)}, counts at least 1")
        for side, page_bytes, heads, first in (
            ("source", src_page_bytes, self.src_heads, self.src_first),
            ("destination", dst_page_bytes, self.dst_heads, self.dst_first),
        ):
            if first < 0 or first + self.count > heads:
                raise CopyRefused(
                    f"heads {first} to {first + self.count - 1} are not in a {side} page of {heads}"
                )
            if page_bytes % (heads * self.tokens):
                raise CopyRefused(
                    f"a {side} page of {page_bytes:,} bytes cannot hold {heads} heads of "
                    f"{self.tokens} tokens"
                )
        theirs = src_page_bytes // (self.src_heads * self.tokens)
        ours = dst_page_bytes // (self.dst_heads * self.tokens)
        if theirs != ours:
            raise CopyRefused(
                f"bytes per head and token differ: source {theirs}, destination {ours}"
            )
        return ours


def page_strides(order: str, heads: int, tokens: int, content_bytes: int) -> tuple[int, int]:
    """(bytes from one head to the next, from one token to the next)."""
    if order == "HNC":
        return tokens * content_bytes, content_bytes
    return content_bytes, heads * content_bytes


def held(kv_heads: int, tp: int, rank: int) -> range:
    """The heads of a model that this rank holds. Raises CopyRefused when they do not divide."""
    if not 0 <= rank < tp:
        raise CopyRefused(f"rank {rank} is not one of 0 to {tp - 1}")
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise CopyRefused(f"{kv_heads} KV heads cannot be shared out over {tp} ranks")
    first = rank * kv_heads // tp
    return range(first, first + max(1, kv_heads // tp))


def head_reads(
    kv_heads: int, src_tp: int, dst_tp: int, dst_rank: int, tokens: int, order: str = "HNC"
) -> list[tuple[int, HeadSlice]]:
    """[(rank of the source, what to read from it)]: together all heads of `dst_rank`, each once.

    Give each slice to `ipc.copy.plan` with that rank's layout. kv_heads: of the whole model;
    tokens: in a block. Where several source ranks hold a head, destination ranks take turns.

        2 -> 1, 8 heads:  rank 0 reads 4 from rank 0 and 4 from rank 1
        1 -> 2, 8 heads:  rank 1 reads heads 4 to 7 of rank 0
    """
    mine = held(kv_heads, dst_tp, dst_rank)
    copies = max(1, src_tp // kv_heads)  # Source ranks that hold the same head.
    reads = []
    for rank in range(dst_rank % copies, src_tp, copies):
        theirs = held(kv_heads, src_tp, rank)
        first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if first < last:
            at, to = first - theirs.start, first - mine.start
            reads.append(
                (
                    rank,
                    HeadSlice(last - first, tokens, len(theirs), len(mine), at, to, order, order),
                )
            )
    return reads
