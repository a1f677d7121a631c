"""Which models and vLLM features a node serves, and by what name it refuses the others.

Asked once, of vLLM's own reading of the model, before any engine is started. docs/models.md is the same
table for people; tests/unit/test_models.py keeps both true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdnode.errors import ConfigError

if TYPE_CHECKING:
    from pdnode.vllm_compat import VllmConfig

UNQUANTISED = ("auto", "float16", "bfloat16", "float32", "half", "float")


@dataclass(frozen=True, slots=True)
class Feature:
    name: str
    is_used: Callable[[VllmConfig], bool]
    why_not: str
    """Why a node cannot serve it yet, and what to do."""


REFUSED = (
    Feature(
        "an encoder-decoder model",
        lambda c: c.model_config.is_encoder_decoder,
        "what its encoder leaves for cross-attention is not in the KV blocks that are handed over",
    ),
    Feature(
        "a model with state-space or linear-attention layers",
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
        "their running state is not in the KV blocks that are handed over",
    ),
    Feature(
        "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "its KV has one latent for all heads, and handing that over has not been shown to be right",
    ),
    Feature(
        "chunked local attention",
        lambda c: c.model_config.attention_chunk_size is not None,
        "handing over its KV has not been shown to be right",
    ),
    Feature(
        "a multi-modal model",
        lambda c: c.model_config.is_multimodal_model,
        "handing over prompts with images, audio or video has not been shown to be right",
    ),
    Feature(
        "a quantised --kv-cache-dtype",
        lambda c: c.cache_config.cache_dtype not in UNQUANTISED,
        "handing over its KV has not been shown to be right: leave it out",
    ),
    Feature(
        "--speculative-config",
        lambda c: c.speculative_config is not None,
        "the draft's own KV is not handed over: leave it out",
    ),
)


def check(config: VllmConfig, prefill_tp: int, decode_tp: int) -> None:
    """Raises ConfigError. ``config``: the front end's, of the model that every engine runs."""
    model = config.model_config.model
    for feature in REFUSED:
        if feature.is_used(config):
            raise ConfigError(f"{model}: a node does not serve {feature.name}: {feature.why_not}")
    _check_heads(config, prefill_tp, decode_tp)


def _check_heads(config: VllmConfig, prefill_tp: int, decode_tp: int) -> None:
    heads = config.model_config.get_total_num_kv_heads()
    for flag, tp in (("--prefill-tp", prefill_tp), ("--decode-tp", decode_tp)):
        if heads % tp and tp % heads:
            raise ConfigError(
                f"{flag} {tp} does not divide the {heads} KV heads of {config.model_config.model}: "
                "choose a divisor"
            )
