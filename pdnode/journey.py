"""One request across its legs.

    PREFILL --P's only output--> DECODE --last output--> DONE
    WHOLE   -----------------last output---------------> DONE
    any     --client leaves----------------------------> ABORTED
    any     --cannot go on-----------------------------> FAILED

A leg is the request's life on one engine; legs have their own ids, so that a late answer of a leg
that was given up can never be taken for the present one's. The names in ``times`` are the events a
person asks about: arrived, prefill_sent, first_token, decode_sent, decode_first, finished.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pdnode.placement import Plan
from pdnode.token1 import Token1
from pdnode.vllm_compat import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams

KV_PARAMS = "kv_transfer_params"


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


@dataclass(slots=True)
class Journey:
    request: EngineCoreRequest
    plan: Plan
    stage: Stage = Stage.PREFILL
    leg: Leg | None = None
    legs: int = 0
    transfer_id: str = ""
    """Set while P may hold KV for this request: whoever ends the journey must release it."""
    prefill_leg: Leg | None = None
    emitted: list[int] = field(default_factory=list)
    """Token ids the client has been sent."""
    held_stats: Any = None
    held_events: list | None = None
    deaths: int = 0
    """Engines that ended under this request."""
    recomputed_tokens: int = 0
    handed_over: bool = False
    times: dict[str, float] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def ended(self) -> bool:
        return self.stage in ENDED

    def mark(self, event: str) -> None:
        self.times.setdefault(event, time.monotonic())

    # --- the request each leg is sent --------------------------------------------------------

    def next_leg(self, slot: int, kind: str, prompt_tokens: int) -> Leg:
        self.legs += 1
        self.leg = Leg(slot, f"{self.request_id}/{kind}{self.legs}", prompt_tokens)
        return self.leg

    def whole_request(self) -> EngineCoreRequest:
        self.stage = Stage.WHOLE
        leg = self.next_leg(self.plan.decode, "w", len(self.request.prompt_token_ids or ()))
        return self._copy(leg, self.request.sampling_params, None)

    def prefill_request(self) -> EngineCoreRequest:
        assert self.plan.prefill is not None and self.request.prompt_token_ids is not None
        self.stage = Stage.PREFILL
        leg = self.next_leg(self.plan.prefill, "p", len(self.request.prompt_token_ids))
        self.prefill_leg, self.transfer_id = leg, leg.leg_id
        return self._copy(
            leg,
            self._prefill_params(),
            {"do_remote_decode": True, "transfer_id": self.transfer_id},
        )

    def _prefill_params(self) -> SamplingParams:
        if self.plan.token1 is Token1.RESAMPLE:
            # P's token is thrown away: no grammar to compile, no generator to seed, and no way to
            # stop before the KV is offered.
            return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        params = copy.copy(self.request.sampling_params)
        assert params is not None
        params.max_tokens = 1
        return params

    def decode_request(self) -> EngineCoreRequest:
        """Prompt + what the client has seen; the rest of ``max_tokens``."""
        self.stage = Stage.DECODE
        prompt = [*self.request.prompt_token_ids, *self.emitted]
        params = copy.copy(self.request.sampling_params)
        params.max_tokens -= len(self.emitted)
        leg = self.next_leg(self.plan.decode, "d", len(prompt))
        remote = {
            "do_remote_prefill": True,
            "transfer_id": self.transfer_id,
            "remote_slot": self.plan.prefill,
        }
        request = self._copy(leg, params, remote if self.transfer_id else None)
        request.prompt_token_ids = prompt
        return request

    def resume_request(self) -> EngineCoreRequest:
        """The leg that follows a dead one, for the present ``plan``."""
        if self.emitted:
            return self.decode_request()
        if self.plan.prefill is None:
            return self.whole_request()
        return self.prefill_request()

    def _copy(
        self, leg: Leg, params: SamplingParams | None, kv_transfer_params: dict | None
    ) -> EngineCoreRequest:
        request = copy.copy(self.request)
        request.request_id = leg.leg_id
        if params is not None:
            params = copy.copy(params) if params is self.request.sampling_params else params
            extra = {k: v for k, v in (params.extra_args or {}).items() if k != KV_PARAMS}
            if kv_transfer_params is not None:
                extra[KV_PARAMS] = kv_transfer_params
            params.extra_args = extra or None
            request.sampling_params = params
        return request

    # --- what a leg's output means for the client ----------------------------------------------

    def on_prefill_output(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """P's one output. Returns what the client gets of it; ``stage`` says what comes next."""
        if output.finish_reason is not FinishReason.LENGTH:
            # EOS or a stop token as token 1, an error, an abort: the answer ends on P.
            return self.on_output(output)
        # LENGTH is the prefill leg's own max_tokens=1: placement splits no request that may end here.
        self.stage = Stage.DECODE
        if output.kv_transfer_params is None:
            self.transfer_id = ""  # P could not offer its KV (it says why); D computes it again
        if self.plan.token1 is Token1.RESAMPLE:
            self.held_stats, self.held_events = output.prefill_stats, output.events
            return None
        output.finish_reason = None
        output.stop_reason = None
        return self.on_output(output)

    def on_decode_first_output(self, output: EngineCoreOutput) -> None:
        """Make D's first output look like the next step of the request that P began."""
        stats = output.prefill_stats
        if stats is not None:
            self.recomputed_tokens = max(0, stats.num_computed_tokens - 1)
            self.handed_over = self.recomputed_tokens == 0
        output.prefill_stats = self.held_stats
        output.events = self.held_events
        self.held_stats = self.held_events = None

    def on_output(self, output: EngineCoreOutput) -> EngineCoreOutput:
        output.request_id = self.request_id
        output.kv_transfer_params = None
        self.emitted.extend(output.new_token_ids)
        if output.new_token_ids:
            self.mark("first_token")
        if output.finish_reason is not None:
            self.stage = Stage.DONE
            self.mark("finished")
        return output


def error_output(request_id: str) -> EngineCoreOutput:
    """Ends a request for the client as vLLM ends one whose engine failed: status 500."""
    return EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
