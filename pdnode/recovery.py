"""What becomes of requests when an engine dies: they go on elsewhere, wait, or end with an error."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdnode.decode_first import DecodeFirst
from pdnode.engine import Engine, EngineState
from pdnode.journey import Journey, Stage, error_output
from pdnode.placement import Plan
from pdnode.vllm_compat import EngineCoreOutputs, init_logger

logger = init_logger(__name__)

MAX_DEATHS_IN_A_ROW = 2
"""A request under which two engines died without a token in between is likely what kills them."""
MAX_DEATHS = 6
"""And one that survives this many is not worth the next engine."""


@dataclass(slots=True)
class Resources:
    """The one thing vLLM's front end asks of a client's resources: is there no engine left?"""

    engine_dead: bool = False


class Recovery(DecodeFirst):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.resources = Resources()
        self._waiting: list[Journey] = []
        """Requests that no engine can take now: the first one that is back gets them."""

    async def engine_died(self, engine: Engine) -> None:
        """Every request that was on the engine goes on elsewhere, or ends with an error."""
        hit = [j for j in self._by_leg.values() if j.leg is not None and j.leg.slot == engine.slot]
        for journey in hit:
            self._leg_over(journey)
            await self._resume(journey)

    async def _resume(self, journey: Journey) -> None:
        await self._unfollow(journey)
        journey.deaths += 1
        journey.deaths_in_a_row += 1
        if journey.deaths_in_a_row >= MAX_DEATHS_IN_A_ROW or journey.deaths >= MAX_DEATHS:
            logger.error(
                "%s was running on %d engines when they died, and is not tried again",
                journey.request_id,
                journey.deaths,
            )
            await self._fail(journey)
            return
        await self._take_up(journey)

    def copying_from(self, slot: int) -> bool:
        """Is a request still to copy KV from this engine's memory?"""
        return any(
            journey.source is not None and journey.source.slot == slot
            for journey in self._by_leg.values()
        )

    async def engine_back(self, engine: Engine) -> None:
        """An engine is ready again: requests that no engine could take go on there."""
        waiting, self._waiting = self._waiting, []
        for journey in waiting:
            if not journey.ended:
                await self._take_up(journey)

    async def _take_up(self, journey: Journey) -> None:
        """Send the next leg to wherever placement says, or wait for an engine."""
        chosen = self._place(journey.request)
        if not isinstance(chosen, Plan):
            self._waiting.append(journey)
            return
        journey.plan = chosen
        journey.timeline.placed(chosen)
        if journey.leg is None:
            await self._send(journey, journey.first_request())
            return
        self.counters.resumes += 1
        await self._send(journey, journey.resume_request())

    async def _decode(self, journey: Journey) -> None:
        """Send the decode leg; when its engine died while P computed, to whichever can take it."""
        if self._engine(journey.plan.decode).state is not EngineState.READY:
            chosen = self._place(journey.request)
            if not isinstance(chosen, Plan):
                self._waiting.append(journey)
                return
            journey.plan = replace(journey.plan, decode=chosen.decode)
        await self._send(journey, journey.decode_request())

    async def no_engine_left(self) -> None:
        """No engine will come back: end what waits for one, and tell vLLM's front end."""
        self.resources.engine_dead = True
        for journey in [*self._by_request.values()]:
            await self._fail(journey)

    async def _fail(self, journey: Journey) -> None:
        self.counters.failed += 1
        output = error_output(journey.request_id)
        await self._end(journey, Stage.FAILED)
        mine = self._route(journey, output)
        if mine is not None:
            self._outputs.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[mine]))
