"""Shapes of public models, and of one larger dense model, as `config.json` files for models with random
weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}

_QWEN3: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "tie_word_embeddings": False,
}

_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    # A dense model of the size of GPT-3, without grouped heads. It is no public model.
    "llama-175b": _LLAMA
    | {
        "vocab_size": 50304,
        "bos_token_id": 50302,
        "eos_token_id": 50303,
        "hidden_size": 12288,
        "intermediate_size": 32768,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": _QWEN3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "vocab_size": 32000,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}


def write_config(shape: str, folder: Path) -> Path:
    """Write a shape's `config.json` into `folder` and return `folder`. Raises KeyError for an unknown
    shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder
