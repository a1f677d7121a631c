"""The engine-core client that is many engines.

vLLM's front end calls it as if it were one engine; every request becomes a :class:`Journey` over
one or two of them. Runs on the front end's event loop only: no locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ipc.index import Index
from pdnode import token1
from pdnode.engine import Engine
from pdnode.errors import HandoffRecomputed
from pdnode.facts import remove_private_args
from pdnode.journey import Journey, Source, Stage, error_output, offers_kv
from pdnode.placement import Decline, NodeView, Plan
from pdnode.recovery import Recovery
from pdnode.timeline import Timeline
from pdnode.vllm_compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    FinishReason,
    init_logger,
)

if TYPE_CHECKING:
    from pdnode.config import NodeConfig
    from pdnode.node import Node

logger = init_logger(__name__)

NOWHERE = Plan(prefill=None, decode=-1, token1=token1.Token1.FORWARD, reason="no_engine_ready")


class SplitClient(Recovery):
    """See module."""

    node: Node

    def __init__(
        self, config: NodeConfig, engines: list[Engine], index: Index, view: NodeView
    ) -> None:
        super().__init__(config, engines, index, view)
        self.engine_ranks_managed = [engine.slot for engine in engines]
        self._pumps: dict[int, asyncio.Task] = {}
        self.on_step: Callable[[int, EngineCoreOutputs], None] | None = None
        """Sees what every engine step gave, by slot."""

    # --- vLLM's side -----------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        remove_private_args(request)
        known = self._by_request.get(request.request_id)
        if known is not None:
            # The next chunk of a streaming-input session goes where the session lives.
            assert known.leg is not None
            request.request_id = known.leg.leg_id
            await self._engine(known.leg.slot).client.add_request_async(request)
            return
        try:
            await self.begin(request)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this request's)
            await self._refuse(request.request_id, error)

    def shutdown(self, timeout: float | None = None) -> None:
        for pump in self._pumps.values():
            pump.get_loop().call_soon_threadsafe(pump.cancel)

    async def begin(
        self,
        request: EngineCoreRequest,
        *,
        plan: Plan | None = None,
        sink: asyncio.Queue[EngineCoreOutput] | None = None,
    ) -> Journey:
        """Start a request. ``plan`` overrides placement and ``sink`` takes the outputs (self-test)."""
        chain = self._prefixes.chain(request)
        chosen = plan or self._place(request, chain)
        if isinstance(chosen, Decline) and self.resources.engine_dead:
            self.counters.failed += 1
            raise EngineDeadError()
        # With every engine on its way back, a request waits for the first of them.
        parked = isinstance(chosen, Decline)
        placed = NOWHERE if parked else chosen
        timeline = Timeline(
            _sayable(request.external_req_id or request.request_id),
            len(request.prompt_token_ids or ()),
            arrived=time.monotonic(),
        )
        journey = Journey(request, placed, timeline, self._needs_history(request), chain)
        timeline.placed(placed)
        self._by_request[request.request_id] = journey
        if sink is not None:
            self._sinks[request.request_id] = sink
        else:
            self._count(placed)
            self.history.begin(timeline)
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

    def _count(self, plan: Plan) -> None:
        self.counters.requests += 1
        if plan.prefill is None or plan.prefill == plan.decode:
            self.counters.single_engine += 1
            self.counters.single_engine_reasons[plan.reason] += 1

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
        if self.on_step is not None:
            self.on_step(engine.slot, outputs)
        emitted, produced = [], len(outputs.outputs)
        in_peace = not self._suspects and not self._sinks
        for output in outputs.outputs:
            journey = self._by_leg.get(output.request_id)
            if journey is None:
                await self._stray(engine, output)
                continue
            if output.finish_reason is FinishReason.ABORT and not self.told_to_abort:
                # We did not ask: the engine's process was told to end (SIGTERM). It is as good as
                # dead, and its requests go on elsewhere.
                self.node.supervisor.give_up(engine, "it was told to end", from_outside=True)
                continue
            journey.timeline.output(output, outputs.timestamp)
            if in_peace and journey.goes_on(output):
                mine = journey.on_output(output)
            else:
                mine = await self._guarded(journey, self._advance(journey, output))
            if mine is not None:
                emitted.append(mine)
        stats = outputs.scheduler_stats
        if stats is not None:
            engine.cache_seen(stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits)
        if produced:
            self.meters[engine.slot].stepped(produced, outputs.timestamp * 1e3)
        outputs.outputs = emitted
        outputs.engine_index = engine.slot
        if emitted or outputs.scheduler_stats is not None:
            self._outputs.put_nowait(outputs)

    async def _advance(self, journey: Journey, output: EngineCoreOutput) -> EngineCoreOutput | None:
        first = self._leg_answered(journey, output)
        if journey.stage is Stage.PREFILL:
            mine = await self._prefilled(journey, output)
        elif first and journey.stage is Stage.DECODE:
            mine = await self._decode_began(journey, output)
        else:
            mine = journey.on_output(output)
        if journey.stage is Stage.DONE and output.finish_reason is FinishReason.ERROR:
            # Its engine could not go on with it alone.
            journey.stage = Stage.FAILED
            self.counters.failed += 1
        if journey.ended:
            await self._end(journey, journey.stage)
        elif self._suspects:
            await self._next_trial()
        return self._route(journey, mine)

    async def _prefilled(self, journey: Journey, output: EngineCoreOutput):
        resumed_from = journey.source
        mine = journey.on_prefill_output(output)
        self._leg_over(journey)
        if resumed_from is not None:
            await self._acknowledge(resumed_from)
        if journey.stage is Stage.DECODE:
            await self._decode(journey)
        return mine

    async def _decode_began(self, journey: Journey, output: EngineCoreOutput):
        computed = journey.on_decode_began(output)
        await self._release(journey)
        if output.finish_reason is FinishReason.ERROR:
            return journey.on_output(output)  # no hand-off: it got nothing, and computed nothing
        if not journey.split or journey.deaths:
            # Its KV may have gone with an engine: that is counted as a resume, and not silent.
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
        if self._config.strict:
            self.counters.failed += 1
            self.explain(
                journey.request_id,
                HandoffRecomputed(
                    f"the KV of {recomputed} prompt tokens was not there to be copied, and --strict "
                    "forbids computing it again"
                ),
            )
        return not self._config.strict

    async def _stray(self, engine: Engine, output: EngineCoreOutput) -> None:
        """An answer of a leg that was given up. Its KV, if it offered any, must not stay pinned."""
        if offers_kv(output):
            await self._acknowledge(Source(engine.slot, output.request_id))

    @property
    def unfinished(self) -> int:
        return len(self._by_request)


def _sayable(request_id: str) -> str:
    """JSON can bring half a surrogate pair, and no answer that lists requests could be written with it."""
    return request_id.encode(errors="replace").decode()
