"""The operations of a decoder, and the choice of who computes them.

Every operation has a plain-torch twin in `kernels.reference`: the CPU backend and the tests' oracle.
Operations are cut where a fused kernel would be cut: what touches the same bytes is one call.

Words of the shapes: *tokens* of one pass, packed; *heads* and *kv_heads* of this rank; a *page* is one block
and head of the KV pool `[blocks, kv_heads, 64, head_dim]`, whose 64 tokens are one contiguous tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.draws import SamplingOps

PAGE_TOKENS = 64
"""Tokens in a block of the KV pool."""

PDL_FROM = 90
"""Compute capability, times ten, from which a GPU knows programmatic dependent launch."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix quantised per output (row)."""

    values: torch.Tensor
    """[out, in] float8_e4m3fn"""
    scales: torch.Tensor
    """[out] float32: row i of the matrix is `values[i] × scales[i]`."""


Weight = torch.Tensor | Fp8Weight
"""A matrix `[out, in]`: in the model's dtype (or as `Ops.pack_weight` laid it out), or quantised."""


@dataclass(frozen=True, slots=True)
class Fp8Activation:
    """Activations quantised per token."""

    values: torch.Tensor
    """[tokens, n] float8_e4m3fn"""
    scales: torch.Tensor
    """[tokens, 1] float32"""
    dtype: torch.dtype
    """The model's: what they were, and what a product of them is."""


Activation = torch.Tensor | Fp8Activation
"""`[tokens, n]`: in the model's dtype, or quantised."""


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """An RMSNorm but for its one factor per token: 1 / √(Σ x² / n + eps)."""

    values: torch.Tensor
    """[tokens, n]: x × gain, rounded once to x's dtype"""
    squares: torch.Tensor
    """[parts, tokens] float32: sums of x² over parts of n, together all of it"""


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream between two halves of a layer."""

    values: torch.Tensor
    """[tokens, hidden]"""
    deferred_norm: DeferredNorm | None = None
    """The values for the norm that reads them next, where the product that made them has worked it out."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What turns a head by its position (RoPE, Su et al. 2021), and norms it before."""

    cos_sin: torch.Tensor
    """[positions, head_dim] float32, of `kernels.rope.cos_sin_table`"""
    q_norm: torch.Tensor | None = None
    """[head_dim]: gain of an RMSNorm of each query head; None: neither queries nor keys have one."""
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(slots=True)
class KvPool:
    """One layer's KV cache on one rank: `[blocks, kv_heads, 64, head_dim]` each.

    Finite from the start (zeros): attention reads whole blocks and masks what lies past a sequence's end.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scales: torch.Tensor | None = None
    """[blocks, kv_heads, 64] float32: a scale for each token and head of e4m3 keys; None: keys and values are
    of the model's dtype."""
    v_scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All of them, each with blocks first. FP8 as bytes, which is what indexing knows."""
        scales = [scales for scales in (self.k_scales, self.v_scales) if scales is not None]
        if not scales:
            return [self.keys, self.values]
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), *scales]


@dataclass(slots=True)
class ChunkSpan:
    """A prompt slice inside a pass."""

    first: int
    """Index of its first token in the pass."""
    count: int
    context: int
    """Tokens of the sequence before the slice: already in the cache when the pass starts."""
    slot: int
    """Of the block table."""

    @property
    def last(self) -> int:
        """Index of its last token in the pass."""
        return self.first + self.count - 1

    @property
    def end(self) -> int:
        """Tokens of the sequence that are in the cache when the pass ends."""
        return self.context + self.count


@dataclass(slots=True)
class AttentionInput:
    """Who sees what in a pass whose tokens are the decodes' (one each) and then the chunks'."""

    block_table: torch.Tensor
    """[rows, columns] int64: the device's table. Entries past a sequence's end are arbitrary but valid."""
    slots: torch.Tensor
    """[decodes] int64: each decode's row of the block table."""
    lens: torch.Tensor
    """[decodes] int64: tokens in the cache for each, the new one included; 0: padding of a captured pass."""
    columns: int
    """Most columns of the block table that a decode uses; the host knows it from the plans."""
    chunks: list[ChunkSpan]
    tiles: Mapping[int | None, torch.Tensor] | None = None
    """By window, instead of `chunks`: the list of tiles that `plan_tiles` of
    `kernels.triton.attention_prefill` makes of them, in place, for passes that are captured."""
    queries: torch.Tensor | None = None
    """[decodes] int64: which tokens of the pass ask, the last of their sequences, where all others are only
    written into the cache; None: the decodes are its first tokens, and everybody asks."""


