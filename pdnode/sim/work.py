"""What a simulated node is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK = 128
"""Tokens of a simulated block of KV."""


@dataclass(frozen=True, slots=True)
class Request:
    """Blocks are named by their place in a text: equal names, equal prefix."""

    prompt_tokens: int
    output_tokens: int
    text: tuple[int, ...]
    """The full blocks of prompt and answer."""

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.text[: self.prompt_tokens // BLOCK]


@dataclass(frozen=True, slots=True)
class Session:
    """Each turn is asked ``think_ms`` after the answer before it, the first at ``start_ms``."""

    start_ms: float
    turns: list[Request] = field(default_factory=list)
    think_ms: list[float] = field(default_factory=list)
