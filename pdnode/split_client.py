"""The engine-core client that is many engines.

vLLM's front end calls it as if it were one engine; every request becomes a :class:`Journey` over
one or two of them. Runs on the front end's event loop only: no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ipc.index import Index
from pdnode import token1
from pdnode.connector.replay import FORCED_TOKENS
from pdnode.engine import Engine, EngineState
from pdnode.fanout import FanOut
from pdnode.journey import KV_PARAMS, Journey, Source, Stage, error_output
from pdnode.placement import Decline, EngineView, Facts, NodeView, Plan, place
from pdnode.vllm_compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    init_logger,
)

if TYPE_CHECKING:
    from pdnode.config import NodeConfig
    from pdnode.node import Node

logger = init_logger(__name__)

PRIVATE_ARGS = frozenset({KV_PARAMS, FORCED_TOKENS})
ABORTED_RELEASE_S = 0.2
MAX_DEATHS_IN_A_ROW = 2
"""A request under which two engines died without a token in between is likely what kills them."""
MAX_DEATHS = 6
"""And one that survives this many is not worth the next engine."""
NOWHERE = Plan(prefill=None, decode=-1, token1=token1.Token1.FORWARD, reason="no_engine_ready")


@dataclass(slots=True)
class Resources:
    """The one thing vLLM's front end asks of a client's resources: is there no engine left?"""

    engine_dead: bool = False


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


class SplitClient(FanOut):
    """See module. ``engines`` must be started; ``index`` is attached as the node's own slot."""

    node: Node

    def __init__(
        self, config: NodeConfig, engines: list[Engine], index: Index, view: NodeView
    ) -> None:
        super().__init__(engines)
        self._config = config
        self._index = index
        self._shape = view
        self.resources = Resources()
        self.engine_ranks_managed = [engine.slot for engine in engines]
        self.counters = Counters()
        self._by_request: dict[str, Journey] = {}
        self._by_leg: dict[str, Journey] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._sinks: dict[str, asyncio.Queue[EngineCoreOutput]] = {}
        self._pumps: dict[int, asyncio.Task] = {}
        self._waiting: list[Journey] = []
        self._tasks: set[asyncio.Task] = set()
        self._on_cpu = engines[0].spec.device.kind == "cpu"
        self._custom_logits_processors = bool(config.frontend_args.logits_processors)

    # --- vLLM's side -----------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        known = self._by_request.get(request.request_id)
        if known is not None:
            # The next chunk of a streaming-input session goes where the session lives.
            assert known.leg is not None
            request.request_id = known.leg.leg_id
            await self._engine(known.leg.slot).client.add_request_async(request)
            return
        await self.begin(request)

    async def begin(
        self,
        request: EngineCoreRequest,
        *,
        plan: Plan | None = None,
        sink: asyncio.Queue[EngineCoreOutput] | None = None,
    ) -> Journey:
        """Start a request. ``plan`` overrides placement and ``sink`` takes the outputs (self-test)."""
        remove_private_args(request)
        chosen = plan or self._place(request)
        if isinstance(chosen, Decline) and self.resources.engine_dead:
            self.counters.failed += 1
            raise EngineDeadError()
        # With every engine on its way back, a request waits for the first of them.
        parked = isinstance(chosen, Decline)
        placed = NOWHERE if parked else chosen
        journey = Journey(request, placed, needs_history=self._needs_history(request))
        journey.mark("arrived")
        self._by_request[request.request_id] = journey
        if sink is not None:
            self._sinks[request.request_id] = sink
        else:
            self._count(placed)
        if parked:
            self._waiting.append(journey)
        else:
            await self._send(journey, journey.first_request())
        return journey

    def _needs_history(self, request: EngineCoreRequest) -> bool:
        return request.sampling_params is not None and token1.needs_history(
            request.sampling_params, custom_logits_processors=self._custom_logits_processors
        )

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self._outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            journey = self._by_request.get(request_id)
            if journey is not None:
                await self._end(journey, Stage.ABORTED)

    def dp_engines_running(self) -> bool:
        return False

    def get_kv_event_sources(self) -> dict:
        return {}

    # --- placement -------------------------------------------------------------------------------

    def view(self) -> NodeView:
        return NodeView(
            engines=tuple(
                EngineView(
                    slot=engine.slot,
                    role=engine.role,
                    ready=engine.state is EngineState.READY,
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

    def _count(self, plan: Plan) -> None:
        self.counters.requests += 1
        if plan.prefill is None or plan.prefill == plan.decode:
            self.counters.single_engine += 1
            self.counters.single_engine_reasons[plan.reason] += 1

    # --- legs --------------------------------------------------------------------------------------

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

    # --- engines' side ---------------------------------------------------------------------------

    def listen(self, engine: Engine) -> None:
        """Take this engine's outputs from now on. Called on the loop, once per engine start."""
        pump = asyncio.get_running_loop().create_task(
            self._pump(engine), name=f"pump-{engine.engine_id}"
        )
        pump.add_done_callback(self._pump_ended)
        self._pumps[engine.slot] = pump

    def _pump_ended(self, pump: asyncio.Task) -> None:
        # A bug of ours in here would leave every stream of the engine waiting: end them instead.
        if not pump.cancelled() and pump.exception() is not None:
            logger.error("%s failed", pump.get_name(), exc_info=pump.exception())
            self._outputs.put_nowait(pump.exception())

    async def _pump(self, engine: Engine) -> None:
        client = engine.client
        while True:
            try:
                outputs = await client.get_output_async()
            except EngineDeadError:
                return  # the node's supervision sees the death itself and acts on it
            await self._take(engine, outputs)

    async def _take(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        emitted = []
        for output in outputs.outputs:
            journey = self._by_leg.get(output.request_id)
            if journey is None:
                await self._stray(engine, output)
                continue
            mine = await self._advance(journey, output)
            if mine is not None:
                emitted.append(mine)
        outputs.outputs = emitted
        outputs.engine_index = engine.slot
        if emitted or outputs.scheduler_stats is not None:
            self._outputs.put_nowait(outputs)

    async def _advance(self, journey: Journey, output: EngineCoreOutput) -> EngineCoreOutput | None:
        first = self._leg_answered(journey)
        if journey.stage is Stage.PREFILL:
            mine = await self._prefilled(journey, output)
        elif first and journey.stage is Stage.DECODE:
            mine = await self._decode_began(journey, output)
        else:
            mine = journey.on_output(output)
        if journey.ended:
            await self._end(journey, journey.stage)
        return self._route(journey, mine)

    async def _prefilled(self, journey: Journey, output: EngineCoreOutput):
        resumed_from = journey.source
        mine = journey.on_prefill_output(output)
        self._leg_over(journey)
        if resumed_from is not None:
            await self._acknowledge(resumed_from)
        if journey.stage is Stage.DECODE:
            journey.mark("decode_sent")
            await self._send(journey, journey.decode_request())
        return mine

    async def _decode_began(self, journey: Journey, output: EngineCoreOutput):
        journey.mark("decode_first")
        computed = journey.on_decode_began(output)
        await self._release(journey)
        if not journey.split:
            self.counters.resume_recomputed_tokens += computed
        elif journey.request_id in self._sinks:
            journey.recomputed_tokens = computed  # the self-test judges it
        elif not self._count_handoff(journey, computed):
            journey.stage = Stage.FAILED
            return error_output(journey.request_id)
        return journey.on_output(output)

    def _count_handoff(self, journey: Journey, recomputed: int) -> bool:
        """False: the request must end, because --strict allows no silent second prefill."""
        if not recomputed:
            self.counters.handoffs += journey.plan.prefill != journey.plan.decode
            self.counters.handoffs_by_pair[journey.plan.prefill, journey.plan.decode] += 1
            return True
        self.counters.recomputed_prompt_tokens += recomputed
        logger.warning(
            "%s: %d prompt tokens were computed again on engine %d instead of copied",
            journey.request_id,
            recomputed,
            journey.plan.decode,
        )
        self.counters.failed += self._config.strict
        return not self._config.strict

    def _route(self, journey: Journey, output: EngineCoreOutput | None) -> EngineCoreOutput | None:
        sink = self._sinks.get(journey.request_id)
        if sink is None or output is None:
            return output
        sink.put_nowait(output)
        if output.finished:
            del self._sinks[journey.request_id]
        return None

    async def _stray(self, engine: Engine, output: EngineCoreOutput) -> None:
        """An answer of a leg that was given up. Its KV, if it offered any, must not stay pinned."""
        if output.kv_transfer_params is not None:
            await self._acknowledge(Source(engine.slot, output.request_id))

    # --- deaths --------------------------------------------------------------------------------------

    async def engine_died(self, engine: Engine) -> None:
        """Every request that was on the engine goes on elsewhere, or ends with an error."""
        hit = [j for j in self._by_leg.values() if j.leg is not None and j.leg.slot == engine.slot]
        for journey in hit:
            self._leg_over(journey)
            await self._resume(journey)

    async def _resume(self, journey: Journey) -> None:
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
        chosen = self._place(journey.request)
        if not isinstance(chosen, Plan):
            self._waiting.append(journey)
            return
        self.counters.resumes += 1
        journey.plan = chosen
        await self._send(journey, journey.resume_request())

    def copying_from(self, slot: int) -> bool:
        """Is a request still to copy KV from this engine's memory?"""
        return any(
            journey.source is not None and journey.source.slot == slot
            for journey in self._by_leg.values()
        )

    async def engine_back(self, engine: Engine) -> None:
        """An engine is ready again: requests that no engine could take go on there."""
        self.listen(engine)
        waiting, self._waiting = self._waiting, []
        for journey in waiting:
            chosen = self._place(journey.request)
            if journey.ended or not isinstance(chosen, Plan):
                continue
            self.counters.resumes += 1
            journey.plan = chosen
            await self._send(
                journey, journey.resume_request() if journey.leg else journey.first_request()
            )

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

    # --- ends ----------------------------------------------------------------------------------------

    async def _end(self, journey: Journey, stage: Stage) -> None:
        leg, running = journey.leg, journey.stage is not Stage.DONE
        fetching = journey.stage is Stage.DECODE and leg is not None and not leg.answered
        journey.stage = stage
        journey.mark("finished")
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

    def shutdown(self, timeout: float | None = None) -> None:
        for pump in self._pumps.values():
            pump.get_loop().call_soon_threadsafe(pump.cancel)

    @property
    def unfinished(self) -> int:
        return len(self._by_request)


def remove_private_args(request: EngineCoreRequest) -> None:
    """Hand-off and replay are the node's own: what a client sends under their names is not used."""
    params = request.sampling_params
    if params is not None and params.extra_args and PRIVATE_ARGS & params.extra_args.keys():
        rest = {k: v for k, v in params.extra_args.items() if k not in PRIVATE_ARGS}
        params.extra_args = rest or None


def facts_of(request: EngineCoreRequest, custom_logits_processors: bool = False) -> Facts:
    params = request.sampling_params
    if params is None:
        return Facts(len(request.prompt_token_ids or ()), 0, whole="pooling")
    where, field_name = token1.decide(params, custom_logits_processors=custom_logits_processors)
    return Facts(
        prompt_tokens=len(request.prompt_token_ids or ()),
        max_tokens=params.max_tokens or 0,
        token1=where,
        token1_field=field_name,
        whole=_why_whole(request),
    )


def _why_whole(request: EngineCoreRequest) -> str:
    if request.resumable:
        return "streaming_input"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    return ""
