"""What becomes of requests when an engine dies: they go on elsewhere, wait, or end with an error."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pdnode.decode_first import DecodeFirst
from pdnode.engine import Engine, EngineState
from pdnode.errors import NodeFault, NoEngine, PdNodeError, RequestBlamed
from pdnode.journey import Journey, Stage, error_output
from pdnode.placement import Plan
from pdnode.suspects import Suspects
from pdnode.vllm_compat import EngineCoreOutputs, init_logger

logger = init_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class Resources:
    """The one thing vLLM's front end asks of a client's resources: is there no engine left?"""

    engine_dead: bool = False


class Recovery(DecodeFirst):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.resources = Resources()
        self.explain: Callable[[str, PdNodeError], None] = lambda request_id, error: None
        """Set once there is a front end: what a client is told of a request that failed."""
        self._suspects = Suspects()
        self._waiting: list[Journey] = []
        """Requests that no engine can take now: the first one that is back gets them."""

    async def engine_died(self, engine: Engine) -> None:
        """Every request that was on the engine goes on elsewhere, or ends with an error."""
        hit = [j for j in self._by_leg.values() if j.leg is not None and j.leg.slot == engine.slot]
        outside = engine.ended_from_outside
        verdict = self._suspects.judge(hit, lambda journey: not outside and self._began(journey))
        for journey in hit:
            self._leg_over(journey)
            await self._unfollow(journey)
        for journey in verdict.free:
            await self._guarded(journey, self._take_up(journey))
        for journey in verdict.blamed:
            await self._fail(journey, self._blame(journey, engine))
        await self._next_trial()

    def _began(self, journey: Journey) -> bool:
        """A request has an entry in the index from its first step on."""
        leg = journey.leg
        assert leg is not None
        return leg.answered or self._index.select(leg.leg_id, owner=leg.slot) is not None

    def _blame(self, journey: Journey, engine: Engine) -> RequestBlamed:
        error = RequestBlamed(
            f"{journey.deaths} engines ended while they ran this request, the last one was "
            f"{engine.engine_id}, and it is not tried again; GET /pd/status has the engine's last_error"
        )
        logger.error("%s: %s", journey.request_id, error)
        return error

    async def _next_trial(self) -> None:
        journey = self._suspects.next()
        if journey is not None:
            await self._guarded(journey, self._take_up(journey))

    async def _end(self, journey: Journey, stage: Stage) -> None:
        await super()._end(journey, stage)
        if self._suspects:
            await self._next_trial()

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
                await self._guarded(journey, self._take_up(journey))

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
        error = NoEngine("every engine of the node stays down; GET /pd/status has their last_error")
        for journey in [*self._by_request.values()]:
            await self._fail(journey, error)

    async def _guarded(self, journey: Journey, step: Coroutine[Any, Any, T]) -> T | None:
        """What goes wrong over one request ends that request and no other."""
        try:
            return await step
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            if not journey.ended:
                await self._fail(journey, _as_ours(journey.request_id, error))
            return None

    async def _refuse(self, request_id: str, error: Exception) -> None:
        """A request that could not be begun. vLLM has registered it, and frees that for an output only."""
        ours = _as_ours(request_id, error)
        journey = self._by_request.get(request_id)
        if journey is not None:
            await self._fail(journey, ours)
            return
        self.counters.failed += ours.status >= 500
        self.explain(request_id, ours)
        output = error_output(request_id)
        self._outputs.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[output]))

    async def _fail(self, journey: Journey, error: PdNodeError) -> None:
        self.counters.failed += error.status >= 500
        self.explain(journey.request_id, error)
        output = error_output(journey.request_id)
        await self._end(journey, Stage.FAILED)
        mine = self._route(journey, output)
        if mine is not None:
            self._outputs.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[mine]))


def _as_ours(request_id: str, error: Exception) -> PdNodeError:
    if isinstance(error, PdNodeError):
        return error
    logger.error("%s cannot go on", request_id, exc_info=error)
    return NodeFault(
        f"the node cannot go on with this request ({error!r}); its log has the traceback"
    )
