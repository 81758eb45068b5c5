"""What a checkpoint folder says about its model, checked and in our own words. No torch: sizing reads it too.

Every family is the same decoder (pre-norm, rotary, grouped-query attention, SiLU-gated MLP); a family is a
mapping from `config.json` to `ModelConfig`, nothing more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that weights and KV can have here, and their size in bytes."""

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


class CheckpointError(Exception):
    """The files of a checkpoint cannot be used: the message names file, field or tensor, value and remedy."""


class UnfitError(ValueError):
    """The checkpoint is sound but cannot run as asked (number of ranks, length)."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched beyond the trained length.

    `dynamic` (NTK-aware) is defined by transformers as a base that grows with the longest sequence seen,
    which would make an answer depend on what ran before. Here it is frozen at the configured maximum length:
    up to `max_position_embeddings` (where the base is the unscaled one) it equals transformers at every
    length; with a greater `max_model_len` all positions use the base that transformers has at exactly that
    length.
    """

    theta: float
    kind: str = "default"
    """One of ROPE_KINDS."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """The length the model was trained on before stretching; used by llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied with; None: computed from `factor` and the mscales."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of the dimensions. Ranges are [first, first + count)."""

    size: int
    rank: int
    heads: int
    first_head: int
    kv_heads: int
    """At least one: where ranks outnumber KV heads, `size / kv_heads` neighbours hold the same one."""
    first_kv_head: int
    intermediate: int
    first_intermediate: int
    vocab: int
    """Rows of the embedding and of the output matrix, padding included; equal on every rank."""
    vocab_real: int
    """Rows that belong to real tokens: fewer than `vocab` only on the last ranks."""
    first_vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, described."""

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each query and key head before the rotation (Qwen3)."""
    sliding_windows: tuple[int | None, ...]
    """One a layer: a token sees itself and the window - 1 before it; None: everything before it."""
    dtype: str
    """The checkpoint's own, one of DTYPE_BYTES."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads `config.json` and, where it is there, `generation_config.json` (its end tokens win).

        Raises CheckpointError for a missing or unreadable file, an unsupported architecture, and fields that
        are missing, of the wrong type, out of range or at odds with each other.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
        fields = _Fields.read(folder / "config.json")
        generation = folder / "generation_config.json"
        return _from_fields(fields, _Fields.read(generation) if generation.exists() else None)

    @property
    def context_length(self) -> int:
        """The longest sequence served unless another is asked for: `max_position_embeddings`, and with yarn
        at least the stretched length."""
        if self.rope.kind == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def context_limit(self) -> int:
        """The longest `max_model_len` that may be asked for: linear and dynamic scaling reach `factor` times
        the configured positions."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.context_length

    def resolve_length(self, requested: int | None) -> int:
        """The longest sequence to serve, from what was asked for. Raises UnfitError beyond
        `context_limit`."""
        if requested is None:
            return self.context_length
        if not 1 <= requested <= self.context_limit:
            raise UnfitError(
                f"max_model_len is {requested}; this checkpoint allows 1 to {self.context_limit} "
                f"(max_position_embeddings {self.max_position_embeddings}, rope {self.rope.kind})"
            )
        return requested

    def check_parallel(self, size: int) -> None:
        """Raises UnfitError unless the model can be split over `size` ranks: attention heads and the MLP
        divide evenly, KV heads divide or are replicated evenly. The vocabulary is padded where needed."""
        problems = []
        if size < 1:
            raise UnfitError(f"tensor_parallel_size is {size}; it must be at least 1")
        if self.heads % size:
            problems.append(f"{self.heads} attention heads")
        if self.kv_heads % size and size % self.kv_heads:
            problems.append(f"{self.kv_heads} KV heads")
        if self.intermediate_size % size:
            problems.append(f"an MLP of {self.intermediate_size}")
        if problems:
            fitting = [n for n in range(1, self.heads + 1) if self._divides(n)]
            raise UnfitError(
                f"tensor_parallel_size is {size}, which does not divide {' and '.join(problems)}; "
                f"this model can use {', '.join(map(str, fitting))}"
            )

    def _divides(self, size: int) -> bool:
        kv_fits = self.kv_heads % size == 0 or size % self.kv_heads == 0
        return self.heads % size == 0 and kv_fits and self.intermediate_size % size == 0

    def shard(self, size: int, rank: int) -> Shard:
        """The part of rank `rank` of `size`. Raises UnfitError as `check_parallel`."""
        self.check_parallel(size)
        if not 0 <= rank < size:
            raise UnfitError(f"rank is {rank}; with tensor_parallel_size {size} it must be 0 to {size - 1}")
        vocab = -(-self.vocab_size // size)
        first_vocab = min(rank * vocab, self.vocab_size)
        return Shard(
            size=size,
            rank=rank,
            heads=self.heads // size,
            first_head=rank * (self.heads // size),
            kv_heads=max(1, self.kv_heads // size),
            first_kv_head=rank * self.kv_heads // size,
            intermediate=self.intermediate_size // size,
            first_intermediate=rank * (self.intermediate_size // size),
            vocab=vocab,
            vocab_real=min(vocab, self.vocab_size - first_vocab),
            first_vocab=first_vocab,
        )


# ── reading fields ───────────────────────────────────────────────────────────────────────────────


class _Fields:
    """A JSON object of a checkpoint whose getters raise CheckpointError with file, field, value and remedy.

    A field that is null counts as absent, as in transformers.
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
        # The upper bound refuses NaN and infinity, which Python's JSON reader accepts.
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

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.error(name, f"token ids from 0 to {vocab_size - 1} are needed")
        return tuple(ids)

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
    """How one architecture's `config.json` is read; defaults are those of its transformers class."""

    architecture: str
    qkv_bias: Callable[[_Fields], bool]
    o_bias: Callable[[_Fields], bool]
    mlp_bias: Callable[[_Fields], bool]
    qk_norm: bool
    windows: Callable[[_Fields, int], tuple[int | None, ...]]
    head_dim: int | None = None
    """Where the file has none: this, or hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Where the file has none: this, or num_attention_heads."""
    max_position_embeddings: int = 2048


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
    """One window for all layers; absent means 4096 (Mistral 7B v0.1's), null means none (v0.2 and later)."""
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return (None,) * layers
    return (fields.integer("sliding_window", 4096),) * layers


def _qwen_windows(fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """`layer_types` where given; else, with `use_sliding_window`, the layers from `max_window_layers` on."""
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
        raise fields.error("model_type", f"supported are {supported}")
    architectures = fields.get("architectures")
    named = architectures if isinstance(architectures, list) else [architectures]
    if architectures is not None and family.architecture not in named:
        raise fields.error("architectures", f"supported are {supported}")
    return str(model_type), family


def _from_fields(fields: _Fields, generation: _Fields | None) -> ModelConfig:
    model_type, family = _family(fields)
    if fields.get("quantization_config") is not None:
        method = fields.get("quantization_config")
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{fields.file}: quantization_config.quant_method is {method!r}; quantised checkpoints are not "
            "supported: use the bfloat16 or float16 one"
        )
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
        raise fields.error("head_dim", "rotary embeddings need an even one")
    rope = _rope(fields, positions)
    if rope.kind == "dynamic" and head_dim == 2:
        raise fields.error("head_dim", "dynamic rope needs at least 4")
    vocab_size = fields.integer("vocab_size")
    source = generation if generation and generation.get("eos_token_id") is not None else fields
    bos = fields.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias(fields),
        o_bias=family.o_bias(fields),
        mlp_bias=family.mlp_bias(fields),
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(fields, layers),
        dtype=_dtype(fields),
        eos_token_ids=source.token_ids("eos_token_id", vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _dtype(fields: _Fields) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4); float32 where neither is given."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    value = value.removeprefix("torch.") if isinstance(value, str) else value
    if value not in list(DTYPE_BYTES):
        raise fields.error(name, f"supported are {', '.join(DTYPE_BYTES)}")
    return str(value)


def _rope(fields: _Fields, positions: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (4), which win if both."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values = fields.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise fields.error(name, "one set of parameters for all layers is needed")
    rope = _Fields(fields.file, values, prefix=f"{name}.")
    theta = (rope if rope.get("rope_theta") is not None else fields).number("rope_theta", 10000.0)
    kind_field = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(kind_field) or "default"
    if kind not in ROPE_KINDS:
        raise rope.error(kind_field, f"supported are {', '.join(ROPE_KINDS)}")
    for source in (rope, fields):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise source.error("partial_rotary_factor", "only full rotation (1.0) is supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, kind=kind, factor=_factor(rope))
    # transformers lets the top-level field win over the one inside.
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
