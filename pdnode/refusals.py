"""vLLM flags that a PD node owns or cannot honour, each with what to use instead.

Checked twice: on the command line before vLLM's parser is imported, so that the usual spelling is
refused at once, and on what that parser understood, so that no other spelling passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdnode.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    flags: tuple[str, ...]
    instead: str
    harmless: tuple[Any, ...] = (None, False)
    """Values that ask for nothing."""

    @property
    def dest(self) -> str:
        return self.flags[0].lstrip("-").replace("-", "_")


ONE = (None, 0, 1)
ONE_FRONT_END = "a node has one front end over all its engines"
MORE_ENGINES = (
    "for more engines name more GPUs with --prefill-gpus and --decode-gpus, or raise "
    "--prefill-engines and --decode-engines"
)
KV_SHARDS = "KV that is split over the context cannot be handed over: use --prefill-tp, --decode-tp"
ONE_BOX = "a node is one machine: place engines with --prefill-gpus and --decode-gpus"

RULES = (
    Rule(("--kv-transfer-config",), "the node sets it for its own connector: leave it out"),
    Rule(
        ("--tensor-parallel-size", "-tp"),
        "use --prefill-tp and --decode-tp, which may differ",
        harmless=(None,),
    ),
    Rule(("--pipeline-parallel-size", "-pp"), "use --prefill-tp and --decode-tp", ONE),
    Rule(("--decode-context-parallel-size", "-dcp"), KV_SHARDS, ONE),
    Rule(("--prefill-context-parallel-size", "-pcp"), KV_SHARDS, ONE),
    Rule(("--data-parallel-size", "-dp"), MORE_ENGINES, ONE),
    Rule(("--data-parallel-size-local", "-dpl"), MORE_ENGINES, ONE),
    Rule(("--data-parallel-rank", "-dpn"), MORE_ENGINES, (None,)),
    Rule(("--data-parallel-start-rank", "-dpr"), MORE_ENGINES, (None,)),
    Rule(("--data-parallel-address", "-dpa"), MORE_ENGINES),
    Rule(("--data-parallel-rpc-port", "-dpp"), MORE_ENGINES),
    Rule(("--data-parallel-hybrid-lb", "-dph"), MORE_ENGINES),
    Rule(("--data-parallel-external-lb", "-dpe"), MORE_ENGINES),
    Rule(("--data-parallel-multi-port-external-lb",), MORE_ENGINES),
    Rule(("--enable-elastic-ep",), MORE_ENGINES),
    Rule(("--nnodes", "-n"), ONE_BOX, ONE),
    Rule(("--node-rank", "-r"), ONE_BOX, (None, 0)),
    Rule(("--device-ids",), "use --prefill-gpus and --decode-gpus"),
    Rule(
        ("--distributed-executor-backend",),
        "the node starts and stops its workers itself: leave it out, or use mp",
        (None, "mp", "uni"),
    ),
    Rule(("--headless",), ONE_FRONT_END + ": leave it out"),
    Rule(("--api-server-count", "-asc"), ONE_FRONT_END + ": leave it out", (None, 1)),
    Rule(("--grpc",), "a node speaks HTTP: leave it out"),
    Rule(("--grpc-port",), "a node speaks HTTP: use --port"),
    Rule(
        ("--enable-sleep-mode",),
        "a sleeping engine gives away the KV memory that the others have mapped: stop the node "
        "instead",
    ),
    Rule(
        ("--kv-offloading-size",),
        "it needs the KV connector that the node uses to hand KV over: leave it out",
    ),
    Rule(
        ("--kv-events-config",),
        "all engines of the node would publish at its one address: leave it out",
    ),
)


def early(argv: Sequence[str]) -> None:
    """Raises ConfigError for plainly spelled flags of RULES; anything odd is left to ``late``."""
    for rule in RULES:
        for position, arg in enumerate(argv):
            name, equals, value = arg.partition("=")
            # A dotted spelling sets one field of a JSON flag.
            if name.partition(".")[0] in rule.flags:
                _refuse(rule, name, value if equals else _next(argv, position))


def _next(argv: Sequence[str], position: int) -> Any:
    value = argv[position + 1] if position + 1 < len(argv) else ""
    return True if value.startswith("-") or not value else value


def late(args: argparse.Namespace) -> None:
    """Raises ConfigError. ``args``: vLLM's reading of the command line."""
    for rule in RULES:
        value = getattr(args, rule.dest, None)
        # vLLM's parser cannot tell the size 1 from a size that nobody gave.
        if rule.dest != "tensor_parallel_size" or value != 1:
            _refuse(rule, rule.flags[0], value)


def _refuse(rule: Rule, flag: str, value: Any) -> None:
    if value not in rule.harmless and str(value) not in map(str, rule.harmless):
        raise ConfigError(f"{flag} is not available in a PD node: {rule.instead}")
