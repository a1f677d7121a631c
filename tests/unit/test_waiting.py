"""An engine's process that waits for a message sleeps, and wakes for it."""

from __future__ import annotations

import threading
import time

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from pdnode.vllm_compat import sleep_soon

LATER_S = 0.5


@pytest.fixture
def asleep_after_10_ms(monkeypatch):
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)
    sleep_soon(0.01)


def test_who_waits_sleeps_and_is_woken(asleep_after_10_ms):
    writer = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), rank=0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    writer.enqueue("first")
    assert reader.dequeue(timeout=10) == "first"
    began_s, worked_s = time.monotonic(), time.thread_time()
    threading.Timer(LATER_S, writer.enqueue, ["second"]).start()
    assert reader.dequeue(timeout=10) == "second"
    assert time.thread_time() - worked_s < LATER_S / 4
    assert LATER_S / 2 < time.monotonic() - began_s < 5
