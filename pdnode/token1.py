"""Who samples token 1: the one predicate, and the table it reads.

A split request's first token can be made in two places (design note 0002):

``FORWARD``   P's token is token 1. It goes to the client at once and D continues from prompt + token.
              Exact when sampling token 2 depends on nothing that D cannot see: plain greedy and
              unseeded sampling.
``RESAMPLE``  P's token is thrown away; D recomputes the last prompt position and samples token 1
              itself. Needed when D's sampler keeps a history or a state (seed, penalties, grammar).
``SINGLE``    The request cannot be split: its answer needs the whole prompt's logits in one engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Only named here: a refusal of the command line must not wait for the import of vLLM.
    from pdnode.vllm_compat import SamplingParams

GREEDY_BELOW = 1e-5
"""vLLM's own limit: a lower temperature is greedy, and a seed then has nothing to seed."""


class Token1(Enum):
    FORWARD = "forward"
    RESAMPLE = "resample"
    SINGLE = "single"


def _set(value: Any) -> bool:
    return bool(value)


def _given(value: Any) -> bool:
    return value is not None


def _not(neutral: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != neutral


# field -> (what it asks for when it is not neutral, "is it not neutral?"); None: never matters here,
# because it acts on one step's logits alone, on the front end alone, or on the length, which the
# legs divide between them.
RULES: dict[str, tuple[Token1, Callable[[Any], bool]] | None] = {
    "n": None,  # vLLM's front end has already made one request per choice
    "presence_penalty": (Token1.RESAMPLE, _not(0.0)),
    "frequency_penalty": (Token1.RESAMPLE, _not(0.0)),
    "repetition_penalty": (Token1.RESAMPLE, _not(1.0)),
    "temperature": None,
    "watermarking": (Token1.RESAMPLE, _set),
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": (Token1.RESAMPLE, _given),
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": None,
    "max_tokens": None,
    "min_tokens": (Token1.RESAMPLE, _set),
    "logprobs": None,
    "prompt_logprobs": (Token1.SINGLE, _given),
    "prompt_logprob_token_ids": (Token1.SINGLE, _given),
    "prompt_logprob_start": (Token1.SINGLE, _given),
    "logprob_token_ids": None,
    "flat_logprobs": None,
    "detokenize": None,
    "skip_special_tokens": None,
    "spaces_between_special_tokens": None,
    "include_stop_str_in_output": None,
    "output_kind": None,
    "stream_interval": None,
    "skip_clone": None,
    "output_text_buffer_length": None,
    "_eos_token_id": None,
    "_all_stop_token_ids": None,
    "_watermarking_skipped": None,
    "structured_outputs": (Token1.RESAMPLE, _given),
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": (Token1.RESAMPLE, _set),
    "bad_words": (Token1.RESAMPLE, _set),
    "_bad_words_token_ids": (Token1.RESAMPLE, _set),
    "skip_reading_prefix_cache": (Token1.SINGLE, _set),
    "thinking_token_budget": (Token1.RESAMPLE, _given),
    "repetition_detection": (Token1.RESAMPLE, _given),
    "routed_experts_prompt_start": (Token1.SINGLE, _set),
    "trace_decode_token_ids": (Token1.SINGLE, _given),
}


def decide(params: SamplingParams, *, custom_logits_processors: bool = False) -> tuple[Token1, str]:
    """Where token 1 is sampled, and the field that decided ("" when nothing asked for more).

    A field that vLLM adds later and this table does not know keeps the request on one engine: that
    is always right, and the reason counter shows it.
    """
    asked = _asked(params)
    if custom_logits_processors:
        asked.append((Token1.RESAMPLE, "logits_processors"))
    for wanted in (Token1.SINGLE, Token1.RESAMPLE):
        for token1, field in asked:
            if token1 is wanted:
                return token1, field
    return Token1.FORWARD, ""


def needs_history(params: SamplingParams, *, custom_logits_processors: bool = False) -> bool:
    """Must a sampler that takes over have seen the tokens so far as its own output?"""
    return custom_logits_processors or any(
        token1 is Token1.RESAMPLE for token1, _ in _asked(params)
    )


def _asked(params: SamplingParams) -> list[tuple[Token1, str]]:
    """(what it asks for, field) of every field that asks for more than FORWARD, in vLLM's order."""
    return [
        (token1, field)
        for field, token1, is_asking in _questions(params.__struct_fields__)
        if is_asking(getattr(params, field))
        and (field != "seed" or params.temperature >= GREEDY_BELOW)
    ]


@functools.cache
def _questions(fields: tuple[str, ...]) -> tuple[tuple[str, Token1, Callable[[Any], bool]], ...]:
    """Of these fields, those that can matter. Twice per request, so it is worked out once."""
    unknown = (Token1.SINGLE, lambda _: True)
    rules = ((field, RULES.get(field, unknown)) for field in fields)
    return tuple((field, *rule) for field, rule in rules if rule is not None)
