"""One request across its legs.

    PREFILL --P's only output--> DECODE --last output--> DONE
    WHOLE   -----------------last output---------------> DONE
    any     --client leaves----------------------------> ABORTED
    any     --cannot go on-----------------------------> FAILED

A leg is the request's life on one engine; legs have their own ids, so that a late answer of a leg
that was given up can never be taken for the present one's. What happened when is ``timeline``'s.

Decode-first, the decode engine is sent a follower together with the prefill leg: no leg, for it
answers nothing, but what it has copied by the time the decode leg comes need not be copied then.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pdnode.connector.following import DO_FOLLOW, REMOTE_SLOT, TRANSFER_ID
from pdnode.connector.replay import FORCED_TOKENS
from pdnode.meter import Work
from pdnode.placement import Plan
from pdnode.prefixes import Chain
from pdnode.timeline import Timeline
from pdnode.token1 import Token1
from pdnode.vllm_compat import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams

KV_PARAMS = "kv_transfer_params"
LEG_KINDS = {"p": "prefill", "d": "decode", "w": "whole"}


class Stage(Enum):
    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


ENDED = frozenset({Stage.DONE, Stage.ABORTED, Stage.FAILED})


@dataclass(slots=True)
class Leg:
    slot: int
    leg_id: str
    prompt_tokens: int
    answered: bool = False
    work: Work | None = None
    """Set when it is sent."""


@dataclass(frozen=True, slots=True)
class Source:
    """An index entry the next leg may copy KV from: P's offer, or what a dead engine left."""

    slot: int
    transfer_id: str


