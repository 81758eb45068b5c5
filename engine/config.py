"""Defines a model's configuration and how the model is divided among ranks. This module does not load torch,
because `engine.sizing` imports it.

All supported families use the same decoder: pre-norm, rotary embedding, grouped-query attention, and a
SiLU-gated MLP or a mixture of such MLPs. `engine.families` reads a checkpoint's `config.json` into a
`ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from engine.messages import ModelDType

DTYPE_BYTES: dict[ModelDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Element size, in bytes, of each dtype that unquantised weights and KV caches can have."""

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


FP8_BLOCK = 128
"""Side length, in elements, of the square blocks in an FP8 matrix with one scale per block."""

FP8_BLOCK_INPUTS = 64
"""On a GPU, the number of inputs of a rank's FP8 matrix with one scale per block must be a multiple of this
(`kernels.triton.linear_plans.ALIGNMENT`)."""

DENSE, EXPERTS = "dense", "experts"
"""Layer kinds: a dense layer has an MLP, and an experts layer has a mixture of experts."""


def fp8_block(part: int) -> int:
    """Return the block size, in rows or columns, of an FP8 matrix on a rank. The matrix is composed of
    tensors or slices that begin at multiples of `part` rows or columns. If `part` is 0, the matrix is one
    complete tensor."""
    return gcd(FP8_BLOCK, part)


class ModelError(Exception):
    """Raised if a model cannot be loaded with the given settings. `cause` gives the reason and the values
    involved, and `remedy` says what to do."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy)
        self.cause, self.remedy = cause, remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


class CheckpointError(ModelError):
    """Raised if a checkpoint's files cannot be used. The cause names the file, the field or tensor, and its
    value."""


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint file that the operating system cannot read."""
    return CheckpointError(f"{file} cannot be read ({error.strerror})", "check the disk and the permissions")


class UnsupportedError(ModelError):
    """Raised if the requested configuration is not supported, e.g. its number of ranks or maximum length."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, and its scaling beyond the trained length.

    In transformers, the base of `dynamic` (NTK-aware) scaling grows with the longest sequence seen, so
    answers depend on earlier requests. This engine instead derives a single base from `max_model_len`. If
    `max_model_len` is at most `max_position_embeddings`, the base is unscaled, as in transformers. Otherwise,
    all positions use the base that transformers uses for a sequence of exactly `max_model_len` tokens.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Maximum sequence length in the original training, without scaling. Used by llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor by which yarn multiplies cos and sin. If None, it is computed from `factor`, `mscale` and
    `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts that replaces a layer's MLP."""

    count: int
    """Number of routed experts."""
    top_k: int
    """Number of routed experts chosen by each token."""
    intermediate_size: int
    """Width of each routed expert."""
    normalised: bool
    """Whether the weights of the chosen experts are normalised to sum to one (see `kernels.Experts`)."""
    shared_intermediate_size: int | None = None
    """Width of the shared expert (Qwen2-MoE), or None if the model has none. Every token uses it, and its
    result is multiplied by the sigmoid of a separate gate."""
    count_field: str = "num_experts"
    """Name of the `config.json` field that gives `count`, for error messages."""
    width_field: str = "moe_intermediate_size"
    """Name of the `config.json` field that gives `intermediate_size`, for error messages."""
    whole: bool = False
    """Whether each rank holds a subset of whole routed experts (expert parallelism), instead of a slice of
    every expert. The shared expert is always split."""


@dataclass(frozen=True, slots=True)
class ExpertsShard:
    """One rank's routed experts."""

    first: int
    """Index of the first expert that the rank holds, whole or as a slice."""
    count: int
    width: int
    """Width of the rank's slice of each expert."""
    start: int
    """Offset of the rank's slice within the expert's full width."""


class MlpWidth(NamedTuple):
    """The width of a model's MLPs, routed experts or shared experts."""

    kind: str
    """Noun with article for error messages, e.g. "an MLP"."""
    field: str
    """Name of the `config.json` field that gives the width."""
    width: int


