"""Legs of requests on engines: where one goes, how it is sent, how it ends, what it lets go of.

Shared by the life of a request (split_client) and by what happens when an engine dies (recovery).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ipc.errors import StaleRead
from ipc.index import Index
from ipc.records import EngineRecord
from pdnode.connector.prompt_order import TURN
from pdnode.engine import Engine, EngineState
from pdnode.errors import RequestUnsendable
from pdnode.estimate import Estimator
from pdnode.facts import facts_of
from pdnode.fanout import FanOut
from pdnode.history import History
from pdnode.journey import Journey, Leg, Source, Stage
from pdnode.meter import Arrivals, Meter, Work
from pdnode.placement import PREFILL, Decline, EngineView, Facts, NodeView, Plan, place
from pdnode.prefixes import Chain, Prefixes
from pdnode.vllm_compat import (
    BlockHasher,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
)

if TYPE_CHECKING:
    from pdnode.config import NodeConfig

ABORTED_RELEASE_S = 0.2
"""For a decode engine to read an abort, before its hand-off is taken back for it."""

UNSENDABLE = (OverflowError, TypeError, ValueError, RecursionError)
"""What vLLM's encoder raises over values that msgpack does not have: half a surrogate pair, 2**64."""

RECORDS_MS = 2.0
"""How old what engines say of their KV room may be, for placement: less than a step of theirs."""


@dataclass(slots=True)
class Counters:
    requests: int = 0
    reasons: Counter = field(default_factory=Counter)
    """Of every decision of placement, a decline and a second decision for one request included."""
    handoffs: int = 0
    handoffs_by_pair: Counter = field(default_factory=Counter)
    """By (slot of the prefill engine, slot of the decode engine)."""
    single_engine: int = 0
    single_engine_reasons: Counter = field(default_factory=Counter)
    role_changes: Counter = field(default_factory=Counter)
    """By who wanted it: ``asked``, or a reason of ``--roles auto``."""
    decode_first: int = 0
    """Requests that were sent to D together with P."""
    flow_reasons: Counter = field(default_factory=Counter)
    prompts_cut: int = 0
    """Sent to be computed in shorter passes than the engine's, for short ones or for streams."""
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
        self._custom_logits_processors = bool(config.frontend_args.logits_processors)
        self._never = config.placement.split == "never"
        self.meters = _meters(engines, config.placement.stretch)
        self._arrivals = Arrivals()
        self._records: list[EngineRecord | None] = []
        self._records_ms = float("-inf")
        self._prefixes = Prefixes(index, _hasher(engines, view), view.block_size, len(engines))

    def view(self) -> NodeView:
        now_ms = monotonic_ms()
        if now_ms - self._records_ms > RECORDS_MS:
            self._records_ms = now_ms
            self._records = [self._record(engine.slot) for engine in self._engines]
            for meter, record in zip(self.meters, self._records, strict=True):
                if record is not None:
                    meter.evictions(record, self._shape.block_size)
        return NodeView(
            engines=tuple(self._engine_view(engine, now_ms) for engine in self._engines),
            block_size=self._shape.block_size,
            max_model_len=self._shape.max_model_len,
            config=self._config.placement,
            arrivals_per_ms=self._arrivals.per_ms(now_ms),
            turn=self.counters.requests,
        )

    def _engine_view(self, engine: Engine, now_ms: float) -> EngineView:
        meter, record = self.meters[engine.slot], self._records[engine.slot]
        constants, block = meter.estimator.constants(), self._shape.block_size
        known = record is not None and record.blocks_total > 0
        queue = meter.backlog.queue(now_ms) if constants else ()
        return EngineView(
            slot=engine.slot,
            role=engine.role,
            ready=engine.state is EngineState.READY and not engine.draining,
            requests=engine.requests,
            queued_tokens=engine.queued_tokens,
            queued_ms=sum(prompt.left_ms for prompt in queue) if constants else None,
            queue=queue,
            streams=meter.streams,
            free_tokens=record.blocks_free * block if known else None,
            unused_tokens=_unused_blocks(record) * block if known else 0,
            constants=constants,
        )

    def _record(self, slot: int) -> EngineRecord | None:
        """None: it was being written each time we looked."""
        try:
            return self._index.engine(slot)
        except StaleRead:
            return None

    def _place(self, request: EngineCoreRequest, chain: Chain | None = None) -> Plan | Decline:
        """``chain``: of the prompt, where it is known."""
        facts = self._with_prefixes(
            facts_of(request, self._custom_logits_processors), request, chain
        )
        self._arrivals.add(monotonic_ms())
        view = self.view()
        plan = place(facts, view)
        self.counters.reasons[plan.reason] += 1
        if isinstance(plan, Plan) and plan.prefill is not None:
            return self._in_order(plan, facts, view)
        return plan

    def _in_order(self, plan: Plan, facts: Facts, view: NodeView) -> Plan:
        """A split: which of its engines gets it first?"""
        return plan

    def _with_prefixes(
        self, facts: Facts, request: EngineCoreRequest, chain: Chain | None
    ) -> Facts:
        chain = self._prefixes.chain(request) if chain is None else chain
        held, coming = self._prefixes.find(request, chain)
        whole = len(chain) * self._shape.block_size
        return replace(
            facts,
            cached={slot: max(held.get(slot, 0), coming.get(slot, 0)) for slot in held | coming},
            readable=held,
            sibling=next((slot for slot, tokens in coming.items() if tokens == whole), None),
        )

    def _engine(self, slot: int) -> Engine:
        return self._engines[slot]

    async def _send(self, journey: Journey, request: EngineCoreRequest) -> None:
        leg = journey.leg
        assert leg is not None
        engine = self._engine(leg.slot)
        self._by_leg[leg.leg_id] = journey
        engine.leg_sent(leg.prompt_tokens)
        leg.work = _work(journey, leg)
        now_ms, crowded = monotonic_ms(), self._crowded(leg.work)
        self.meters[leg.slot].sent(leg.work, now_ms)
        for meter in crowded:
            meter.crowd.came(now_ms, leg.work.ms)
        self._give_turn(leg.work, request)
        self._prefixes.sent(leg.slot, journey.chain)
        try:
            await engine.client.add_request_async(request)
        except EngineDeadError:
            pass  # supervision sees the death itself, and takes up what was sent there
        except UNSENDABLE as error:
            self._leg_over(journey)  # nobody got it
            raise RequestUnsendable(
                f"the request has a value that cannot be sent to an engine ({error}); leave it out, or "
                "give text that UTF-8 can hold and numbers of 64 bits"
            ) from error

    def _crowded(self, work: Work) -> list[Meter]:
        """Those that compute prompts, if ``work`` is one and finds them all at it: wherever it goes, it
        would rather have gone there, and the next ones will."""
        if not work.computes or work.new < self._shape.block_size:
            return []
        meters = [
            self.meters[engine.slot]
            for engine in self._engines
            if engine.state is EngineState.READY and (self._never or engine.role == PREFILL)
        ]
        return meters if all(meter.computes for meter in meters) else []

    def _give_turn(self, work: Work, request: EngineCoreRequest) -> None:
        params, turn = request.sampling_params, work.turn
        if params is None or turn is None or not self._config.placement.stretch:
            return
        # A leg's parameters are its own copy.
        params.extra_args = {**(params.extra_args or {}), TURN: tuple(turn)}
        self.counters.prompts_cut += bool(turn.pass_tokens)

    def _leg_over(self, journey: Journey) -> None:
        leg = journey.leg
        if leg is not None and self._by_leg.pop(leg.leg_id, None) is not None:
            self._engine(leg.slot).leg_over(leg.prompt_tokens, answered=leg.answered)
            assert leg.work is not None
            self.meters[leg.slot].over(leg.work, monotonic_ms(), answered=leg.answered)
            self._prefixes.over(leg.slot, journey.chain)

    def _leg_answered(self, journey: Journey, output: EngineCoreOutput) -> bool:
        """True on the leg's first output."""
        leg = journey.leg
        assert leg is not None
        if leg.answered:
            return False
        leg.answered = True
        self._engine(leg.slot).leg_answered(leg.prompt_tokens)
        self._measure(journey, leg, output)
        return True

    def _measure(self, journey: Journey, leg: Leg, output: EngineCoreOutput) -> None:
        meter, stats = self.meters[leg.slot], output.prefill_stats
        assert leg.work is not None
        computed = stats.num_computed_tokens if stats is not None else None
        cached = stats.num_cached_tokens if stats is not None else 0
        meter.answered(leg.work, computed, cached, monotonic_ms())
        if stats is None or not stats.num_external_cached_tokens:
            return
        tokens, record = stats.num_external_cached_tokens, self._record(leg.slot)
        ms = meter.copied(tokens, record) if record is not None else None
        if ms is not None and journey.request_id in self._sinks:
            # Before there are clients: what one engine's copy took is the best guess for the others.
            for other in self.meters:
                if other is not meter:
                    other.estimator.observe_handoff(tokens, ms)

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
        if stage is Stage.DONE and journey.request_id not in self._sinks:
            for meter in self.meters:
                meter.estimator.observe_output(len(journey.emitted))
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
        # Every turn of its loop looks for acknowledged hand-offs.
        await self._engine(source.slot).wake()


