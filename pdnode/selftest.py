"""One request through every P->D pair before the node says ready.

A pair passes when D computed at most the last block of a prompt it had never seen (so the KV came
from P's memory) and the tokens equal what D answers alone. Two kernels may round one near-tie
differently, wrong KV changes every prompt: a pair has ``TRIES`` different prompts to be equal on one.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdnode.errors import SelfTestError
from pdnode.placement import Plan
from pdnode.token1 import Token1
from pdnode.vllm_compat import EngineCoreRequest, SamplingParams

if TYPE_CHECKING:
    from pdnode.engine import Engine
    from pdnode.node import Node

TRIES = 3
TOKENS = 8


@dataclass(frozen=True, slots=True)
class PairResult:
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return round(self.nbytes / self.seconds / 1e9, 2) if self.seconds else 0.0


async def test_pair(node: Node, prefill: Engine, decode: Engine, timeout_s: float) -> PairResult:
    """Raises SelfTestError; returns what the pair's copy moved and how long it took."""
    for attempt in range(TRIES):
        prompt = prompt_of(node, 2 * node.client.view().block_size + 3, attempt)
        before = node.index.engine(decode.slot)
        split = Plan(prefill.slot, decode.slot, Token1.FORWARD)
        tokens, recomputed = await ask(node, split, prompt, timeout_s)
        after = node.index.engine(decode.slot)
        if recomputed:
            raise SelfTestError(
                f"{decode.engine_id} computed {recomputed} of {len(prompt)} prompt tokens itself "
                f"instead of copying them from {prefill.engine_id}; see {decode.log_path}"
            )
        alone, _ = await ask(node, Plan(None, decode.slot, Token1.FORWARD), prompt, timeout_s)
        if tokens == alone:
            return PairResult(
                nbytes=after.handoff_bytes - before.handoff_bytes,
                seconds=(after.handoff_ns - before.handoff_ns) / 1e9,
            )
    raise SelfTestError(
        f"{prefill.engine_id} -> {decode.engine_id}: {TRIES} prompts of {len(prompt)} tokens gave "
        f"other tokens than {decode.engine_id} alone (last: {tokens} against {alone})"
    )


def prompt_of(node: Node, length: int, seed: int) -> list[int]:
    """At most ``length`` tokens, so many that an answer still fits."""
    length = min(length, node.client.view().max_model_len - TOKENS - 1)
    # Low ids: present in every vocabulary, and none of them ends the answer (ignore_eos).
    rng = random.Random(f"{node.boot_id}-{seed}")
    return [rng.randrange(10, min(1000, node.vocab_size)) for _ in range(length)]


async def ask(
    node: Node, plan: Plan, prompt: list[int], timeout_s: float, tokens: int = TOKENS
) -> tuple[list[int], int]:
    """(token ids of the answer, prompt tokens that D computed although it was to copy them)."""
    request = EngineCoreRequest(
        request_id=f"pdnode-self-test-{uuid.uuid4().hex[:8]}",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        # A salt of its own: no answer may come from a prefix cache.
        cache_salt=uuid.uuid4().hex,
        data_parallel_rank=None,
    )
    sink: asyncio.Queue = asyncio.Queue()
    journey = await node.client.begin(request, plan=plan, sink=sink)
    answer: list[int] = []
    try:
        async with asyncio.timeout(timeout_s):
            finished = False
            while not finished:
                output = await sink.get()
                answer.extend(output.new_token_ids)
                finished = output.finished
    except TimeoutError as error:
        raise SelfTestError(
            f"no answer to a self-test request within {timeout_s:.0f} s; raise --start-timeout if "
            "this machine is that slow"
        ) from error
    return answer, journey.recomputed_tokens
