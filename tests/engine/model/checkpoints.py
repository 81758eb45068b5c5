"""Creates tiny random checkpoints with transformers, and FP8 variants of them."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
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

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32}
QWEN2_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 80,
}
OLMOE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4}


@dataclass
class Case:
    """A checkpoint to create: its model family, and the config fields that differ from SMALL."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    edit: Callable[[dict[str, Any]], None] | None = None
    """A function that modifies config.json after it has been saved."""
    max_model_len: int | None = None
    fused_experts: bool = False
    """Whether all experts of a layer are stored in one tensor."""


def make(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save the case's checkpoint with random values in every parameter. transformers initialises norms to
    ones and biases to zeros, which would hide a missing parameter."""
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
                parameter.normal_(std=1.2 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=case.shard_size, save_original_format=not case.fused_experts)
    if case.edit is not None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        case.edit(values)
        path.write_text(json.dumps(values))
    return folder


def oracle(folder: Path) -> Any:
    """Return the checkpoint as a transformers model with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


# ── FP8 ──────────────────────────────────────────────────────────────────────────────────────────

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXTRAL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
_LARGEST = 448.0


@dataclass(frozen=True)
class Fp8:
    """How a checkpoint is quantised."""

    name: str
    per_channel: bool = False
    method: str = "compressed-tensors"
    quantised: tuple[str, ...] = PROJECTIONS
    """Substrings of the names of the matrices to quantise."""
    scale_dtype: torch.dtype = torch.float32
    flat_scales: bool = False
    """Whether scales have the shapes [] and [out], instead of [1] and [out, 1]."""
    static: bool = False
    """Whether to also store static scales for activations and for the KV cache."""
    scales_apart: bool = False
    """Whether weights and scales are in separate files."""
    blocks: bool = False
    """Whether there is one scale per block of 128 rows and columns, as in checkpoints published by Qwen and
    DeepSeek."""


def quantise(folder: Path, how: Fp8) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint in place. Returns all tensors with their dequantised values: FP8 values times
    their scales."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    scales: dict[str, torch.Tensor] = {}
    meant = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if any(part in name for part in how.quantised)]:
        if not name.endswith(".weight"):
            continue
        if how.blocks:
            scale = _block_scales(meant[name]).to(how.scale_dtype)
            of_numbers = _of_numbers(scale.float(), meant[name].shape)
            tensors[name] = (meant[name] / of_numbers).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
            meant[name] = tensors[name].float() * of_numbers
            scales[f"{name}_scale_inv"] = scale
            continue
        largest = meant[name].abs().amax(dim=1, keepdim=True) if how.per_channel else meant[name].abs().max()
        scale = (largest / _LARGEST).to(how.scale_dtype)
        # The scale may have been rounded down, so the quotients may lie outside the range of e4m3.
        quotient = (meant[name] / scale.float()).clamp(-_LARGEST, _LARGEST)
        tensors[name] = quotient.to(torch.float8_e4m3fn)
        meant[name] = tensors[name].float() * scale.float()
        flat = scale.flatten() if how.per_channel else scale
        scales[f"{name}_scale"] = (
            flat if how.flat_scales else scale.view(-1, 1) if how.per_channel else scale.view(1)
        )
        if how.static:
            scales[name.replace(".weight", ".input_scale")] = torch.tensor(0.01)
            if "k_proj" in name:
                scales[name.replace("k_proj.weight", "k_scale")] = torch.tensor(0.02)
                scales[name.replace("k_proj.weight", "v_scale")] = torch.tensor(0.03)
    if how.scales_apart:
        files = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        files = {"model.safetensors": tensors | scales}
    for file_name, held in files.items():
        save_file(held, folder / file_name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _described(how)}))
    return meant


def _block_scales(matrix: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block of a matrix."""
    return torch.stack(
        [
            torch.stack([block.abs().max() / _LARGEST for block in rows.split(128, dim=1)])
            for rows in matrix.split(128, dim=0)
        ]
    )


def _of_numbers(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Expand the scales of a matrix's blocks to one scale for each element of the matrix."""
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def _described(how: Fp8) -> dict[str, Any]:
    if how.blocks:
        fixed = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        return fixed | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    if how.method == "fp8":
        return {"quant_method": "fp8", "activation_scheme": "static" if how.static else "dynamic"}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel" if how.per_channel else "tensor"}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def quantised_oracle(folder: Path, meant: dict[str, torch.Tensor], group: int | None = None) -> Any:
    """Return a quantised checkpoint as a transformers model with the dequantised weights. As in the engine,
    the input of each linear layer is rounded to e4m3 with one scale per token, or with one scale per token
    and group of `group` numbers."""
    unquantised = folder / "unquantised"
    unquantised.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (unquantised / "config.json").write_text(json.dumps(config))
    save_file(meant, unquantised / "model.safetensors")
    model = oracle(unquantised)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        if group is not None and x.shape[-1] > group:
            return torch.cat([rounded(part) for part in x.split(group, dim=-1)], dim=-1)
        largest = x.abs().amax(dim=-1, keepdim=True)
        return (x * (_LARGEST / largest)).to(torch.float8_e4m3fn).float() * (largest / _LARGEST)

    def experts(module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for row, (token, of_token) in enumerate(zip(rounded(x), chosen.tolist(), strict=True)):
            for expert, weight in zip(of_token, weights[row], strict=True):
                gate, up = (module.gate_up_proj[expert] @ token).chunk(2)
                activated = torch.nn.functional.silu(gate) * up
                out[row] += weight * (module.down_proj[expert] @ rounded(activated))
        return out

    for name, module in model.named_modules():
        if name.endswith(PROJECTIONS):
            module.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0]),))
        if name.endswith("mlp.experts"):
            module.forward = types.MethodType(experts, module)
    return model
