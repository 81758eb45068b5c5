"""Writes a trained model as a Hugging Face checkpoint folder: bfloat16, two shards, tied embeddings."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.llama import Llama, LlamaShape
from demo_model.tokenizer import BEGIN, END_OF_TEXT, END_OF_TURN, PAD, special_token_id, write_tokenizer

SHARDS = 2


def export_model(model: Llama, corpus: Path, folder: Path) -> None:
    """Write the config, tokenizer, shards, questions and held-out text into `folder`. Other files in the
    folder are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    ids = {token: special_token_id(tokenizer, token) for token in (BEGIN, PAD, END_OF_TURN, END_OF_TEXT)}
    stops = [ids[END_OF_TURN], ids[END_OF_TEXT]]
    _write_json(folder / "config.json", _config(model.shape, ids[BEGIN], stops, ids[PAD]))
    generation: dict[str, object] = {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": stops,
        "pad_token_id": ids[PAD],
        "do_sample": False,
    }
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(tokenizer, folder, model.shape.context)
    _write_shards(
        {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()},
        folder,
    )
    for name in ("questions.jsonl", "heldout.txt"):
        shutil.copyfile(corpus / name, folder / name)


def _config(shape: LlamaShape, begin: int, stops: list[int], pad: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": stops,
        "pad_token_id": pad,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def _write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    written = 0
    # Fill the shards in layer order. A shard is complete once it has its share of the bytes.
    for name, tensor in tensors.items():
        shards[min(written * SHARDS // total, SHARDS - 1)][name] = tensor.contiguous()
        written += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors creates files that only their owner can read
        weight_map.update(dict.fromkeys(shard, file))
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
