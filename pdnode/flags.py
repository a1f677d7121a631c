"""The launcher's own flags, and how they are taken out of a ``vllm serve`` command line.

No vLLM import here: a contradiction between these flags is found in milliseconds, while vLLM's own
parser takes seconds to import.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from pdnode import turns
from pdnode.errors import ConfigError

FLOWS = ("prefill-first", "decode-first", "auto")
KV_PATHS = ("auto", "shm", "staged", "cuda-ipc")
CPU_LISTS = ("prefill_cpus", "decode_cpus")
GPU_LISTS = ("prefill_gpus", "decode_gpus")


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _number(kind: type, lowest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not lowest <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {lowest}")
        return value

    parse.__name__ = kind.__name__
    return parse


COUNT = _number(int, 1)
SIZE = _number(int, 0)
SECONDS = _number(float, 0.1)


def add_to(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pdnode")
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        _add_role(group, role, other)
    group.add_argument(
        "--flow",
        choices=FLOWS,
        default=FLOWS[0],
        help="when decode starts to copy KV: after prefill (default), with it, or as estimated",
    )
    group.add_argument(
        "--split",
        choices=("auto", "always", "never"),
        default="auto",
        help="split requests between the roles, or never: plain data-parallel engines, to compare",
    )
    group.add_argument(
        "--prompt-order",
        choices=turns.ORDERS,
        default=turns.ORDERS[0],
        help="of an engine's prompts: short ones pass long ones until a deadline (default), or as they came, "
        "which is also what --scheduling-policy priority and --scheduler-cls get",
    )
    group.add_argument(
        "--roles",
        choices=("fixed", "auto"),
        default="fixed",
        help="auto: an engine is sent the other kind of work while that side is the bottleneck",
    )
    group.add_argument(
        "--kv-path",
        choices=KV_PATHS,
        default=KV_PATHS[0],
        help="how KV gets from engine to engine (default: the fastest that the devices allow)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="refuse what would silently be slower: staged KV paths, recomputed KV",
    )
    group.add_argument("--dry-run", action="store_true", help="print the plan, start nothing")
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write every request and engine step there, for https://ui.perfetto.dev; overwritten",
    )
    group.add_argument(
        "--record-trace",
        metavar="FILE",
        help="append when requests came and how long they were, for `launcher.py plan`; no content",
    )
    group.add_argument(
        "--index-entries",
        type=COUNT,
        default=4096,
        metavar="N",
        help="requests an engine can offer at once in the shared index (default: %(default)s)",
    )
    group.add_argument(
        "--kv-pool-gib",
        type=SIZE,
        default=0,
        metavar="N",
        help="shared memory in which prompts' KV outlives its engine, for all engines to take "
        "instead of computing it (default: 0, off)",
    )
    _add_budgets(group)


def _add_role(group: argparse._ArgumentGroup, role: str, other: str) -> None:
    group.add_argument(
        f"--{role}-policy",
        choices=("round-robin", "least-loaded", "prefix-aware"),
        default="prefix-aware",
        help=f"which {role} engine gets a request (default: %(default)s)",
    )
    group.add_argument(
        f"--{role}-gpus",
        metavar="IDS",
        help=f"GPUs for {role}, such as 0,1 or UUIDs; needs --{other}-gpus",
    )
    group.add_argument(
        f"--{role}-cpus",
        metavar="CORES",
        help=f"CPU cores for {role}, such as 0-3,6; needs --{other}-cpus",
    )
    group.add_argument(
        f"--{role}-tp",
        type=COUNT,
        default=1,
        metavar="N",
        help=f"tensor parallel size of a {role} engine (default: 1)",
    )
    group.add_argument(
        f"--{role}-engines",
        type=COUNT,
        metavar="N",
        help=f"{role} engines that divide the role's cores (default: 1)",
    )


def _add_budgets(group: argparse._ArgumentGroup) -> None:
    for flag, default_s, help_text in (
        ("--lease", 60.0, "how long prefill keeps KV that nobody fetched"),
        ("--start-timeout", 600.0, "for all engines to become ready"),
        ("--health-timeout", 60.0, "without a sign of life before an engine is replaced"),
        ("--drain-timeout", 30.0, "for running requests to end when the node is stopped"),
    ):
        group.add_argument(
            flag,
            type=SECONDS,
            default=default_s,
            metavar="SECONDS",
            help=f"{help_text} (default: %(default)g)",
        )


def own_parser() -> Parser:
    parser = Parser(
        prog="launcher.py",
        usage="python launcher.py [MODEL] [placement flags] [any `vllm serve` flag]",
        description="Serve MODEL (default: the embedded SmolLM2-135M-Instruct) with its prefill "
        "and its decode on separate GPUs or CPU cores of this machine.",
        add_help=False,
        # An abbreviation could be one of ours today and one of vLLM's tomorrow.
        allow_abbrev=False,
    )
    add_to(parser)
    return parser


def split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and what is left for vLLM in its order. Raises ConfigError."""
    return own_parser().parse_known_args([with_dashes(arg) for arg in argv])


def with_dashes(arg: str) -> str:
    """``--prefill_cpus=0`` -> ``--prefill-cpus=0``: vLLM allows both spellings of a flag."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail + equals + value