@dataclass(slots=True)
class Journey:
    request: EngineCoreRequest
    plan: Plan
    timeline: Timeline
    needs_history: bool = False
    """The sampler that goes on must have the tokens so far as its own output (see token1)."""
    chain: Chain = ()
    """The prompt's blocks, as placement knows them (prefixes)."""
    stage: Stage = Stage.PREFILL
    leg: Leg | None = None
    legs: int = 0
    follower: Source | None = None
    """The request that copies ahead: the engine it is on, and its id there."""
    source: Source | None = None
    """Whoever ends the journey, or sees the copy done, acknowledges it."""
    emitted: list[int] = field(default_factory=list)
    """Token ids the client has been sent."""
    replayed: int = 0
    """Tokens of this leg that the client has already: counted down, not sent again."""
    held_stats: Any = None
    held_events: list | None = None
    deaths: int = 0
    """Engines that ended under this request."""
    deaths_in_a_row: int = 0
    """Those since the client was last sent a token of which this request may be the cause (suspects)."""
    short_lives: int = 0
    """The same, with hardly a token from one to the next."""
    emitted_at_death: int = 0
    recomputed_tokens: int = 0
    """By the decode leg, of what it was to copy."""
    split: bool = False
    """The present leg is the second of two: it is meant to copy the prompt's KV, not compute it."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    # --- the request each leg is sent --------------------------------------------------------

    def first_request(self) -> EngineCoreRequest:
        """For a request nobody has answered yet, on the present ``plan``."""
        return self.whole_request() if self.plan.prefill is None else self.prefill_request()

    def whole_request(self) -> EngineCoreRequest:
        self.stage = Stage.WHOLE
        leg = self._next_leg(self.plan.decode, "w", len(self.request.prompt_token_ids or ()))
        return self._copy(leg, self.request.sampling_params)

    def prefill_request(self) -> EngineCoreRequest:
        assert self.plan.prefill is not None
        assert self.request.prompt_token_ids is not None
        self.stage = Stage.PREFILL
        leg = self._next_leg(self.plan.prefill, "p", len(self.request.prompt_token_ids))
        return self._copy(leg, self._prefill_params(), do_remote_decode=True)

    def _prefill_params(self) -> SamplingParams:
        if self.plan.token1 is Token1.RESAMPLE:
            # P's token is thrown away: no grammar to compile, no generator to seed, and no way to
            # stop before the KV is offered.
            return _no_sampling()
        params = copy.copy(self.request.sampling_params)
        assert params is not None
        params.max_tokens = 1
        return params

    def follow_request(self) -> EngineCoreRequest:
        """For D: copy the prompt while P, on the present leg, computes it."""
        assert self.leg is not None
        self.follower = Source(self.plan.decode, f"{self.leg.leg_id}/f")
        request = copy.copy(self.request)
        request.request_id = self.follower.transfer_id
        request.sampling_params = _no_sampling()
        request.sampling_params.extra_args = {
            KV_PARAMS: {
                DO_FOLLOW: True,
                TRANSFER_ID: self.leg.leg_id,
                REMOTE_SLOT: self.leg.slot,
            }
        }
        return request

    def decode_request(self) -> EngineCoreRequest:
        """What is left after the prompt and the tokens the client has."""
        self.stage = Stage.DECODE
        params = copy.copy(self.request.sampling_params)
        assert params is not None
        assert self.request.prompt_token_ids is not None
        prompt = self.request.prompt_token_ids
        if self.needs_history:
            self._replay(params)
        else:
            prompt = [*prompt, *self.emitted]
            params.max_tokens -= len(self.emitted)
        leg = self._next_leg(self.plan.decode, "d", len(prompt))
        request = self._copy(leg, params)
        request.prompt_token_ids = prompt
        return request

    def _replay(self, params: SamplingParams) -> None:
        self.replayed = len(self.emitted)
        if self.emitted:
            params.extra_args = {**(params.extra_args or {}), FORCED_TOKENS: list(self.emitted)}

    def resume_request(self) -> EngineCoreRequest:
        """The leg that follows a dead one. What that one left in memory is where it copies from."""
        assert self.leg is not None
        if self.leg.answered or self.source is None:
            self.split = False
            self.source = Source(self.leg.slot, self.leg.leg_id)
        return self.decode_request() if self.emitted else self.first_request()

    def _next_leg(self, slot: int, kind: str, prompt_tokens: int) -> Leg:
        self.legs += 1
        self.replayed = self.replayed if kind == "d" else 0
        self.leg = Leg(slot, f"{self.request_id}/{kind}{self.legs}", prompt_tokens)
        self.timeline.sent(slot, LEG_KINDS[kind], prompt_tokens)
        return self.leg

    def _copy(
        self, leg: Leg, params: SamplingParams | None, **kv_transfer_params: bool
    ) -> EngineCoreRequest:
        request = copy.copy(self.request)
        request.request_id = leg.leg_id
        if params is None:
            return request
        params = copy.copy(params)
        if self.emitted and params.prompt_logprobs is not None:
            # The client has them; asking again would forbid the use of any cached prompt.
            params.prompt_logprobs, params.skip_reading_prefix_cache = None, False
        if self.source is not None:
            kv_transfer_params |= {
                "do_remote_prefill": True,
                TRANSFER_ID: self.source.transfer_id,
                REMOTE_SLOT: self.source.slot,
            }
        if kv_transfer_params:
            params.extra_args = {**(params.extra_args or {}), KV_PARAMS: kv_transfer_params}
        request.sampling_params = params
        return request

    # --- what a leg's output means for the client ----------------------------------------------

    def on_prefill_output(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """P's one output. Returns what the client gets of it; ``stage`` says what comes next."""
        if output.finish_reason is not FinishReason.LENGTH:
            # EOS or a stop token as token 1, an error, an abort: the answer ends on P.
            return self.on_output(output)
        # LENGTH is the prefill leg's own max_tokens=1: placement splits no request that may end here.
        assert self.leg is not None
        self.stage = Stage.DECODE
        self.split = True
        offered = offers_kv(output)
        # Not offered: P says why in its log; D then computes the prompt again, and that is counted.
        self.source = Source(self.leg.slot, self.leg.leg_id) if offered else None
        if self.plan.token1 is Token1.RESAMPLE:
            self.held_stats, self.held_events = output.prefill_stats, output.events
            return None
        output.finish_reason = None
        output.stop_reason = None
        return self.on_output(output)

    def on_decode_began(self, output: EngineCoreOutput) -> int:
        """Make this leg's first output look like the next step of the request that began elsewhere.

        Returns the tokens of the leg's prompt that it computed although a copy of them was to be had.
        """
        stats = output.prefill_stats
        computed = max(0, stats.num_computed_tokens - 1) if stats is not None else 0
        output.prefill_stats = self.held_stats
        output.events = self.held_events
        self.held_stats = self.held_events = None
        return computed

    def goes_on(self, output: EngineCoreOutput) -> bool:
        """``output`` changes no stage: more tokens of a leg that has answered, as most outputs are."""
        assert self.leg is not None
        return (
            self.leg.answered and self.stage is not Stage.PREFILL and output.finish_reason is None
        )

    def on_output(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """None: nothing in it is new to the client (a replayed token)."""
        if self.replayed and output.finish_reason is None:
            self.replayed -= len(output.new_token_ids)
            return None
        output.request_id = self.request_id
        output.kv_transfer_params = None
        self.emitted.extend(output.new_token_ids)
        if output.new_token_ids:
            self.deaths_in_a_row = 0
            self.timeline.emitted(len(output.new_token_ids))
        if output.finish_reason is not None:
            self.stage = Stage.DONE
        return output


def offers_kv(output: EngineCoreOutput) -> bool:
    """The leg that this output ends keeps its KV for a reader."""
    return "transfer_id" in (output.kv_transfer_params or ())


def _no_sampling() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def error_output(request_id: str) -> EngineCoreOutput:
    """Ends a request for the client as vLLM ends one whose engine failed: status 500."""
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
    )
