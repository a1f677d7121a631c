"""The token-1 predicate, field by field, over every sampling parameter of the installed vLLM."""

from __future__ import annotations

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from pdnode import token1
from pdnode.token1 import RULES, Token1, decide

FORWARD, RESAMPLE, SINGLE = Token1.FORWARD, Token1.RESAMPLE, Token1.SINGLE

# field -> (values that must not matter, [(value, where token 1 must be sampled)])
TABLE = {
    "n": ([1], []),
    "presence_penalty": ([0.0], [(0.5, RESAMPLE), (-0.5, RESAMPLE)]),
    "frequency_penalty": ([0.0], [(0.5, RESAMPLE)]),
    "repetition_penalty": ([1.0], [(1.1, RESAMPLE)]),
    "temperature": ([0.0, 0.7, 1.0], []),
    "watermarking": ([None, False], [(True, RESAMPLE)]),
    "top_p": ([1.0, 0.5], []),
    "top_k": ([0, 40], []),
    "min_p": ([0.0, 0.1], []),
    "seed": ([None], [(0, RESAMPLE), (7, RESAMPLE)]),
    "stop": ([None, ["x"]], []),
    "stop_token_ids": ([None, [5]], []),
    "ignore_eos": ([False, True], []),
    "max_tokens": ([2, 200], []),
    "min_tokens": ([0], [(1, RESAMPLE)]),
    "logprobs": ([None, 0, 5], []),
    "prompt_logprobs": ([None], [(0, SINGLE), (3, SINGLE)]),
    "prompt_logprob_token_ids": ([None], [([1, 2], SINGLE)]),
    "prompt_logprob_start": ([None], [(4, SINGLE)]),
    "logprob_token_ids": ([None, [1]], []),
    "flat_logprobs": ([False, True], []),
    "detokenize": ([True, False], []),
    "skip_special_tokens": ([True, False], []),
    "spaces_between_special_tokens": ([True, False], []),
    "include_stop_str_in_output": ([False, True], []),
    "output_kind": ([], []),
    "stream_interval": ([None, 3], []),
    "skip_clone": ([False, True], []),
    "output_text_buffer_length": ([0, 4], []),
    "_eos_token_id": ([None, 2], []),
    "_all_stop_token_ids": ([set(), {2}], []),
    "_watermarking_skipped": ([False], []),
    "structured_outputs": ([None], [(StructuredOutputsParams(json="{}"), RESAMPLE)]),
    "logit_bias": ([None, {3: 1.0}], []),
    "allowed_token_ids": ([None, [3, 4]], []),
    "extra_args": ([None, {}], [({"mine": 1}, RESAMPLE)]),
    "bad_words": ([None, []], [(["no"], RESAMPLE)]),
    "_bad_words_token_ids": ([None, []], [([[3]], RESAMPLE)]),
    "skip_reading_prefix_cache": ([None, False], [(True, SINGLE)]),
    "thinking_token_budget": ([None], [(10, RESAMPLE)]),
    "repetition_detection": (
        [None],
        [(RepetitionDetectionParams(max_pattern_size=4, min_count=3), RESAMPLE)],
    ),
    "routed_experts_prompt_start": ([0], [(3, SINGLE)]),
    "trace_decode_token_ids": ([None], [([1], SINGLE)]),
}


def params_with(field: str, value) -> SamplingParams:
    params = SamplingParams(temperature=1.0, max_tokens=50)
    setattr(params, field, value)
    return params


def test_the_table_and_the_rules_name_every_field_vllm_has():
    fields = set(SamplingParams.__struct_fields__)
    assert set(TABLE) == fields
    assert set(RULES) == fields


@pytest.mark.parametrize(
    "field, value", [(f, v) for f, (neutral, _) in TABLE.items() for v in neutral], ids=str
)
def test_a_neutral_value_leaves_token_1_with_prefill(field, value):
    assert decide(params_with(field, value)) == (FORWARD, "")


@pytest.mark.parametrize(
    "field, value, wanted",
    [(f, v, w) for f, (_, asked) in TABLE.items() for v, w in asked],
    ids=str,
)
def test_a_value_that_needs_history_or_the_whole_prompt_is_seen(field, value, wanted):
    assert decide(params_with(field, value)) == (wanted, field)


def test_single_wins_over_resample():
    params = SamplingParams(seed=1, prompt_logprobs=2, max_tokens=5)
    assert decide(params)[0] is SINGLE


def test_a_seed_is_nothing_to_a_greedy_request():
    assert decide(SamplingParams(temperature=0.0, seed=42, max_tokens=5)) == (FORWARD, "")


def test_model_wide_logits_processors_resample():
    params = SamplingParams(temperature=0.0, max_tokens=5)
    assert decide(params, custom_logits_processors=True) == (RESAMPLE, "logits_processors")


def test_an_unknown_field_keeps_the_request_whole(monkeypatch):
    monkeypatch.delitem(RULES, "top_k")
    # As in a process that starts with a vLLM that has one field more.
    monkeypatch.setattr(token1, "_questions", token1._questions.__wrapped__)
    assert decide(SamplingParams(max_tokens=5)) == (SINGLE, "top_k")