ROUTED = "experts"
"""The `MlpWidth.kind` of routed experts."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The dimensions of one rank's shard of the model. The rank's heads, for example, are [first_head,
    first_head + heads)."""

    size: int
    rank: int
    heads: int
    first_head: int
    kv_heads: int
    """Number of KV heads on this rank, at least one. If there are more ranks than KV heads, each head is
    replicated on several adjacent ranks."""
    first_kv_head: int
    intermediate: int
    vocab: int
    """Number of this rank's rows in the embedding, and also in the output matrix. The number includes padding
    and is the same on all ranks."""
    vocab_real: int
    """Number of this rank's vocabulary rows that are not padding. Less than `vocab` only on the last
    ranks."""
    first_vocab: int

    def part(self, width: int) -> int:
        """Return this rank's share of `width`, which is divided evenly among the ranks."""
        return width // self.size

    def cut(self, part: int) -> int:
        """Return `part`, the width of this rank's slice, or 0 if the tensor is not sliced because there is
        only one rank."""
        return part if self.size > 1 else 0

    def experts(self, config: ExpertsConfig) -> ExpertsShard:
        """Return this rank's share of the routed experts."""
        if config.whole:
            count = self.part(config.count)
            return ExpertsShard(self.rank * count, count, config.intermediate_size, 0)
        width = self.part(config.intermediate_size)
        return ExpertsShard(0, config.count, width, self.rank * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder."""

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
    """Whether each query and key head is RMS-normalised before the rotation (Qwen3)."""
    qk_norm_all_heads: bool
    """Whether all query heads together, and all key heads together, are RMS-normalised before the rotation
    (OLMoE)."""
    layer_kinds: tuple[str, ...]
    """Each layer's kind: a key of `engine.model.kinds.LAYER_KINDS`."""
    experts: ExpertsConfig | None
    """The experts in layers of kind "experts", or None if there are no such layers."""
    sliding_windows: tuple[int | None, ...]
    """Each layer's attention window in tokens: with a window of w, a token attends to itself and the w - 1
    tokens before it. None means all earlier tokens."""
    dtype: ModelDType
    """Dtype of the checkpoint."""
    fp8: bool
    """Whether the checkpoint's matrices are e4m3, with one scale per output, per matrix or per block."""
    fp8_blocks: bool
    """Whether e4m3 matrices have one scale per block of FP8_BLOCK rows and columns."""

    @property
    def context_length(self) -> int:
        """Default maximum sequence length: `max_position_embeddings` or, with yarn, the scaled length if that
        is larger."""
        if self.rope.kind == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def context_limit(self) -> int:
        """Maximum allowed `max_model_len`. Linear and dynamic scaling allow `factor` times
        `max_position_embeddings`."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.context_length

    @property
    def mlp_widths(self) -> list[MlpWidth]:
        """Widths of the model's MLPs, experts and shared experts."""
        widths, experts = [], self.experts
        if any(kind != EXPERTS for kind in self.layer_kinds):
            widths.append(MlpWidth("an MLP", "intermediate_size", self.intermediate_size))
        if experts is not None and EXPERTS in self.layer_kinds:
            widths.append(MlpWidth(ROUTED, experts.width_field, experts.intermediate_size))
            if experts.shared_intermediate_size is not None:
                field = "shared_expert_intermediate_size"
                widths.append(MlpWidth("a shared expert", field, experts.shared_intermediate_size))
        return widths

    def representative_layers(self) -> list[int]:
        """Return the indices of a few layers that launch every kernel of the model when run in this order.
        Which kernels a layer launches depends on its kind, its sliding window, and the previous layer,
        because adjacent layers may share a norm. The last layer may launch different kernels, because it may
        compute fewer rows. The result therefore contains every pair of adjacent kinds once, as well as the
        pair that ends with the last layer.
        """
        kinds = list(zip(self.layer_kinds, self.sliding_windows, strict=True))
        pairs = {pair: index for index, pair in enumerate(pairwise(kinds))}
        chosen = {self.layers - 1} | {layer for index in pairs.values() for layer in (index, index + 1)}
        if kinds[min(chosen)] != kinds[0]:
            chosen.add(0)
        return sorted(chosen)

    def with_layers(self, indices: list[int]) -> ModelConfig:
        """Return a copy of this configuration with only the given layers."""
        return replace(
            self,
            layers=len(indices),
            layer_kinds=tuple(self.layer_kinds[index] for index in indices),
            sliding_windows=tuple(self.sliding_windows[index] for index in indices),
        )

    def with_whole_experts(self) -> ModelConfig:
        """Return a copy of this configuration with `ExpertsConfig.whole` set. Raises UnsupportedError if the
        model has no experts."""
        if self.experts is None:
            raise UnsupportedError(
                f"expert_parallel is true, but {self.model_type} models have no experts",
                "remove this setting",
            )
        return replace(self, experts=replace(self.experts, whole=True))

    def resolve_length(self, requested: int | None) -> int:
        """Return the requested maximum sequence length, or the default if `requested` is None. Raises
        UnsupportedError if it exceeds `context_limit`."""
        if requested is None:
            return self.context_length
        if not 1 <= requested <= self.context_limit:
            raise UnsupportedError(
                f"max_model_len is {requested}; this checkpoint allows 1 to {self.context_limit} "
                f"(max_position_embeddings {self.max_position_embeddings}, rope {self.rope.kind})",
                "choose a length in this range",
            )
        return requested

    def check_parallel(self, size: int) -> None:
        """Raise UnsupportedError if the model cannot be split across `size` ranks. Attention heads, the MLP
        and experts must divide evenly among the ranks. KV heads must either divide evenly or each be
        replicated on the same number of ranks. The vocabulary is padded if necessary."""
        problems = []
        if size < 1:
            raise UnsupportedError(f"tensor_parallel_size is {size}", "it must be at least 1")
        if self.heads % size:
            problems.append(f"{self.heads} attention heads")
        if self.kv_heads % size and size % self.kv_heads:
            problems.append(f"{self.kv_heads} KV heads")
        problems += [f"{kind} of {width}" for kind, _, width in self._split_widths if width % size]
        if self._whole_experts % size:
            problems.append(f"{self._whole_experts} experts")
        if problems:
            fitting = [n for n in range(1, self.heads + 1) if self._divides(n)]
            raise UnsupportedError(
                f"tensor_parallel_size is {size}, which does not divide {' and '.join(problems)}",
                f"this model supports {', '.join(map(str, fitting))}",
            )

    def _divides(self, size: int) -> bool:
        kv_fits = self.kv_heads % size == 0 or size % self.kv_heads == 0
        mlps_fit = all(mlp.width % size == 0 for mlp in self._split_widths)
        return self.heads % size == 0 and kv_fits and mlps_fit and self._whole_experts % size == 0

    @property
    def _split_widths(self) -> list[MlpWidth]:
        """The entries of `mlp_widths` that are split across the ranks."""
        if not self._whole_experts:
            return self.mlp_widths
        return [mlp for mlp in self.mlp_widths if mlp.kind != ROUTED]

    @property
    def _whole_experts(self) -> int:
        """Number of routed experts per layer if each rank holds whole experts, otherwise 0."""
        return self.experts.count if self.experts is not None and self.experts.whole else 0

    def shard(self, size: int, rank: int) -> Shard:
        """Return the dimensions of rank `rank`'s shard, out of `size` ranks. Raises UnsupportedError under
        the same conditions as `check_parallel`."""
        self.check_parallel(size)
        if not 0 <= rank < size:
            raise UnsupportedError(
                f"rank is {rank}", f"with tensor_parallel_size {size}, it must be from 0 to {size - 1}"
            )
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
            vocab=vocab,
            vocab_real=min(vocab, self.vocab_size - first_vocab),
            first_vocab=first_vocab,
        )
