"""The layout that vLLM's own views give, in every order that vLLM has for its pages."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from ipc.records import KVLayout
from pdnode.connector.worker import layout_of

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 7, 2, 32, 8
PAGE = HEADS * TOKENS * 2 * HEAD_SIZE * 2  # keys and values, bfloat16


def views(order: str, kernel_block: int | None = None) -> tuple[dict[str, torch.Tensor], int]:
    """(name -> view, address of the buffer), as `allocate_kv_cache` makes them."""
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    outer = order.startswith("L")
    strides = (BLOCKS * PAGE, PAGE) if outer else (PAGE, LAYERS * PAGE)
    names = [f"layer.{i}" for i in range(LAYERS)]
    nbytes = LAYERS * BLOCKS * PAGE
    place = KVCacheTensor(nbytes, names, layer_stride=strides[0], block_stride=strides[1])
    raw = torch.zeros(nbytes, dtype=torch.int8)
    made = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[order], place, kernel_block)
    return dict(zip(names, made, strict=True)), raw.data_ptr()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_are_found_in_every_order(order: str) -> None:
    made, address = views(order)
    strides = (PAGE, BLOCKS * PAGE) if order.startswith("L") else (LAYERS * PAGE, PAGE)
    assert layout_of(made, address, BLOCKS) == KVLayout(BLOCKS, LAYERS, PAGE, *strides)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_blocks_that_a_kernel_splits_keep_the_schedulers_numbers(order: str) -> None:
    made, address = views(order, kernel_block=16)
    assert next(iter(made.values())).shape[0] == 2 * BLOCKS
    assert layout_of(made, address, BLOCKS) == layout_of(*views(order))
    with pytest.raises(ValueError, match="a block is not one piece"):
        layout_of(made, address, BLOCKS - 1)


def test_pages_that_are_not_in_one_piece_are_refused() -> None:
    """LHBNC: the heads of a block lie far apart."""
    spread = torch.zeros(HEADS, BLOCKS, TOKENS, 2 * HEAD_SIZE).transpose(0, 1)
    with pytest.raises(ValueError, match="one of each"):
        layout_of({"layer.0": spread}, spread.data_ptr(), BLOCKS)
