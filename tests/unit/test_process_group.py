"""What vLLM spawns leaves the launcher's process group before it does anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import multiprocessing
import os
import sys

from launcher import main  # as the script that pip makes of it


def group(answer):
    answer.send((os.getpid(), os.getpgid(0)))


if __name__ == "__main__":
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=group, args=(theirs,))
    child.start()
    print(*ours.recv(), os.getpgid(0) == int(sys.argv[1]))
"""


def test_a_spawned_process_leads_its_own_group_and_the_launcher_stays_in_its_own(tmp_path):
    program = tmp_path / "pdnode"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(os.getpgid(0))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pid, group, stays = subprocess.check_output(command, env=env, text=True, timeout=60).split()
    assert pid == group
    assert stays == "True"