class Ops(Protocol):
    """What a backend offers. Inputs are on its device; `dtype` is the model's; nothing here needs
    gradients."""

    name: str

    def pack_weight(self, weight: Weight) -> Weight:
        """A weight in the layout that the products like best; only they may read the result."""

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        """Rows of `weight [rows, hidden]` for `token_ids [tokens]` int64: `[tokens, hidden]`.

        first: None where `weight` has every token; else the token id of its first row, and ids that are not
        among its rows give zeros (the sum over ranks is then the embedding).
        """

    def linear(self, x: Activation, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [tokens, in] @ weight [out, in].T (+ bias [out])`: `[tokens, out]`. With an `Fp8Weight`, x is
        quantised per token first, unless it is already."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension, in float32, rounded once to x's
        dtype."""

    def norm_linear(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`linear(rms_norm(x.values))`, written into `out` where it is given. `x.deferred_norm`, if any, is of
        `norm_weight`."""

    def norm_gate_up(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
    ) -> Activation:
        """`silu(gate) × up` of `norm_linear(x)`, whose first half is the gate: `[tokens, out / 2]`
        (SwiGLU, Shazeer 2020). Perhaps quantised already where the weight is: its one reader is a product
        with another `Fp8Weight`."""

    def linear_add(
        self,
        x: Activation,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: Residual,
        next_gain: torch.Tensor | None,
    ) -> Residual:
        """`residual + linear(x)`, perhaps with what the norm of `next_gain [out]` needs of it, which reads it
        next; None: no norm of this stream does. May overwrite `residual.values`."""

    def plan_attention(self, inputs: AttentionInput) -> Any:
        """What `attend` wants to know, made once a pass and used by every layer."""

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        rotation: Rotation,
        pool: KvPool,
        heads: int,
        plan: Any,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Splits `qkv [tokens, (heads + 2 kv_heads) × head_dim]`; norms and rotates each query and key head;
        writes keys and values into the pool; and returns the causal attention of the pass over the paged
        cache: `[tokens, heads, head_dim]`, or `[decodes, heads, head_dim]` where the plan's input names
        `queries`, as qkv. Softmax in float32.

        positions, kv_slots: `[tokens]` int64; slot = block × 64 + offset, distinct; -1: padding, which is
        written nowhere, and whose row of the result is undefined. A decode's position and slot
        are those of the last of its `lens` tokens in its row of the block table. window: a token sees itself
        and the window - 1 before it.
        """


def select_backend(device_type: str, dtype: torch.dtype = torch.float32, expansion_blocks: int = 0) -> Ops:
    """The operations for tensors of a model's dtype on a torch device type ("cpu" or "cuda").

    expansion_blocks: see `kernels.cuda.CudaOps`; only an FP8 cache has a use for them.

    float32 on a GPU is computed by plain torch: it serves comparisons, and our kernels are made for 16 bits.

    Raises ValueError for a device that no backend serves. The caller has chosen the device: a backend never
    moves work to another one.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device_type!r}; backends exist for cpu and cuda")
    if device_type == "cuda" and dtype != torch.float32:
        from kernels.compiling import current_gpu
        from kernels.cuda import CudaOps
        from kernels.triton.linear_table import load_table

        gpu = current_gpu()
        multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        return CudaOps(
            expansion_blocks,
            load_table(gpu.name, gpu.shared_bytes),
            pdl=gpu.pdl,
            hopper_multiprocessors=multiprocessors if gpu.hopper else 0,
        )
    from kernels import reference

    return reference


def select_sampling(backend: str) -> SamplingOps:
    """The operations of sampling that belong to a backend's name (`Ops.name`)."""
    if backend == "cuda":
        from kernels.triton import sampling as triton_sampling

        return triton_sampling
    from kernels import sampling

    return sampling
