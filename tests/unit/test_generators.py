"""A seeded CPU generator goes back by one draw, as vLLM asks it to."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.platforms import current_platform
from vllm.utils.collection_utils import swap_dict_values
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from pdnode.connector import generators as hooks
from pdnode.connector.generators import Generators


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_each(generators: dict[int, torch.Generator]) -> dict[int, int]:
    """As vLLM's CPU sampler does in one step."""
    return {
        row: int(torch.randint(0, 2**31, (1,), generator=gen)) for row, gen in generators.items()
    }


def take_back(generators: Generators, row: int) -> None:
    """As vLLM does for a row whose sample it throws away."""
    gen = generators.get(row)
    gen.set_offset(gen.get_offset() - 4)


def test_a_draw_that_is_taken_back_comes_again_and_others_go_on():
    generators, plain = Generators({0: seeded(1), 3: seeded(2)}), {0: seeded(1), 3: seeded(2)}
    draw_each(generators)
    first = draw_each(plain)
    take_back(generators, 0)
    again, second = draw_each(generators), draw_each(plain)
    assert again[0] == first[0]
    assert again[3] == second[3]
    assert draw_each(generators)[0] == second[0]


def test_rows_that_are_swapped_and_moved_stay_generators():
    generators = Generators({0: seeded(1), 1: seeded(2)})
    draw_each(generators)
    swap_dict_values(generators, 0, 1)
    swap_dict_values(generators, 1, 5)
    assert sorted(generators) == [0, 5]
    assert draw_each(generators) == {0: second_draw(2), 5: second_draw(1)}
    assert all(type(gen) is torch.Generator for gen in generators.values())
    assert generators.get(7) is None


def second_draw(seed: int) -> int:
    gen = {0: seeded(seed)}
    draw_each(gen)
    return draw_each(gen)[0]


def test_vllms_cpu_sampler_draws_from_them_as_from_a_plain_dict():
    current_platform.import_kernels()
    sampler = TopKTopPSampler(logprobs_mode="raw_logprobs")
    logits = torch.zeros(4, 500)
    ours, plain = Generators({0: seeded(1), 3: seeded(2)}), {0: seeded(1), 3: seeded(2)}
    steps = [
        [sampler(logits.clone(), generators, None, None)[0][[0, 3]] for generators in (ours, plain)]
        for _ in range(3)
    ]
    assert all(torch.equal(mine, other) for mine, other in steps)
    take_back(ours, 3)
    again = sampler(logits.clone(), ours, None, None)[0]
    assert again[3] == steps[-1][0][1]


def test_a_step_whose_tokens_are_thrown_away_draws_nothing(monkeypatch):
    """The copy of block 7 failed: request "a" holds it, and "b" does not."""
    batch = SimpleNamespace(generators={0: seeded(1), 1: seeded(2)})
    batch.req_id_to_index = {"a": 0, "b": 1, "greedy": 2}
    held = {"a": [3, 7], "b": [4, 5], "greedy": [7]}
    requests = {name: SimpleNamespace(block_ids=(blocks,)) for name, blocks in held.items()}
    cpu = torch.device("cpu")
    runner = SimpleNamespace(
        device=cpu, speculative_config=None, input_batch=batch, requests=requests
    )
    monkeypatch.setattr(hooks, "_runner", None)
    hooks.void_draws({7})  # nothing is installed: a GPU's worker
    hooks.keep_states(runner)
    plain = {0: seeded(1), 1: seeded(2)}
    hooks.void_draws(set())
    assert draw_each(batch.generators) == draw_each(plain)
    hooks.void_draws({7})
    void, right = draw_each(batch.generators), draw_each(plain)
    assert void[1] == right[1]
    again = draw_each(batch.generators)
    assert again[0] == right[0]
    assert again[1] == draw_each(plain)[1]
