"""The configuration of a tiny random model for tests of the runner."""

from __future__ import annotations

from pathlib import Path

from engine.messages import ReplicaSpec
from engine.progress import no_progress

VOCAB = 101
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}


def spec_of(folder: Path, **changes: object) -> ReplicaSpec:
    fields: dict[str, object] = {
        "replica": "test-0",
        "model_path": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "kv_blocks": 40,
        "threads": 1,
    }
    return ReplicaSpec(**(fields | changes))  # type: ignore[arg-type]


quiet = no_progress
