"""Writes small checkpoints whose answers differ, so that an answer shows which checkpoint generated it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from appliance.settings import demo_model_folder

_HIDDEN, _HEADS, _LAYERS, _MLP = 32, 2, 1, 32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_constant_checkpoint(folder: Path, token_id: int, head_dim: int = 16) -> Path:
    """Write a checkpoint that has the shipped model's tokenizer and, with greedy sampling, generates only the
    token `token_id`.

    The first feature of every embedding is 1 and no layer changes it, so the head's only non-zero row, which
    belongs to `token_id`, gets the highest logit at every position.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        shutil.copy(demo_model_folder() / name, folder / name)
    config = json.loads((demo_model_folder() / "config.json").read_text())
    config |= {
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    embedding = torch.randn(config["vocab_size"], _HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.01
    embedding[:, 0] = 1.0
    head = torch.zeros(config["vocab_size"], _HIDDEN)
    head[token_id, 0] = 10.0
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
    }
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        for name, shape in (
            ("q_proj", (_HEADS * head_dim, _HIDDEN)),
            ("k_proj", (_HEADS * head_dim, _HIDDEN)),
            ("v_proj", (_HEADS * head_dim, _HIDDEN)),
            ("o_proj", (_HIDDEN, _HEADS * head_dim)),
        ):
            tensors[f"{layer}.self_attn.{name}.weight"] = torch.zeros(*shape)
        for name, shape in (
            ("gate_proj", (_MLP, _HIDDEN)),
            ("up_proj", (_MLP, _HIDDEN)),
            ("down_proj", (_HIDDEN, _MLP)),
        ):
            tensors[f"{layer}.mlp.{name}.weight"] = torch.zeros(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(_HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder
