"""Ending an engine does not wait for somebody else to reap what is dead already."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from pdnode.engine import KILL_S, Engine, runs


def test_a_killed_process_that_nobody_reaps_is_gone():
    # We are its parent and do not wait for it: it stays a zombie.
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    try:
        assert runs(process)
        begin_s = time.monotonic()
        Engine.kill(Engine.__new__(Engine), [process])
        assert time.monotonic() - begin_s < KILL_S
        assert process.status() == psutil.STATUS_ZOMBIE
        assert not runs(process)
    finally:
        child.wait()
    assert not runs(process)
