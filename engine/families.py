"""Reads a checkpoint's `config.json`, written by transformers 4 or 5, into a `ModelConfig`.

Each model family is defined by a mapping of fields. This module does not load torch, because `engine.sizing`
also reads configurations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import DTYPE_BYTES, ROPE_KINDS, CheckpointError, ModelConfig, RopeConfig


def read_config(folder: str | Path) -> ModelConfig:
    """Read the `config.json` of a checkpoint.

    Raises CheckpointError if the file is missing or unreadable, if the architecture is not supported, or if
    fields are missing, have the wrong type, are out of range or contradict each other.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
    return _from_fields(_Fields.read(folder / "config.json"))


# ── reading fields ───────────────────────────────────────────────────────────────────────────────


class _Fields:
    """A JSON object of a checkpoint. Its getters raise CheckpointError with file, field, value and remedy.

    As in transformers, a field that is null counts as absent.
    """

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, file: Path) -> _Fields:
        try:
            values = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{file}: no such file; a Hugging Face checkpoint has one") from None
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: is not JSON: {error}; copy the file again") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: is not a JSON object; copy the file again")
        return cls(file, values)

    def error(self, name: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.prefix}{name} is {self.values.get(name)!r}; {remedy}")

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"an integer of at least {minimum} is needed")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        value = self._value(name, default)
        # The upper bound rejects NaN and infinity, which Python's JSON parser accepts.
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise self.error(name, f"a number above {above:g} is needed")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false is needed")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.file}: {self.prefix}{name} is missing; the model needs it")
            return default
        return value


# ── families ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Family:
    """The rules for reading the `config.json` of one architecture. Default values are those of the
    transformers class."""

    architecture: str
    qkv_bias: Callable[[_Fields], bool]
    o_bias: Callable[[_Fields], bool]
    mlp_bias: Callable[[_Fields], bool]
    qk_norm: bool
    windows: Callable[[_Fields, int], tuple[int | None, ...]]
    head_dim: int | None = None
    """Default head_dim if the file does not contain it. None selects hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default number of KV heads if the file does not contain num_key_value_heads. None selects
    num_attention_heads."""
    max_position_embeddings: int = 2048
    layer_kind: str = "dense"
    """Kind of the model's layers, a key of `engine.model.layers.LAYER_KINDS`."""


def _never(_fields: _Fields) -> bool:
    return False


def _always(_fields: _Fields) -> bool:
    return True


def _attention_bias(fields: _Fields) -> bool:
    return fields.flag("attention_bias", False)


def _mlp_bias(fields: _Fields) -> bool:
    return fields.flag("mlp_bias", False)


def _no_windows(_fields: _Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _mistral_windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of all layers. It is 4096 if the field is absent (Mistral 7B v0.1), and
    there is no window if the field is null (v0.2 and later)."""
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return (None,) * layers
    return (fields.integer("sliding_window", 4096),) * layers


def _qwen_windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """Return the attention windows according to `layer_types`, if it is given. Otherwise, if
    `use_sliding_window` is true, layers from `max_window_layers` onwards have a window."""
    in_use = fields.flag("use_sliding_window", False)
    absent = "sliding_window" in fields.values and fields.get("sliding_window") is None
    window = fields.integer("sliding_window", 4096) if in_use and not absent else None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"a list of {layers} (num_hidden_layers) is needed")
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.error("layer_types", "only full_attention and sliding_attention are supported")
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


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
}


def _family(fields: _Fields) -> tuple[str, _Family]:
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


def _from_fields(fields: _Fields) -> ModelConfig:
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
    rope = _rope(fields, positions)
    if rope.kind == "dynamic" and head_dim == 2:
        raise fields.error("head_dim", "dynamic rope needs at least 4")
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias(fields),
        o_bias=family.o_bias(fields),
        mlp_bias=family.mlp_bias(fields),
        qk_norm=family.qk_norm,
        layer_kinds=(family.layer_kind,) * layers,
        sliding_windows=family.windows(fields, layers),
        dtype=_dtype(fields),
        fp8=_quantised(fields),
    )


def _dtype(fields: _Fields) -> str:
    """Return the field `dtype` (transformers 5) or `torch_dtype` (transformers 4), or float32 if both are
    absent."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    value = value.removeprefix("torch.") if isinstance(value, str) else value
    if value not in list(DTYPE_BYTES):
        raise fields.error(name, f"supported values: {', '.join(DTYPE_BYTES)}")
    return str(value)


def _quantised(fields: _Fields) -> bool:
    """Return whether the checkpoint declares FP8 matrices. Which matrices are FP8 is determined by the dtypes
    of the tensors."""
    value = fields.get("quantization_config")
    if value is None:
        return False
    if not isinstance(value, dict):
        raise fields.error("quantization_config", "an object with quant_method is needed")
    config = _Fields(fields.file, value, prefix="quantization_config.")
    method = config.get("quant_method")
    if method == "fp8":
        _expect(config, "weight_block_size", (None,))
        _expect(config, "fmt", (None, "e4m3"))
        return True
    _expect(config, "quant_method", ("compressed-tensors",))
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise config.error("config_groups", "an object of groups is needed")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise config.error("config_groups", f"weights of {name} are needed")
        scheme = _Fields(fields.file, weights, prefix=f"quantization_config.config_groups.{name}.weights.")
        _expect(scheme, "num_bits", (8,))
        _expect(scheme, "type", ("float",))
        _expect(scheme, "strategy", ("tensor", "channel"))
        _expect(scheme, "symmetric", (None, True))
    # Without groups, only the checkpoint's KV cache is quantised. The dtype of our KV cache is a setting of
    # the replica.
    return bool(groups)


def _expect(config: _Fields, name: str, loadable: tuple[Any, ...]) -> None:
    if config.get(name) not in loadable:
        raise config.error(
            name,
            "supported quantised checkpoints are fp8 and compressed-tensors with 8-bit float weights and one "
            "scale per tensor or channel; otherwise use the bfloat16 checkpoint",
        )


def _rope(fields: _Fields, positions: int) -> RopeConfig:
    """Read the rotary embedding from `rope_parameters` (transformers 5), or from `rope_scaling` and
    `rope_theta` (transformers 4). The latter take precedence."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise fields.error(name, "one set of parameters for all layers is needed")
    rope = _Fields(fields.file, values, prefix=f"{name}.")
    theta_source = rope if rope.get("rope_theta") is not None else fields
    theta = theta_source.number("rope_theta", 10000.0)
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


def _factor(rope: _Fields) -> float:
    factor = rope.number("factor")
    if factor < 1.0:
        raise rope.error("factor", "it must be at least 1")
    return factor
