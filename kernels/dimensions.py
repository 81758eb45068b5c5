"""A decoder as its kernels see it: the numbers that decide what is compiled and what is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The model dtypes that our kernels serve."""


class DimensionsError(ValueError):
    """A `config.json` is not one that kernels can be made for: the message has file, field and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Of a whole model, and how it is served. Every rank of a split model needs the same kernels."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = (None,)
    """The sliding windows that layers have; None: a layer that sees everything."""
    dtype: str = "bfloat16"
    """One of DTYPES."""
    fp8: bool = False
    """Whether the layers' matrices are e4m3."""
    kv_fp8: bool = False
    tensor_parallel: int = 1
    max_rows: int = 1024
    """Most sequences at once."""
    step_tokens: int = 8192
    """Most tokens of a pass."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def rank_heads(self) -> int:
        return self.heads // self.tensor_parallel

    @property
    def rank_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tensor_parallel)

    @property
    def rank_intermediate(self) -> int:
        return self.intermediate // self.tensor_parallel

    @property
    def rank_vocab(self) -> int:
        return -(-self.vocab // self.tensor_parallel)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Of one rank: a layer's four matrices and the output's, `[out, in]`."""
        return {
            "qkv": ((self.rank_heads + 2 * self.rank_kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.rank_heads * self.head_dim),
            "gate_up": (2 * self.rank_intermediate, self.hidden),
            "down": (self.hidden, self.rank_intermediate),
            "lm_head": (self.rank_vocab, self.hidden),
        }


def read_dimensions(folder: Path, **served: Any) -> Dimensions:
    """From a checkpoint's `config.json`; `served`: the fields of `Dimensions` that it does not have.

    The dtype is the file's where `served` names none. Raises DimensionsError.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DimensionsError(f"{file}: cannot be read: {error}; give the folder of a checkpoint") from None
    if not isinstance(values, dict):
        raise DimensionsError(f"{file}: is no object but {values!r:.40}; give the folder of a checkpoint")
    for name in ("tensor_parallel", "max_rows", "step_tokens"):
        if (given := served.get(name, 1)) < 1:
            raise DimensionsError(f"{name} is {given}; at least 1 is needed")

    def number(name: str, default: int | None = None) -> int:
        value = values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DimensionsError(f"{file}: {name} is {value!r}; a positive integer is needed")
        return value

    family = values.get("model_type")
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    quantised = values.get("quantization_config") is not None
    served.setdefault("dtype", values.get("dtype") or values.get("torch_dtype") or "float32")
    if served["dtype"] not in DTYPES:
        raise DimensionsError(f"{file}: dtype is {served['dtype']!r}; kernels serve {', '.join(DTYPES)}")
    found = Dimensions(
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", 8 if family == "mistral" else heads),
        head_dim=number("head_dim", 128 if family == "qwen3" else hidden // heads),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or bool(values.get("attention_bias")),
        o_bias=family in ("llama", "qwen3") and bool(values.get("attention_bias")),
        mlp_bias=family == "llama" and bool(values.get("mlp_bias")),
        windows=_windows(values, number("num_hidden_layers")),
        **{**served, "fp8": served.get("fp8", False) or quantised},
    )
    for name in ("heads", "intermediate"):
        if getattr(found, name) % found.tensor_parallel:
            raise DimensionsError(
                f"{file}: {getattr(found, name)} {name} do not divide among {found.tensor_parallel} ranks"
            )
    return found


def _windows(values: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    family = values.get("model_type")
    given = values.get("sliding_window", 4096)
    if family == "mistral":
        return (given,)
    if family not in ("qwen2", "qwen3") or not values.get("use_sliding_window") or given is None:
        return (None,)
    kinds = values.get("layer_types")
    if kinds is not None:
        sliding = "sliding_attention" in kinds
        return ((None,) if "full_attention" in kinds else ()) + ((given,) if sliding else ())
    first = values.get("max_window_layers", 28)
    return ((None,) if first > 0 else ()) + ((given,) if first < layers else ())
