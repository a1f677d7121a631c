"""When the front end sends D a follower and when it takes it back; engines are lists of messages."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ipc.index import Index
from pdnode.device import CpuDevice
from pdnode.engine import EngineState
from pdnode.errors import NodeFault, PdNodeError, RequestUnsendable
from pdnode.placement import NodeView, PlacementConfig
from pdnode.split_client import SplitClient
from pdnode.vllm_compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)

P0, P1, D = 0, 1, 2
PROMPT = list(range(3, 303))


class Engine:
    def __init__(self, slot: int, role: str) -> None:
        self.slot, self.role, self.engine_id = slot, role, f"e{slot}"
        self.state, self.draining = EngineState.READY, False
        self.ended_from_outside = False
        self.requests = self.queued_tokens = 0
        self.client = self
        self.spec = SimpleNamespace(device=CpuDevice(((0,),)))
        self.max_batched_tokens = 128
        # No prefix cache: the front end then hashes no prompts.
        caching = SimpleNamespace(enable_prefix_caching=False)
        self.vllm_config = SimpleNamespace(cache_config=caching)
        self.here: dict[str, EngineCoreRequest] = {}
        self.fault: Exception | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        assert self.state is EngineState.READY, "a message to a dead engine is lost"
        if self.fault is not None:
            raise self.fault
        self.here[request.request_id] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.here.pop(request_id, None)

    async def wake(self) -> None: ...

    def leg_sent(self, tokens: int) -> None:
        self.requests += 1

    def leg_answered(self, tokens: int) -> None: ...

    def leg_over(self, tokens: int, *, answered: bool) -> None:
        self.requests -= 1


class Lab:
    def __init__(self, flow: str) -> None:
        name = f"pdtest-{secrets.token_hex(6)}"
        self.index = Index.create(name, engine_slots=4, node_boot_id=1)
        self.acks = Index.attach(name, me=3)
        self.engines = [Engine(P0, "prefill"), Engine(P1, "prefill"), Engine(D, "decode")]
        config = SimpleNamespace(
            placement=PlacementConfig(split="always"),
            flow=flow,
            strict=False,
            frontend_args=SimpleNamespace(logits_processors=None),
        )
        self.client = SplitClient(config, self.engines, self.acks, NodeView((), 128, 4096))
        self.told: list[PdNodeError] = []
        """What clients of requests that failed are told."""
        self.client.explain = lambda _, error: self.told.append(error)

    async def begin(self, **params) -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True, **params)
        request = EngineCoreRequest("r", PROMPT, None, params, None, 0.0, None, None, None)
        await self.client.add_request_async(request)

    async def answer(
        self, slot: int, leg: str, token: int, *, reason: FinishReason | None = None
    ) -> None:
        ends = reason is FinishReason.LENGTH
        output = EngineCoreOutput(
            leg, [token], finish_reason=reason, kv_transfer_params={"transfer_id": leg} if ends else None
        )  # fmt: skip
        if reason is not None:
            del self.engines[slot].here[leg]
        await self.client._take(self.engines[slot], EngineCoreOutputs(outputs=[output]))

    async def die(self, slot: int) -> None:
        self.engines[slot].state = EngineState.DEAD
        self.engines[slot].here.clear()
        await self.client.engine_died(self.engines[slot])

    def here(self) -> list[list[str]]:
        return [[*engine.here] for engine in self.engines]

    def close(self) -> None:
        self.acks.close()
        self.index.unlink()
        self.index.close()


@pytest.fixture
def follow(request) -> Callable:
    """Runs a scenario on a lab of its own."""

    def run(scenario: Callable, flow: str = "decode-first") -> None:
        lab = Lab(flow)
        try:
            asyncio.run(scenario(lab))
            assert lab.told == []
        finally:
            lab.close()

    return run


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1, "seed": 1}])
def test_decode_gets_a_follower_with_prefill_and_loses_it_when_it_decodes(follow, params):
    async def scenario(lab: Lab) -> None:
        await lab.begin(**params)
        assert lab.here() == [["r/p1"], [], ["r/p1/f"]]
        follower = lab.engines[D].here["r/p1/f"]
        assert follower.prompt_token_ids == PROMPT
        assert follower.sampling_params.extra_args["kv_transfer_params"] == {
            "do_follow": True, "transfer_id": "r/p1", "remote_slot": P0,
        }  # fmt: skip
        await lab.answer(P0, "r/p1", 7, reason=FinishReason.LENGTH)
        assert lab.here() == [[], [], ["r/p1/f", "r/d2"]]
        await lab.answer(D, "r/d2", 8)
        assert lab.here() == [[], [], ["r/d2"]]
        assert lab.client.counters.decode_first == 1

    follow(scenario)


@pytest.mark.parametrize("flow, sent", [("prefill-first", False), ("auto", True)])
def test_the_flow_decides(follow, flow, sent):
    async def scenario(lab: Lab) -> None:
        await lab.begin(temperature=0)
        assert lab.here() == [["r/p1"], [], ["r/p1/f"] if sent else []]

    follow(scenario, flow)


def test_it_ends_with_the_request(follow):
    async def leaves(lab: Lab) -> None:
        await lab.begin(temperature=0)
        await lab.client.abort_requests_async(["r"])
        assert lab.here() == [[], [], []]

    async def ends_on_token_1(lab: Lab) -> None:
        await lab.begin(temperature=0)
        await lab.answer(P0, "r/p1", 2, reason=FinishReason.STOP)
        assert lab.here() == [[], [], []]

    follow(leaves)
    follow(ends_on_token_1)


def test_prefill_dies_and_the_follower_goes_with_its_leg(follow):
    async def scenario(lab: Lab) -> None:
        await lab.begin(temperature=0)
        await lab.die(P0)
        assert lab.here() == [[], ["r/p2"], ["r/p2/f"]]
        told = lab.engines[D].here["r/p2/f"].sampling_params.extra_args["kv_transfer_params"]
        assert (told["transfer_id"], told["remote_slot"]) == ("r/p2", P1)

    follow(scenario)


def test_decode_dies_and_prefills_answer_goes_where_somebody_lives(follow):
    async def scenario(lab: Lab) -> None:
        await lab.begin(temperature=0)
        await lab.die(D)
        assert lab.here() == [["r/p1"], [], []]
        await lab.answer(P0, "r/p1", 7, reason=FinishReason.LENGTH)
        (leg,) = [name for engine in lab.engines for name in engine.here]
        assert leg == "r/d2"
        assert lab.client.counters.failed == 0

    async def nobody_is_left(lab: Lab) -> None:
        await lab.begin(temperature=0)
        await lab.die(D)
        lab.engines[P1].state = EngineState.DEAD
        lab.engines[P0].draining = True
        await lab.answer(P0, "r/p1", 7, reason=FinishReason.LENGTH)
        assert lab.here() == [[], [], []]
        lab.engines[D].state = EngineState.READY
        await lab.client.engine_back(lab.engines[D])
        assert lab.here() == [[], [], ["r/d2"]]

    follow(nobody_is_left)
    follow(scenario)


FAULTS = [
    (RuntimeError("nobody thought of it"), NodeFault, 1),
    (OverflowError("too large"), RequestUnsendable, 0),
]


@pytest.mark.parametrize("fault, told, failed", FAULTS)
@pytest.mark.parametrize("where", ["first leg", "second leg", "after a death"])
def test_what_goes_wrong_over_a_request_ends_that_one_only(follow, where, fault, told, failed):
    async def scenario(lab: Lab) -> None:
        slot = {"first leg": P0, "second leg": D, "after a death": P1}[where]
        lab.engines[slot].fault = fault
        await lab.begin(temperature=0)
        if where == "second leg":
            await lab.answer(P0, "r/p1", 7, reason=FinishReason.LENGTH)
        elif where == "after a death":
            await lab.die(P0)
        assert [type(error) for error in lab.told] == [told]
        lab.told.clear()
        assert lab.client.unfinished == 0
        assert lab.client.counters.failed == failed
        assert lab.here() == [[], [], []]
        assert [engine.requests for engine in lab.engines] == [0, 0, 0]
        await lab.client.get_output_async()
        lab.engines[slot].fault = None
        await lab.begin(temperature=0)
        assert sum(map(len, lab.here())) == 1

    follow(scenario, "prefill-first")