def monotonic_ms() -> float:
    return time.monotonic() * 1e3


def _estimator(engine: Engine) -> Estimator:
    return Estimator(chunk_tokens=engine.max_batched_tokens)


def _meters(engines: list[Engine], stretch: float) -> list[Meter]:
    meters = [Meter(_estimator(engine), stretch) for engine in engines]
    for engine, meter in zip(engines, meters, strict=True):
        meter.alike = [
            other.estimator
            for peer, other in zip(engines, meters, strict=True)
            if peer is not engine and peer.spec.device.power == engine.spec.device.power
        ]
    return meters


def _work(journey: Journey, leg: Leg) -> Work:
    plan, estimates = journey.plan, journey.plan.estimates
    computes, prompt = journey.source is None, len(journey.request.prompt_token_ids or ())
    cached = prompt - estimates.new_tokens if computes and estimates is not None else 0
    coming = min(plan.coming_tokens, cached) if computes else 0
    return Work(leg.prompt_tokens, cached, computes, plan.beside_streams, coming)


def _hasher(engines: list[Engine], view: NodeView) -> BlockHasher | None:
    config = engines[0].vllm_config
    if not config.cache_config.enable_prefix_caching:
        return None
    return BlockHasher(config, view.block_size)


def _unused_blocks(record: EngineRecord) -> int:
    """Blocks that hold nothing: neither published nor the last, partly filled one of a request."""
    return max(0, record.blocks_total - record.blocks_cached - record.running)
