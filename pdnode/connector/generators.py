"""Draws of seeded requests that do not count, in vLLM's CPU worker.

A step that ends inside a prompt samples a token like any other and throws it away; vLLM then sets
the request's generator back by one draw (``gen.set_offset``). CPU generators have no offset, so a
seeded request whose prompt took two steps ended the worker (vLLM 0.32, 0.33). Here a generator's
state is kept before each draw, and ``set_offset`` on the CPU is "that state again".

Another token is thrown away when KV that the step was to copy could not be: vLLM computes the request
again from there, and the generator would be one draw ahead from then on. In such a step a copy of it
draws.
"""

from __future__ import annotations

from collections.abc import ItemsView, Set
from typing import Any

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
        self._void: Set[int] = frozenset()

    def void(self, rows: Set[int]) -> None:
        """The next draw of these rows is for nothing."""
        self._void = rows

    def items(self) -> ItemsView[int, torch.Generator]:
        self._before = {row: generator.get_state() for row, generator in super().items()}
        if not self._void:
            return super().items()
        void, self._void = self._void, frozenset()
        drawing = {
            row: _copy(generator) if row in void else generator
            for row, generator in super().items()
        }
        return drawing.items()

    def get(self, row: int, default: Any = None) -> Any:
        generator = super().get(row)
        return default if generator is None else LastDraw(generator, self._before.get(row))

    def __setitem__(self, row: int, generator: torch.Generator | LastDraw) -> None:
        if isinstance(generator, LastDraw):
            generator = generator.generator
        super().__setitem__(row, generator)


def _copy(generator: torch.Generator) -> torch.Generator:
    return torch.Generator(generator.device).set_state(generator.get_state())


_runner: Any = None
"""The model runner of this worker, if its generators are ours."""


def keep_states(runner: Any) -> None:
    """``runner``: a worker's model runner, once it is ready."""
    global _runner
    if runner.device.type == "cpu" and runner.speculative_config is None:
        runner.input_batch.generators = Generators(runner.input_batch.generators)
        _runner = runner


def void_draws(blocks: Set[int]) -> None:
    """Before a step samples: ``blocks`` were to be filled for it and were not, so that vLLM throws
    away what it samples for the requests that hold them."""
    if _runner is None or not blocks:
        return
    batch = _runner.input_batch
    batch.generators.void(
        {
            row
            for request_id, row in batch.req_id_to_index.items()
            if not blocks.isdisjoint(_runner.requests[request_id].block_ids[0])
        }
    )
