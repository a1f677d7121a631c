"""Ending an engine does not wait for somebody else to reap what is dead already."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from pdnode.engine import KILL_S, Engine, EngineState, runs


def test_a_killed_process_that_nobody_reaps_is_gone():
    # We are its parent and do not wait for it: it stays a zombie.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    try:
        assert runs(process)
        engine = Engine.__new__(Engine)
        engine.state = EngineState.READY
        begin_s = time.monotonic()
        engine.kill([process])
        assert time.monotonic() - begin_s < KILL_S
        assert process.status() == psutil.STATUS_ZOMBIE
        assert not runs(process)
    finally:
        child.kill()
        child.wait()
    assert not runs(process)
