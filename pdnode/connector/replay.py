"""Give a request its past back: the tokens a client has already been sent, sampled again by force.

A request whose sampler keeps a history (penalties, ``min_tokens``, a seeded generator, a grammar)
cannot go on elsewhere from prompt + tokens: the new engine would count them as prompt. So it starts
again from its prompt, and for as many steps as the client has tokens every other logit is -inf. The
sampler runs as ever: it counts, draws from its generator once a step, advances its grammar; it just
cannot choose. After that it is where the dead engine was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdnode.vllm_compat import BatchUpdate, LogitsProcessor, process_dict_updates

if TYPE_CHECKING:
    import torch

    from pdnode.vllm_compat import SamplingParams, VllmConfig

FORCED_TOKENS = "pdnode_forced_tokens"
"""Key in ``SamplingParams.extra_args``; a client's own use of it is removed at the door."""

PATH = "pdnode.connector.replay:ForcedTokens"


class ForcedTokens(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # row -> (tokens to force, the request's output so far: vLLM's own growing list)
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)
        done = [row for row, (forced, output) in self._rows.items() if len(output) >= len(forced)]
        for row in done:
            del self._rows[row]

    @staticmethod
    def _row(
        params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> tuple[list[int], list[int]] | None:
        forced = (params.extra_args or {}).get(FORCED_TOKENS)
        return (forced, output) if forced else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (forced, output) in self._rows.items():
            logits[row].fill_(float("-inf"))
            logits[row, forced[len(output)]] = 0.0
        return logits
