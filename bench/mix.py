"""Chat and long prompts mixed: the load of ``serve`` and ``saturation``."""

from __future__ import annotations

import argparse
import random
import secrets

from bench.line_up import SERVED
from bench.streams import body, prompt

KINDS = ("chat", "long")


def add_mix_flags(parser: argparse.ArgumentParser, requests: int) -> None:
    parser.add_argument("--chat", type=int, nargs=2, default=(200, 64), metavar=("IN", "OUT"))
    parser.add_argument("--long", type=int, nargs=2, default=(1900, 16), metavar=("IN", "OUT"))
    parser.add_argument("--long-share", type=float, default=0.15)
    parser.add_argument("--requests", type=int, default=requests, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)


def kinds(options: argparse.Namespace, rng: random.Random) -> list[str]:
    """One a request. The share of long ones is exact, as there are few."""
    long = round(options.long_share * options.requests)
    found = ["long"] * long + ["chat"] * (options.requests - long)
    rng.shuffle(found)
    return found


def fresh(tokens: int, output: int) -> dict:
    """A request whose prompt no cache holds."""
    return body(SERVED, prompt(tokens, secrets.token_hex(8)), output)


def of_kind(options: argparse.Namespace, kind: str) -> dict:
    return fresh(*getattr(options, kind))


def text(options: argparse.Namespace) -> str:
    return (
        f"{options.long_share:.0%} of {options.long[0]} + {options.long[1]} tokens, the rest "
        f"{options.chat[0]} + {options.chat[1]}"
    )
