"""Tiny random checkpoints, written by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

SMALL = {
    "vocab_size": 157,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass
class Case:
    """A checkpoint to make: a family and what differs from SMALL."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    edit: Callable[[dict[str, Any]], None] | None = None
    """Rewrites config.json after it was saved."""
    max_model_len: int | None = None


def make(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Saves the case's checkpoint. Every parameter is random: norms that are all one, and biases that are all
    zero, as transformers makes them, would hide their loss."""
    config_class, model_class = MODELS[case.family]
    torch.manual_seed(len(case.name))
    model = model_class(config_class(**{**SMALL, **case.changes})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.normal_(std=1.2 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    if case.edit is not None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        case.edit(values)
        path.write_text(json.dumps(values))
    return folder


def oracle(folder: Path) -> Any:
    """The checkpoint as transformers runs it, with plain attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()
