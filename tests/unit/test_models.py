"""docs/models.md is true: what it calls refused is, by that name, and what it calls served is not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.servers import ROOT, free_port
from bench.tiny_models import tiny_llama
from pdnode import models, vllm_args
from pdnode.errors import ConfigError
from pdnode.vllm_compat import engine_config
from tests.models.variants import patched, sliding

Make = Callable[[Path, Path], tuple[Path, list[str]]]


def llama_with(*flags: str, **config: Any) -> Make:
    return lambda model, folder: (patched(model, folder, **config), list(flags))


MLA = {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
STATE_SPACE = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 4,
    "intermediate_size": 128,
}
AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "text_config": {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64},
    "audio_config": {"model_type": "qwen2_audio_encoder", "encoder_layers": 2},
}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'

ROWS: dict[str, Make] = {
    "full attention (Llama, Qwen2, Qwen3, Mistral, ...)": llama_with(),
    "sliding-window attention, in some layers or all": lambda model, folder: (
        sliding(model, folder, 200),
        [],
    ),
    "--enable-lora": llama_with("--enable-lora"),
    "an encoder-decoder model": llama_with(is_encoder_decoder=True),
    "a model with state-space or linear-attention layers": llama_with(**STATE_SPACE),
    "multi-head latent attention (MLA)": llama_with(**MLA),
    "chunked local attention": llama_with(attention_chunk_size=512),
    "a multi-modal model": llama_with(**AUDIO),
    "a quantised --kv-cache-dtype": llama_with("--kv-cache-dtype", "fp8"),
    "--speculative-config": llama_with("--speculative-config", NGRAM),
}


def table() -> dict[str, bool]:
    """Feature -> served, as docs/models.md says."""
    lines = (ROOT / "docs" / "models.md").read_text().splitlines()
    rows = (re.fullmatch(r"\| (.+) \| (yes|no) \|", line) for line in lines)
    return {row[1]: row[2] == "yes" for row in rows if row}


@pytest.fixture(scope="module")
def llama() -> Path:
    return tiny_llama()


def test_every_row_is_tried():
    assert table().keys() == ROWS.keys()
    assert [feature.name for feature in models.REFUSED] == [
        name for name, served in table().items() if not served
    ]


@pytest.mark.parametrize("name", ROWS)
def test_row(llama, tmp_path, name):
    model, flags = ROWS[name](llama, tmp_path / "model")
    args = vllm_args.parse([str(model), "--dtype", "float32", "--max-model-len", "1024", *flags])
    config = engine_config(args, None)
    if table()[name]:
        models.check(config, 2, 1)
        return
    with pytest.raises(ConfigError) as refusal:
        models.check(config, 1, 1)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_ranks_must_divide_the_heads(llama):
    args = vllm_args.parse([str(llama), "--dtype", "float32", "--max-model-len", "1024"])
    config = engine_config(args, None)
    models.check(config, 4, 1)
    with pytest.raises(ConfigError, match="--decode-tp 3 does not divide the 2 KV heads"):
        models.check(config, 1, 3)


def test_the_launcher_says_it_in_one_sentence(llama, tmp_path):
    model = patched(llama, tmp_path / "model", attention_chunk_size=512)
    command = [sys.executable, "launcher.py", str(model), "--port", str(free_port())]
    ended = subprocess.run(
        [*command, "--prefill-cpus", "0", "--decode-cpus", "1", "--max-model-len", "1024"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("pdnode: error")]
    assert "a node does not serve chunked local attention" in line
    assert "starting" not in ended.stderr
