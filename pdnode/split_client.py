"""The engine-core client that is many engines.

vLLM's front end calls it as if it were one engine; every request becomes a :class:`Journey` over
one or two of them. Runs on the front end's event loop only: no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipc.index import Index
from pdnode import token1
from pdnode.engine import Engine, EngineState
from pdnode.fanout import FanOut
from pdnode.journey import KV_PARAMS, Journey, Stage, error_output
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

MAX_DEATHS = 2
"""A request that was on two engines when they died is likely what kills them."""


@dataclass(slots=True)
class Resources:
    """The one thing vLLM's front end asks of a client's resources: is there no engine left?"""

    engine_dead: bool = False


@dataclass(slots=True)
class Counters:
    requests: int = 0
    handoffs: int = 0
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
        self._custom_logits_processors = bool(
            getattr(engines[0].vllm_config.model_config, "logits_processors", None)
        )

    # --- vLLM's side -----------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        known = self._by_request.get(request.request_id)
        if known is not None:
            # The next chunk of a streaming-input session goes where the session lives.
            assert known.leg is not None
            chunk = known._copy(known.leg, request.sampling_params, None)
            await self._engine(known.leg.slot).client.add_request_async(chunk)
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
        refuse_kv_params(request)
        chosen = plan or self._place(request)
        if isinstance(chosen, Decline):
            self.counters.failed += 1
            raise EngineDeadError()
        journey = Journey(request, chosen)
        journey.mark("arrived")
        self._by_request[request.request_id] = journey
        if sink is not None:
            self._sinks[request.request_id] = sink
        else:
            self._count(chosen)
        if chosen.prefill is None:
            await self._send(journey, journey.whole_request())
        else:
            journey.mark("prefill_sent")
            await self._send(journey, journey.prefill_request())
        return journey

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
        )

    def _place(self, request: EngineCoreRequest) -> Plan | Decline:
        return place(facts_of(request, self._custom_logits_processors), self.view())

    def _count(self, plan: Plan) -> None:
        self.counters.requests += 1
        if plan.prefill is None:
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
            mine = journey.on_prefill_output(output)
            self._leg_over(journey)
            if journey.stage is Stage.DECODE:
                journey.mark("decode_sent")
                await self._send(journey, journey.decode_request())
        else:
            if first and journey.stage is Stage.DECODE:
                mine = await self._decode_began(journey, output)
            else:
                mine = journey.on_output(output)
        if journey.ended:
            await self._end(journey, journey.stage)
        return self._route(journey, mine)

    async def _decode_began(self, journey: Journey, output: EngineCoreOutput) -> EngineCoreOutput:
        journey.mark("decode_first")
        journey.on_decode_first_output(output)
        await self._release(journey)
        # Self-test requests are judged by the self-test; the counters speak of users' requests.
        if journey.request_id not in self._sinks:
            self.counters.handoffs += journey.handed_over
            self.counters.recomputed_prompt_tokens += journey.recomputed_tokens
        if journey.recomputed_tokens:
            logger.warning(
                "%s: %d prompt tokens were computed again on engine %d instead of copied",
                journey.request_id,
                journey.recomputed_tokens,
                journey.plan.decode,
            )
            if self._config.strict:
                journey.stage = Stage.FAILED
                self.counters.failed += 1
                return error_output(journey.request_id)
        return journey.on_output(output)

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
        offered = output.kv_transfer_params
        if offered and offered.get("transfer_id"):
            await self._drop(engine.slot, offered["transfer_id"], output.request_id)

    # --- deaths --------------------------------------------------------------------------------------

    async def engine_died(self, engine: Engine) -> None:
        """Every request that was on the engine goes on elsewhere, or ends with an error."""
        if not any(e.state is EngineState.READY for e in self._engines):
            self.resources.engine_dead = not self.node.will_restart
        hit = [j for j in self._by_leg.values() if j.leg is not None and j.leg.slot == engine.slot]
        for journey in hit:
            self._leg_over(journey)
            await self._resume(journey)

    async def _resume(self, journey: Journey) -> None:
        journey.deaths += 1
        chosen = self._place(journey.request) if journey.deaths < MAX_DEATHS else None
        if not isinstance(chosen, Plan):
            await self._fail(journey)
            return
        self.counters.resumes += 1
        journey.plan = chosen
        request = journey.resume_request()
        await self._send(journey, request)

    async def _fail(self, journey: Journey) -> None:
        self.counters.failed += 1
        output = error_output(journey.request_id)
        await self._end(journey, Stage.FAILED)
        mine = self._route(journey, output)
        if mine is not None:
            self._outputs.put_nowait(EngineCoreOutputs(engine_index=0, outputs=[mine]))

    # --- ends ----------------------------------------------------------------------------------------

    async def _end(self, journey: Journey, stage: Stage) -> None:
        leg, running = journey.leg, journey.stage not in (Stage.DONE,)
        journey.stage = stage
        journey.mark("finished")
        self._by_request.pop(journey.request_id, None)
        still_known = leg is not None and leg.leg_id in self._by_leg
        self._leg_over(journey)
        if running and still_known:
            assert leg is not None
            await self._abort_leg(leg.slot, leg.leg_id)
        await self._release(journey)

    async def _abort_leg(self, slot: int, leg_id: str) -> None:
        engine = self._engine(slot)
        if engine.state is EngineState.READY:
            await engine.client.abort_requests_async([leg_id])

    async def _release(self, journey: Journey) -> None:
        """P may let go of this request's KV: acknowledge for the node, and wake P to notice."""
        if journey.transfer_id and journey.prefill_leg is not None:
            transfer_id, journey.transfer_id = journey.transfer_id, ""
            await self._drop(journey.prefill_leg.slot, transfer_id, journey.prefill_leg.leg_id)

    async def _drop(self, slot: int, transfer_id: str, leg_id: str) -> None:
        entry = self._index.select(transfer_id, owner=slot)
        if entry is not None:
            self._index.drop(entry)
        # An abort of a finished id changes nothing in vLLM, but it wakes an idle engine, and every
        # turn of its loop looks for acknowledged hand-offs.
        await self._abort_leg(slot, leg_id)

    def shutdown(self, timeout: float | None = None) -> None:
        for pump in self._pumps.values():
            pump.get_loop().call_soon_threadsafe(pump.cancel)

    @property
    def unfinished(self) -> int:
        return len(self._by_request)


def refuse_kv_params(request: EngineCoreRequest) -> None:
    """Hand-off parameters are the node's own: what a client sends under that name is not used."""
    params = request.sampling_params
    if params is not None and params.extra_args and KV_PARAMS in params.extra_args:
        rest = {k: v for k, v in params.extra_args.items() if k != KV_PARAMS}
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
