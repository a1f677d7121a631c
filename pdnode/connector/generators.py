"""Lets vLLM's CPU worker take back a draw of a seeded request.

A step that ends inside a prompt samples a token like any other and throws it away; vLLM then sets
the request's generator back by one draw (``gen.set_offset``). CPU generators have no offset, so a
seeded request whose prompt took two steps ended the worker (vLLM 0.32, 0.33). Here a generator's
state is kept before each draw, and ``set_offset`` on the CPU is "that state again".
"""

from __future__ import annotations

from collections.abc import ItemsView
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class LastDraw:
    """What vLLM asks of a generator whose last draw does not count."""

    def __init__(self, generator: torch.Generator, before: torch.Tensor | None) -> None:
        self.generator = generator
        self._before = before

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        if self._before is not None:
            self.generator.set_state(self._before)


class Generators(dict):
    """row -> generator, as the worker's batch has them.

    The sampler goes over ``items`` right before it draws once from each; the only one who looks a
    row up by itself is the one who takes a draw back, and the batch when it swaps rows.
    """

    def __init__(self, generators: dict[int, torch.Generator]) -> None:
        super().__init__(generators)
        self._before: dict[int, torch.Tensor] = {}

    def items(self) -> ItemsView[int, torch.Generator]:
        self._before = {row: generator.get_state() for row, generator in super().items()}
        return super().items()

    def get(self, row: int, default: Any = None) -> Any:
        generator = super().get(row)
        return default if generator is None else LastDraw(generator, self._before.get(row))

    def __setitem__(self, row: int, generator: torch.Generator | LastDraw) -> None:
        if isinstance(generator, LastDraw):
            generator = generator.generator
        super().__setitem__(row, generator)


def keep_states(runner: Any) -> None:
    """``runner``: a worker's model runner, once it is ready."""
    if runner.device.type == "cpu" and runner.speculative_config is None:
        runner.input_batch.generators = Generators(runner.input_batch.generators)
