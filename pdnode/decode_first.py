"""Decode-first in the front end: which requests get a follower on D, and when it ends.

    sent with the prefill leg      whoever that leg's engines are, also after a death
    ended                          D has begun to decode, or the request is over

A follower is nothing that a request depends on: its engine may die, it may find no room; the decode
leg then copies all of the prompt, as it does prefill-first. It is sent to D before the decode leg, so
that what it holds is still held when the decode leg asks.
"""

from __future__ import annotations

from dataclasses import replace

from pdnode import flow
from pdnode.engine import EngineState
from pdnode.journey import Journey, Stage
from pdnode.legs import Legs
from pdnode.placement import Facts, NodeView, Plan
from pdnode.vllm_compat import EngineCoreRequest


class DecodeFirst(Legs):
    def _in_order(self, plan: Plan, facts: Facts, view: NodeView) -> Plan:
        prefill, decode = (view.engines[slot] for slot in (plan.prefill, plan.decode))
        chunk_tokens = self._engine(plan.prefill).max_batched_tokens
        choice = flow.choose(self._config.flow, facts, prefill, decode, chunk_tokens)
        self.counters.flow_reasons[choice.reason] += 1
        return replace(plan, decode_first=choice.decode_first)

    async def _send(self, journey: Journey, request: EngineCoreRequest) -> None:
        await super()._send(journey, request)
        # The client may have left, or P answered, meanwhile.
        if journey.stage is Stage.PREFILL and journey.plan.decode_first:
            await self._follow(journey)

    async def _follow(self, journey: Journey) -> None:
        engine = self._engine(journey.plan.decode)
        if engine.state is EngineState.READY:
            self.counters.decode_first += 1
            await engine.client.add_request_async(journey.follow_request())

    async def _unfollow(self, journey: Journey) -> None:
        follower, journey.follower = journey.follower, None
        if follower is not None:
            await self._abort_leg(follower.slot, follower.transfer_id)

    async def _release(self, journey: Journey) -> None:
        await super()._release(journey)
        await self._unfollow(journey)
