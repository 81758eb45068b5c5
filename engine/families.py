"""Reads a checkpoint's `config.json`, written by transformers 4 or 5, into a `ModelConfig`.

Each model family is defined by a mapping from the fields of `config.json` to the fields of `ModelConfig`.
This module does not load torch, because `engine.sizing` also reads configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import (
    DENSE,
    DTYPE_BYTES,
    EXPERTS,
    FP8_BLOCK,
    ROPE_KINDS,
    CheckpointError,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
)
from engine.config_fields import Fields
from engine.messages import ModelDType


def read_config(folder: str | Path) -> ModelConfig:
    """Read a checkpoint's `config.json`. Raises CheckpointError if the file is missing or unreadable, if the
    architecture is not supported, or if fields are missing, have the wrong type, are out of range or
    contradict each other.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder", "specify a Hugging Face checkpoint folder")
    return _from_fields(Fields.read(folder / "config.json"))


# ── families ─────────────────────────────────────────────────────────────────────────────────────


def _dense(_fields: Fields, layers: int) -> tuple[str, ...]:
    return (DENSE,) * layers


@dataclass(frozen=True, slots=True)
class _Family:
    """The rules for reading one architecture's `config.json`. Defaults are the same as in the corresponding
    transformers class."""

    architecture: str
    qkv_bias: Callable[[Fields], bool]
    o_bias: Callable[[Fields], bool]
    mlp_bias: Callable[[Fields], bool]
    qk_norm: bool
    windows: Callable[[Fields, int], tuple[int | None, ...]]
    head_dim: int | None = None
    """Default value of `head_dim`. None selects hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default value of `num_key_value_heads`. None selects num_attention_heads."""
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm_all_heads: bool = False
    layer_kinds: Callable[[Fields, int], tuple[str, ...]] = _dense
    experts: Callable[[Fields], ExpertsConfig] | None = None
    """Function that reads the MoE layers' configuration, or None if the family has no MoE layers."""


def _never(_fields: Fields) -> bool:
    return False


def _always(_fields: Fields) -> bool:
    return True


def _attention_bias(fields: Fields) -> bool:
    return fields.flag("attention_bias", False)


def _mlp_bias(fields: Fields) -> bool:
    return fields.flag("mlp_bias", False)


def _no_windows(_fields: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _mistral_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention window, which is the same for all layers: 4096 if `sliding_window` is absent
    (Mistral 7B v0.1), or no window if it is null (v0.2 and later)."""
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return (None,) * layers
    return (fields.integer("sliding_window", 4096),) * layers


def _qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention windows given by `layer_types`. If this field is absent and `use_sliding_window`
    is true, layers `max_window_layers` and above have a window."""
    in_use = fields.flag("use_sliding_window", False)
    absent = "sliding_window" in fields.values and fields.get("sliding_window") is None
    window = fields.integer("sliding_window", 4096) if in_use and not absent else None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"it must be a list of {layers} entries (num_hidden_layers)")
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "only full_attention and sliding_attention are supported")
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _one_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention windows: the same window for all layers if `use_sliding_window` is true, otherwise
    none."""
    in_use = fields.flag("use_sliding_window", False)
    absent = "sliding_window" in fields.values and fields.get("sliding_window") is None
    return (fields.integer("sliding_window", 4096) if in_use and not absent else None,) * layers


def _mixtral_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    absent = fields.get("sliding_window") is None
    return (None if absent else fields.integer("sliding_window"),) * layers


def _qwen2_moe_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention windows given by `layer_types`, as `_qwen_windows` does. If this field is absent,
    layers 0, 2, 4, … below `max_window_layers` have a window."""
    if fields.get("layer_types") is not None:
        return _qwen_windows(fields, layers)
    (window,) = _one_window(fields, 1)
    below = fields.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer % 2 == 0 and layer < below else None for layer in range(layers))


def _all_experts(_fields: Fields, layers: int) -> tuple[str, ...]:
    return (EXPERTS,) * layers


