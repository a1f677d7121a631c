"""Tiny random-weight models with a real tokenizer and chat template, made on the spot.

For tests that need many engines or many shapes and no sensible text. Files are written by hand with
safetensors and tokenizers, because importing transformers alone takes longer than everything here.
The same arguments give the same bytes, and a second call only finds the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

from pdnode.default_model import cache_dir

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = range(3)
ALPHABET_SIZE = 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Enough English for merges such as " the"; what the words say does not matter.
CORPUS = """\
The engine reads the prompt, writes the keys and the values into blocks, and hands them to the one that
answers. What is the capital of France? Tell me a short story about a river, a bridge and two old friends.
One, two, three: the quick brown fox jumps over the lazy dog while the other animals are watching from far.
A list of things that people want to know: how many days there are in a year, where the sun goes at night,
which number comes after ninety nine, and whether the train that left the station this morning has arrived.
user assistant system {"name": "value", "items": [1, 2, 3], "ok": true, "none": null}
def main(argument):\n    return [item for item in argument if item is not None]
"""


def tiny_llama(
    dtype: str = "float32",
    seed: int = 0,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    max_len: int = 4096,
    vocab: int = 512,
) -> Path:
    """Return the folder of a random Llama, about 1 MB with the default shape.

    `head_dim` has to be a multiple of 32 for vLLM's CPU attention; `vocab` counts ids, of which the
    tokenizer may use fewer when the corpus has no more merges. Greedy text is gibberish, differs
    from prompt to prompt and ends at EOS only by chance: set `ignore_eos` where its length matters.
    """
    shape = dict(locals())
    if head_dim % 32:
        raise ValueError(f"head_dim is {head_dim}: vLLM's CPU attention takes multiples of 32")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    if vocab < ALPHABET_SIZE + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab is {vocab}: bytes and special tokens alone take {ALPHABET_SIZE + 3}"
        )
    return _made_once("llama", shape, _write_llama)


def _made_once(kind: str, shape: dict, write) -> Path:
    # The source is part of the name, so that an edit here is never answered with yesterday's model.
    key = json.dumps(shape, sort_keys=True).encode() + Path(__file__).read_bytes()
    target = (
        cache_dir() / "tiny" / f"{kind}-{shape['dtype']}-{hashlib.sha256(key).hexdigest()[:12]}"
    )
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        write(partial, **shape)
        partial.rename(target)
    except OSError:
        # A rename onto a folder that is not empty fails: another process made the same model first.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_llama(
    folder: Path,
    dtype: str,
    seed: int,
    num_layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_len: int,
    vocab: int,
) -> None:
    _write_tokenizer(folder, vocab, max_len)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    inner = 2 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": dtype,
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    _write_weights(
        folder / "model.safetensors",
        dtype,
        seed,
        num_layers,
        hidden,
        inner,
        heads * head_dim,
        kv_heads * head_dim,
        vocab,
    )


def _write_weights(
    path: Path,
    dtype: str,
    seed: int,
    num_layers: int,
    hidden: int,
    inner: int,
    query: int,
    key: int,
    vocab: int,
) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        # 1/sqrt(fan-in) keeps every layer's output as large as its input, so attention over the
        # prompt weighs as much as the last token and greedy text does not collapse into one token.
        weights = torch.randn(out, into, generator=generator) * (gain / math.sqrt(into))
        return weights.to(getattr(torch, dtype))

    ones = torch.ones(hidden, dtype=getattr(torch, dtype))
    tensors = {
        "model.embed_tokens.weight": random(vocab, hidden, math.sqrt(hidden)),
        # Logits far apart: an argmax that depends on rounding would make equality tests flaky.
        "lm_head.weight": random(vocab, hidden, 4.0),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
            prefix + "self_attn.q_proj.weight": random(query, hidden, 2.0),
            prefix + "self_attn.k_proj.weight": random(key, hidden, 2.0),
            prefix + "self_attn.v_proj.weight": random(key, hidden, 2.0),
            prefix + "self_attn.o_proj.weight": random(hidden, query, 2.0),
            prefix + "mlp.gate_proj.weight": random(inner, hidden, 2.0),
            prefix + "mlp.up_proj.weight": random(inner, hidden, 2.0),
            prefix + "mlp.down_proj.weight": random(hidden, inner, 2.0),
        }
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(folder: Path, vocab: int, max_len: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [CORPUS],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(os.fspath(folder / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": pad,
            "bos_token": bos,
            "eos_token": eos,
            "model_max_length": max_len,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
