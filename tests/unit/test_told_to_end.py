"""An engine whose process is told to end aborts what it runs: that is a death, not an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from pdnode.split_client import SplitClient
from pdnode.suspects import Suspects
from pdnode.vllm_compat import EngineCoreOutput, EngineCoreOutputs, FinishReason

ENGINE = SimpleNamespace(slot=1)


def aborted(request_id: str) -> EngineCoreOutputs:
    output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT)
    return EngineCoreOutputs(outputs=[output])


def test_an_abort_that_nobody_asked_for_gives_the_engine_up_and_reaches_no_client():
    given_up = []

    async def run() -> None:
        client = SplitClient.__new__(SplitClient)
        client.told_to_abort = False
        client.on_step = None
        client._by_leg = {"a/d1": object()}
        client._sinks, client._suspects = {}, Suspects()
        client._outputs = asyncio.Queue()
        client.meters = {1: SimpleNamespace(stepped=lambda outputs, at_ms: None)}
        supervisor = SimpleNamespace(
            give_up=lambda engine, why, from_outside: given_up.append((engine, why, from_outside))
        )
        client.node = SimpleNamespace(supervisor=supervisor)
        await client._take(ENGINE, aborted("a/d1"))
        # Still known as the engine's: it is resumed with everything else that was there.
        assert list(client._by_leg) == ["a/d1"]
        # A leg that we gave up ourselves: its abort is no news.
        await client._take(ENGINE, aborted("a/p0"))
        assert client._outputs.empty()

    asyncio.run(run())
    assert given_up == [(ENGINE, "it was told to end", True)]


def test_a_pause_that_aborts_is_the_operators_wish():
    async def run() -> None:
        client = SplitClient.__new__(SplitClient)
        client.told_to_abort = False
        client._all = _nothing
        for mode in ("keep", "abort"):
            await client.pause_scheduler_async(mode)
            assert client.told_to_abort is (mode == "abort")
        await client.resume_scheduler_async()
        assert client.told_to_abort is False

    asyncio.run(run())


async def _nothing(*_: object, **__: object) -> None:
    return None
