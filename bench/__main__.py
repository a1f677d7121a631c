"""``python -m bench NAME [options]``."""

from __future__ import annotations

import importlib
import os
import sys

BENCHES = {
    "chaos": "kill, stop and abort engines under load; every answer against plain vLLM's",
    "chaos_peer": "the same kills against 1P1D of vLLM + NIXL, beside a node's",
    "cycles": "start a node and end it, at random phases, with random signals: nothing may be left",
    "frontend": "pdnode's front end beside vLLM's own, over fake engine cores",
    "handoff": "one request at a time: TTFT, hand-off and KV rate beside plain vLLM and NIXL",
    "interference": "gaps of running streams while long prompts arrive, beside plain vLLM",
    "ipc": "the index against Redis and ZeroMQ, copies against memmove, the pipe against queues",
    "plan": "goodput that `launcher.py plan` predicts, beside the node's own",
    "saturation": "requests a second when there is always more to do, beside plain vLLM",
    "scale": "control cost per request from 1P1D to 8P8D, over fake engine cores",
    "serve": "goodput under a service level, chat and long prompts mixed, beside plain vLLM",
    "startup": "ready and memory of 1P1D beside plain vLLM",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        print("python -m bench NAME [options]\n", file=sys.stderr)
        for name, what in BENCHES.items():
            print(f"  {name:<14} {what}", file=sys.stderr)
        return 2
    # What vLLM says while it is imported is not a finding.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
