"""A decoder as its kernels see it: the numbers that decide what is compiled and what is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The model dtypes that our kernels serve."""


HEAD_DIMS = (16, 32, 64, 128, 256)
"""What attention's tiles can be wide: a power of two, of which tensor cores want at least 16; two stages of
keys and values 512 wide do not fit a multiprocessor's shared memory."""

MOST_GROUP = 128
"""Query heads of a KV head: they are rows of one tile in attention of prompts."""

LARGEST_ROW = 65536
"""Most elements of a row that one program holds in registers, for a norm or a scale."""

ELSEWHERE = "on the CPU, or in float32, which a GPU computes without these kernels"
"""Where every model is served."""

WIDE_HEADS_SHARED = 113 << 10
"""Bytes of shared memory that attention of prompts takes for heads wider than 128."""

LEAST_CAPABILITY = 80
"""Compute capability, times ten: the first that has bfloat16."""

FP8_FROM = 89
"""Likewise, e4m3."""

FP8_ALIGNMENT = 16
"""Of both sides of an e4m3 matrix, by `torch._scaled_mm`."""


class DimensionsError(ValueError):
    """A model is not one that kernels can be made for: the message has field, value and remedy, and the file
    where one was read."""


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
    max_num_seqs: int = 1024
    """Most sequences at once."""
    max_num_batched_tokens: int = 8192
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


def check(dimensions: Dimensions) -> None:
    """Raises DimensionsError, with the field's name in `config.json`, for a model that divides among its
    ranks but that our kernels cannot serve."""
    d = dimensions
    group = d.rank_heads // d.rank_kv_heads
    each = f" ({d.rank_intermediate} on each of {d.tensor_parallel} ranks)" if d.tensor_parallel > 1 else ""
    intermediate = f"intermediate_size is {d.intermediate}{each}"
    serve = f"serve this model {ELSEWHERE}"
    serve_unquantised = f"serve this model with weights that are not FP8, {ELSEWHERE}"
    problem = None
    if d.head_dim not in HEAD_DIMS:
        served = ", ".join(map(str, HEAD_DIMS))
        problem = f"head_dim is {d.head_dim}; a GPU's kernels serve {served}: {serve}"
    elif group > MOST_GROUP:
        problem = (
            f"num_attention_heads is {d.heads} and num_key_value_heads {d.kv_heads}; a GPU's kernels serve "
            f"at most {MOST_GROUP} query heads for a KV head, not {group}: {serve}"
        )
    elif d.hidden > LARGEST_ROW:
        problem = f"hidden_size is {d.hidden}; a GPU's kernels serve at most {LARGEST_ROW}: {serve}"
    elif d.fp8 and d.hidden % FP8_ALIGNMENT:
        problem = (
            f"hidden_size is {d.hidden}; FP8 weights on a GPU need a multiple of {FP8_ALIGNMENT}: "
            f"{serve_unquantised}"
        )
    elif d.fp8 and d.rank_intermediate % FP8_ALIGNMENT:
        problem = (
            f"{intermediate}; FP8 weights on a GPU need a multiple of {FP8_ALIGNMENT}: {serve_unquantised}"
        )
    elif d.fp8 and d.rank_intermediate > LARGEST_ROW:
        problem = f"{intermediate}; FP8 weights on a GPU allow at most {LARGEST_ROW}: {serve_unquantised}"
    if problem is not None:
        raise DimensionsError(problem)


def shared_bytes(capability: int) -> int:
    """Of shared memory, that one program can have on a GPU of a compute capability (times ten): by NVIDIA's
    table of them."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10


def check_gpu(dimensions: Dimensions, name: str, capability: int) -> None:
    """Raises DimensionsError where a GPU (its driver's name, its compute capability times ten) cannot run the
    kernels of a model."""
    gpu = f"{name} has compute capability {capability / 10}"
    elsewhere = f"serve this model on another GPU, {ELSEWHERE}"
    if capability < LEAST_CAPABILITY:
        raise DimensionsError(f"{gpu}; a GPU's kernels need {LEAST_CAPABILITY / 10} at least: {elsewhere}")
    if dimensions.head_dim > 128 and shared_bytes(capability) < WIDE_HEADS_SHARED:
        raise DimensionsError(
            f"head_dim is {dimensions.head_dim}, but {gpu} and {shared_bytes(capability) >> 10} KiB of "
            f"shared memory for a program; attention needs {WIDE_HEADS_SHARED >> 10}: {elsewhere}"
        )
    if capability < FP8_FROM and (dimensions.fp8 or dimensions.kv_fp8):
        what = "weights are" if dimensions.fp8 else "kv_cache_dtype is"
        whole = "weights that are not FP8" if dimensions.fp8 else 'kv_cache_dtype "auto"'
        raise DimensionsError(
            f"{what} fp8, but {gpu}; FP8 needs {FP8_FROM / 10} at least: serve this model with {whole}, or "
            "on another GPU"
        )


def read_dimensions(folder: Path, **served: Any) -> Dimensions:
    """From a checkpoint's `config.json`; `served`: the fields of `Dimensions` that it does not have.

    The dtype is the file's where `served` names none. Raises DimensionsError, also as `check` does.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DimensionsError(f"{file}: cannot be read: {error}; give the folder of a checkpoint") from None
    if not isinstance(values, dict):
        raise DimensionsError(f"{file}: is no object but {values!r:.40}; give the folder of a checkpoint")
    for name in ("tensor_parallel", "max_num_seqs", "max_num_batched_tokens"):
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
    try:
        check(found)
    except DimensionsError as error:
        raise DimensionsError(f"{file}: {error}") from None
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
