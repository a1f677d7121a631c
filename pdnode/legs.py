"""Legs of requests on engines: where one goes, how it is sent, how it ends, what it lets go of.

Shared by the life of a request (split_client) and by what happens when an engine dies (recovery).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ipc.index import Index
from pdnode import token1
from pdnode.engine import Engine, EngineState
from pdnode.facts import facts_of
from pdnode.fanout import FanOut
from pdnode.history import History
from pdnode.journey import Journey, Source, Stage
from pdnode.placement import Decline, EngineView, Facts, NodeView, Plan, place
from pdnode.vllm_compat import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

if TYPE_CHECKING:
    from pdnode.config import NodeConfig

ABORTED_RELEASE_S = 0.2
"""For a decode engine to read an abort, before its hand-off is taken back for it."""


@dataclass(slots=True)
class Counters:
    requests: int = 0
    handoffs: int = 0
    handoffs_by_pair: Counter = field(default_factory=Counter)
    """By (slot of the prefill engine, slot of the decode engine)."""
    single_engine: int = 0
    single_engine_reasons: Counter = field(default_factory=Counter)
    recomputed_prompt_tokens: int = 0
    resumes: int = 0
    resume_recomputed_tokens: int = 0
    failed: int = 0
    rejected: int = 0
    """Refused at the door with 503 because of a bound on what may wait."""


class Legs(FanOut):
    """``engines`` must be started; ``index`` is attached as the node's own slot."""

    def __init__(
        self, config: NodeConfig, engines: list[Engine], index: Index, view: NodeView
    ) -> None:
        super().__init__(engines)
        self._config = config
        self._index = index
        self._shape = view
        self.counters = Counters()
        self.history = History([engine.engine_id for engine in engines])
        self._by_request: dict[str, Journey] = {}
        self._by_leg: dict[str, Journey] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._sinks: dict[str, asyncio.Queue[EngineCoreOutput]] = {}
        self._tasks: set[asyncio.Task] = set()
        self._on_cpu = engines[0].spec.device.kind == "cpu"
        self._custom_logits_processors = bool(config.frontend_args.logits_processors)

    def view(self) -> NodeView:
        return NodeView(
            engines=tuple(
                EngineView(
                    slot=engine.slot,
                    role=engine.role,
                    ready=engine.state is EngineState.READY and not engine.draining,
                    requests=engine.requests,
                    queued_tokens=engine.queued_tokens,
                )
                for engine in self._engines
            ),
            block_size=self._shape.block_size,
            max_model_len=self._shape.max_model_len,
            config=self._config.placement,
            turn=self.counters.requests,
        )

    def _place(self, request: EngineCoreRequest) -> Plan | Decline:
        facts = facts_of(request, self._custom_logits_processors)
        plan = place(facts, self.view())
        if (
            isinstance(plan, Plan)
            and plan.prefill is None
            and self._must_not_be_cut(request, facts)
        ):
            # Two legs on the one engine: the first, which computes the prompt, has no seed.
            return replace(plan, prefill=plan.decode, token1=token1.Token1.RESAMPLE)
        return plan

    def _must_not_be_cut(self, request: EngineCoreRequest, facts: Facts) -> bool:
        """A seeded request whose prompt takes two steps ends vLLM's CPU worker (0.32:
        ``_bookkeeping_sync`` rewinds the generator, and CPU generators cannot be)."""
        params = request.sampling_params
        divisible = facts.token1 is token1.Token1.RESAMPLE and not facts.whole
        return self._on_cpu and divisible and params is not None and token1.draws_seeded(params)

    def _engine(self, slot: int) -> Engine:
        return self._engines[slot]

    async def _send(self, journey: Journey, request: EngineCoreRequest) -> None:
        leg = journey.leg
        assert leg is not None
        engine = self._engine(leg.slot)
        self._by_leg[leg.leg_id] = journey
        engine.leg_sent(leg.prompt_tokens)
        await engine.client.add_request_async(request)

    def _leg_over(self, journey: Journey) -> None:
        leg = journey.leg
        if leg is not None and self._by_leg.pop(leg.leg_id, None) is not None:
            self._engine(leg.slot).leg_over(leg.prompt_tokens, answered=leg.answered)

    def _leg_answered(self, journey: Journey) -> bool:
        """True on the leg's first output."""
        leg = journey.leg
        assert leg is not None
        if leg.answered:
            return False
        leg.answered = True
        self._engine(leg.slot).leg_answered(leg.prompt_tokens)
        return True

    def _route(self, journey: Journey, output: EngineCoreOutput | None) -> EngineCoreOutput | None:
        sink = self._sinks.get(journey.request_id)
        if sink is None or output is None:
            return output
        sink.put_nowait(output)
        if output.finished:
            del self._sinks[journey.request_id]
        return None

    async def _end(self, journey: Journey, stage: Stage) -> None:
        leg, running = journey.leg, journey.stage is not Stage.DONE
        fetching = journey.stage is Stage.DECODE and leg is not None and not leg.answered
        journey.stage = stage
        journey.timeline.ended(stage.value, journey.deaths)
        self.history.ended(journey.timeline, journey.request)
        self._by_request.pop(journey.request_id, None)
        still_known = leg is not None and leg.leg_id in self._by_leg
        self._leg_over(journey)
        if running and still_known:
            assert leg is not None
            await self._abort_leg(leg.slot, leg.leg_id)
        if fetching and journey.source is not None:
            # D may be copying: pulling the KV away under it would look like a fault. D itself lets
            # go when the abort reaches it; this is for P's sake, which sleeps, and for a dead D.
            asyncio.get_running_loop().call_later(ABORTED_RELEASE_S, self._release_soon, journey)
        else:
            await self._release(journey)

    def _release_soon(self, journey: Journey) -> None:
        task = asyncio.get_running_loop().create_task(self._release(journey))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort_leg(self, slot: int, leg_id: str) -> None:
        engine = self._engine(slot)
        if engine.state is EngineState.READY:
            await engine.client.abort_requests_async([leg_id])

    async def _release(self, journey: Journey) -> None:
        """The KV this request was to copy is copied, or no longer wanted."""
        if journey.source is not None:
            source, journey.source = journey.source, None
            await self._acknowledge(source)

    async def _acknowledge(self, source: Source) -> None:
        """Acknowledge for the node, whether or not the reader has, and wake the owner to notice."""
        entry = self._index.select(source.transfer_id, owner=source.slot)
        if entry is not None:
            self._index.drop(entry)
        # An abort of a finished id changes nothing in vLLM, but it wakes an idle engine, and every
        # turn of its loop looks for acknowledged hand-offs.
        await self._abort_leg(source.slot, source.transfer_id)
