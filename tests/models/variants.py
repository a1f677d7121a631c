"""Models that differ from the tiny Llama in what docs/models.md tells apart, made on the spot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 8


def patched(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of ``model`` whose config.json says something else too; the weights stay."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def sliding(model: Path, folder: Path, window: int) -> Path:
    """Every other layer sees ``window`` tokens only."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    kinds = ("sliding_attention", "full_attention")
    return patched(
        model,
        folder,
        sliding_window=window,
        layer_types=[kinds[layer % 2] for layer in range(layers)],
    )


def adapter(model: Path, folder: Path, seed: int = 1) -> Path:
    """A LoRA adapter whose effect on the queries is as large as the weights themselves."""
    shape = json.loads((model / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    hidden, out = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {
            f"{name}.lora_A.weight": torch.randn(RANK, hidden, generator=generator) / hidden**0.5,
            f"{name}.lora_B.weight": torch.randn(out, RANK, generator=generator) / RANK**0.5,
        }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
