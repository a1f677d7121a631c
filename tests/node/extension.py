"""A worker extension as users have them: --worker-extension-cls names it, /collective_rpc calls it."""

from __future__ import annotations

from torch._dynamo.utils import counters


class Looking:
    def kind_of_generators(self) -> str:
        return type(self.model_runner.input_batch.generators).__name__

    def graphs_compiled(self) -> int:
        return counters["stats"]["unique_graphs"]
