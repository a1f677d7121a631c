"""The first measurements of each engine, before the node says ready: placement estimates at once.

Each engine answers prompts of growing length until one takes ``LONGEST_S``, then some at the same
time; then hand-offs of other sizes than the self-test's. What is measured of them is what is
measured of every request (legs, meter). Real traffic corrects it: longer prompts, more streams.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from pdnode.placement import Plan
from pdnode.selftest import TOKENS, ask, prompt_of
from pdnode.token1 import Token1

if TYPE_CHECKING:
    from pdnode.engine import Engine
    from pdnode.node import Node

SHORTEST_TOKENS = 16
LONGEST_S = 0.1
FRONT_CALLS = 5
STREAMS = 4


async def measure(node: Node, timeout_s: float) -> None:
    """Raises SelfTestError when an answer takes longer than ``timeout_s``."""
    await asyncio.gather(*(_alone(node, engine, timeout_s) for engine in node.engines))
    prefills = [e for e in node.engines if e.role == "prefill"]
    decodes = [e for e in node.engines if e.role == "decode"]
    pairs = list(zip(itertools.cycle(prefills), decodes, strict=False))
    for length in (SHORTEST_TOKENS, node.client.view().block_size + 3):
        for prefill, decode in pairs:
            plan = Plan(prefill.slot, decode.slot, Token1.FORWARD)
            await ask(node, plan, prompt_of(node, length, seed=length), timeout_s, 2)


async def _alone(node: Node, engine: Engine, timeout_s: float) -> None:
    await _front(node, engine)
    plan = Plan(None, engine.slot, Token1.FORWARD)
    view = node.client.view()
    longest = min(view.max_model_len - TOKENS - 1, engine.max_batched_tokens)
    length, took_s = SHORTEST_TOKENS, 0.0
    # The first answers of an engine are its slowest: more than one of the shortest.
    await ask(node, plan, prompt_of(node, length, seed=1), timeout_s, 2)
    await ask(node, plan, prompt_of(node, length, seed=2), timeout_s, 2)
    while took_s < LONGEST_S and length <= longest:
        began = time.monotonic()
        await ask(node, plan, prompt_of(node, length, seed=length), timeout_s, 4)
        took_s, length = time.monotonic() - began, 2 * length
    prompts = [prompt_of(node, SHORTEST_TOKENS, seed=-number) for number in range(STREAMS)]
    await asyncio.gather(*(ask(node, plan, prompt, timeout_s) for prompt in prompts))


async def _front(node: Node, engine: Engine) -> None:
    """A call that asks the engine nothing: the way there and back."""
    meter = node.client.meters[engine.slot]
    for _ in range(FRONT_CALLS):
        began = time.monotonic()
        await engine.client.is_scheduler_paused_async()
        meter.estimator.observe_front((time.monotonic() - began) * 1e3)
