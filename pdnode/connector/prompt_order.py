"""Which prompts the next pass of an engine takes: by their deadlines (:mod:`pdnode.turns`). Pure.

vLLM's scheduler gives a pass to the running prompts first, in their order, then to the waiting ones.
:func:`next_pass` says what must change before it is asked: the order of both, which of the running
ones must hold back for this pass, and how many prompt tokens it may have in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

TURN = "pdnode_turn"
"""In a leg's ``SamplingParams.extra_args``: a :class:`pdnode.turns.Turn`."""

MUCH_LONGER = 2
"""A prompt that is so many times longer than the one whose turn it is does not share its pass: the
first token of everyone in a pass comes when the pass ends."""


class Prompt(NamedTuple):
    deadline_ms: float
    left: int
    """Tokens to compute."""
    pass_tokens: int = 0
    """Of them in one pass at most; 0: no bound."""
    can_begin: bool = True
    """Of a waiting one: there seems to be room for it."""


class Pass(NamedTuple):
    running: list[int]
    """Indices, in the order to be served; those not among them hold back."""
    waiting: list[int]
    tokens: float
    """Of prompts, in all; inf: as many as vLLM takes."""


def next_pass(running: Sequence[Prompt], waiting: Sequence[Prompt], *, give_way: bool) -> Pass:
    """``give_way``: running prompts may hold back for waiting ones."""
    in_turn = sorted(range(len(running)), key=lambda i: running[i].deadline_ms)
    queue = sorted(range(len(waiting)), key=lambda i: waiting[i].deadline_ms)
    beginning = [waiting[i] for i in queue if waiting[i].can_begin]
    if give_way and beginning:
        in_turn = [i for i in in_turn if running[i].deadline_ms <= beginning[0].deadline_ms]
    tokens = _tokens([running[i] for i in in_turn] + beginning)
    return Pass(in_turn, queue, tokens if tokens < _left((*running, *waiting)) else inf)


def _tokens(prompts: list[Prompt]) -> float:
    """The first gets what it may have, and those after it that do not make its pass much longer."""
    if not prompts:
        return inf
    total, first = 0, _need(prompts[0])
    for prompt in prompts:
        if total and prompt.left > MUCH_LONGER * first:
            break
        total += _need(prompt)
    return total


def _left(prompts: Iterable[Prompt]) -> int:
    return sum(prompt.left for prompt in prompts)


def _need(prompt: Prompt) -> int:
    return min(prompt.left, prompt.pass_tokens or prompt.left)
