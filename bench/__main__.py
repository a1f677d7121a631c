"""``python -m bench NAME [options]``."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "chaos": "kill, stop and abort engines under load; every answer against plain vLLM's",
    "ipc": "the index against Redis and ZeroMQ, copies against memmove, the pipe against queues",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        print("python -m bench NAME [options]\n", file=sys.stderr)
        for name, what in BENCHES.items():
            print(f"  {name:<10} {what}", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