def _qwen_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the layer kinds: every `decoder_sparse_step`th layer has experts, unless it is listed in
    `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", "it must be a list of integers")
    return tuple(DENSE if layer in dense or (layer + 1) % step else EXPERTS for layer in range(layers))


def _experts(
    fields: Fields,
    count: tuple[str, int],
    top_k: int,
    width: tuple[str, int],
    normalised: bool,
    shared: int | None = None,
) -> ExpertsConfig:
    """Return the configuration of a model's experts. `count` and `width` are pairs of a field name and its
    default value."""
    experts = fields.integer(*count)
    chosen = fields.integer("num_experts_per_tok", top_k)
    if chosen > experts:
        raise fields.error("num_experts_per_tok", f"there are only {experts} experts")
    return ExpertsConfig(experts, chosen, fields.integer(*width), normalised, shared, count[0], width[0])


def _qwen3_experts(fields: Fields) -> ExpertsConfig:
    # transformers 5 writes num_local_experts; published checkpoints contain num_experts.
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    normalised = fields.flag("norm_topk_prob", False)
    return _experts(fields, (name, 128), 8, ("moe_intermediate_size", 768), normalised)


def _qwen2_experts(fields: Fields) -> ExpertsConfig:
    return _experts(
        fields,
        ("num_experts", 60),
        4,
        ("moe_intermediate_size", 1408),
        fields.flag("norm_topk_prob", False),
        fields.integer("shared_expert_intermediate_size", 5632),
    )


def _mixtral_experts(fields: Fields) -> ExpertsConfig:
    return _experts(fields, ("num_local_experts", 8), 2, ("intermediate_size", 14336), True)


def _olmoe_experts(fields: Fields) -> ExpertsConfig:
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "only null is supported")
    normalised = fields.flag("norm_topk_prob", False)
    return _experts(fields, ("num_experts", 64), 8, ("intermediate_size", 2048), normalised)


def _qkv_bias(fields: Fields) -> bool:
    return fields.flag("qkv_bias", True)


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", _attention_bias, _attention_bias, _mlp_bias, False, _no_windows),
    "mistral": _Family(
        "MistralForCausalLM",
        _never,
        _never,
        _never,
        False,
        _mistral_windows,
        kv_heads=8,
        max_position_embeddings=131072,
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM", _always, _never, _never, False, _qwen_windows, max_position_embeddings=32768
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        _attention_bias,
        _attention_bias,
        _never,
        True,
        _qwen_windows,
        head_dim=128,
        max_position_embeddings=32768,
    ),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        _qkv_bias,
        _never,
        _never,
        False,
        _qwen2_moe_windows,
        max_position_embeddings=32768,
        layer_kinds=_qwen_kinds,
        experts=_qwen2_experts,
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        _attention_bias,
        _attention_bias,
        _never,
        True,
        _one_window,
        kv_heads=4,
        max_position_embeddings=32768,
        layer_kinds=_qwen_kinds,
        experts=_qwen3_experts,
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        _never,
        _never,
        _never,
        False,
        _mixtral_windows,
        kv_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        layer_kinds=_all_experts,
        experts=_mixtral_experts,
    ),
    "olmoe": _Family(
        "OlmoeForCausalLM",
        _attention_bias,
        _attention_bias,
        _never,
        False,
        _no_windows,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        qk_norm_all_heads=True,
        layer_kinds=_all_experts,
        experts=_olmoe_experts,
    ),
}


def _family(fields: Fields) -> tuple[str, _Family]:
    supported = ", ".join(f"{name} ({family.architecture})" for name, family in _FAMILIES.items())
    model_type = fields.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise fields.error("model_type", f"supported values: {supported}")
    architectures = fields.get("architectures")
    named = architectures if isinstance(architectures, list) else [architectures]
    if architectures is not None and family.architecture not in named:
        raise fields.error("architectures", f"supported values: {supported}")
    return str(model_type), family


def _from_fields(fields: Fields) -> ModelConfig:
    model_type, family = _family(fields)
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "only silu is supported")
    hidden_size = fields.integer("hidden_size")
    positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"it must divide num_attention_heads ({heads})")
    if fields.get("head_dim") is None and family.head_dim is None and hidden_size % heads:
        raise fields.error(
            "num_attention_heads", f"without head_dim it must divide hidden_size {hidden_size}"
        )
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "rotary embeddings need an even number")
    rope = _rope(fields, positions, family.rope_theta)
    if rope.kind == "dynamic" and head_dim == 2:
        raise fields.error("head_dim", "dynamic rope needs at least 4")
    fp8, fp8_blocks = _quantised(fields)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias(fields),
        o_bias=family.o_bias(fields),
        mlp_bias=family.mlp_bias(fields),
        qk_norm=family.qk_norm,
        qk_norm_all_heads=family.qk_norm_all_heads,
        layer_kinds=family.layer_kinds(fields, layers),
        experts=None if family.experts is None else family.experts(fields),
        sliding_windows=family.windows(fields, layers),
        dtype=_dtype(fields),
        fp8=fp8,
        fp8_blocks=fp8_blocks,
    )


def _dtype(fields: Fields) -> ModelDType:
    """Return the value of `dtype` (transformers 5) or `torch_dtype` (transformers 4), or float32 if both are
    absent."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    value = value.removeprefix("torch.") if isinstance(value, str) else value
    for dtype in DTYPE_BYTES:
        if value == dtype:
            return dtype
    raise fields.error(name, f"supported values: {', '.join(DTYPE_BYTES)}")


def _quantised(fields: Fields) -> tuple[bool, bool]:
    """Return whether the checkpoint declares FP8 matrices, and whether these have one scale per block. The
    tensors' dtypes determine which matrices are FP8."""
    value = fields.get("quantization_config")
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise fields.error("quantization_config", "it must be an object that contains quant_method")
    config = Fields(fields.file, value, prefix="quantization_config.")
    method = config.get("quant_method")
    if method == "fp8":
        _expect(config, "fmt", (None, "e4m3"))
        blocks = config.get("weight_block_size") is not None
        if blocks:
            _expect_blocks(config)
        return True, blocks
    _expect(config, "quant_method", ("compressed-tensors",))
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise config.error("config_groups", "it must be an object with one entry per group")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise config.error("config_groups", f"the weights of group {name} must be an object")
        scheme = Fields(fields.file, weights, prefix=f"quantization_config.config_groups.{name}.weights.")
        _expect(scheme, "num_bits", (8,))
        _expect(scheme, "type", ("float",))
        _expect(scheme, "strategy", ("tensor", "channel"))
        _expect(scheme, "symmetric", (None, True))
    # Without groups, only the checkpoint's KV cache is quantised. The cache's scheme is ignored, because the
    # replica's settings determine the KV cache dtype.
    return bool(groups), False


def _expect_blocks(config: Fields) -> None:
    """Raise CheckpointError unless the quantisation blocks have FP8_BLOCK rows and columns, and activations
    are quantised dynamically."""
    if config.get("weight_block_size") != [FP8_BLOCK, FP8_BLOCK]:
        raise config.error(
            "weight_block_size",
            f"blocks of [{FP8_BLOCK}, {FP8_BLOCK}] are supported; otherwise use the bfloat16 checkpoint",
        )
    if config.get("activation_scheme") not in (None, "dynamic"):
        raise config.error("activation_scheme", "with weight_block_size it must be dynamic")


def _expect(config: Fields, name: str, loadable: tuple[Any, ...]) -> None:
    if config.get(name) not in loadable:
        raise config.error(
            name,
            "supported quantised checkpoints are fp8 and compressed-tensors with 8-bit float weights and one "
            "scale per tensor or channel; otherwise use the bfloat16 checkpoint",
        )


def _rope(fields: Fields, positions: int, default_theta: float) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters` (transformers 5), or from `rope_scaling` and
    `rope_theta` (transformers 4). If both are given, `rope_scaling` takes precedence over
    `rope_parameters`."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise fields.error(name, "it must be one set of parameters for all layers")
    rope = Fields(fields.file, values, prefix=f"{name}.")
    theta_source = rope if rope.get("rope_theta") is not None else fields
    theta = theta_source.number("rope_theta", default_theta)
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(kind_field) or "default"
    if kind not in ROPE_KINDS:
        raise rope.error(kind_field, f"supported values: {', '.join(ROPE_KINDS)}")
    for source in (rope, fields):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise source.error("partial_rotary_factor", "only full rotation (1.0) is supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, kind=kind, factor=_factor(rope))
    # As in transformers, the top-level field takes precedence over the nested field.
    outside = fields.get("original_max_position_embeddings") is not None
    original = (fields if outside else rope).integer("original_max_position_embeddings", positions)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"it must be below high_freq_factor ({high:g})")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_factor(rope),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if theta <= 1.0:
        raise theta_source.error("rope_theta", "yarn needs a base above 1")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=_factor(rope) if rope.get("factor") is not None else positions / original,
        original_max_position_embeddings=original,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.error("factor", "it must be at least 1")
    return factor
