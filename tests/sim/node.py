"""The hardware that placement is tried on, and the best any placement could do."""

from __future__ import annotations

from collections import OrderedDict

from pdnode.estimate import Constants
from pdnode.sim.engine import Engine
from pdnode.sim.node import Result
from pdnode.sim.work import BLOCK

# An 8B model in bf16 on one accelerator of about 400 effective TFLOP/s and 3 TB/s, KV of 128 KB a
# token copied at 250 GB/s: by arithmetic, not measured.
TRUE = Constants(
    prefill_pass_ms=8.0,
    prefill_ms_per_token=0.04,
    prefill_ms_per_token_context=1.3e-6,
    decode_step_ms=8.0,
    decode_step_ms_per_stream=0.08,
    handoff_ms=0.5,
    handoff_ms_per_token=0.0005,
    front_ms=1.0,
    output_tokens=200.0,
)
BLOCKS_PER_ENGINE = 3_000  # 384,000 tokens: 48 GB


def ideal_hit_rate(result: Result, blocks: int) -> float:
    """The same requests on one engine whose cache has ``blocks`` and computes in no time."""
    cache: OrderedDict[int, None] = OrderedDict()
    computed = 0
    for what, request in result.log:
        if what == "asked":
            hit = next(
                (i for i, b in enumerate(request.blocks) if b not in cache), len(request.blocks)
            )
            computed += request.prompt_tokens - min(hit * BLOCK, request.prompt_tokens - 1)
        for block in reversed(request.blocks if what == "asked" else request.text):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return 1 - computed / result.prompt_tokens


def engines(prefills: int = 8, decodes: int = 8, noise: float = 0.1) -> list[Engine]:
    roles = ["prefill"] * prefills + ["decode"] * decodes
    return [Engine(i, role, TRUE, BLOCKS_PER_ENGINE, noise) for i, role in enumerate(roles)]
