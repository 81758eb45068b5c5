"""Defines the operations of a decoder (`Ops`) and their data types, and selects a backend.

`kernels.reference` implements every operation in plain torch. It is the CPU backend, and the reference for
testing the GPU kernels. Each operation combines all steps that touch the same data, so that a single fused
kernel can implement it.

In shapes, *tokens* is the number of packed tokens in one forward pass, and *heads* and *kv_heads* are this
rank's head counts. A *page* holds one block's 64 tokens for one KV head, and is contiguous in the KV pool
`[blocks, kv_heads, 64, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.draws import SamplingOps

PAGE_TOKENS = 64
"""Number of tokens per block in the KV pool."""

PDL_FROM = 90
"""Minimum compute capability (times ten) for programmatic dependent launch (PDL)."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An FP8 weight matrix, with one scale per output row or one per block of rows and columns."""

    values: torch.Tensor
    """Quantised matrix: [out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """One scale per row: [out] float32. Row i of the weight matrix is `values[i] × scales[i]`. If `block` is
    set, one scale per block: [⌈out / rows⌉, ⌈in / columns⌉] float32."""
    block: tuple[int, int] | None = None
    """Rows and columns per block, or None for one scale per row. With blocks, each token's inputs are
    quantised in groups of `columns` values, and each group has its own scale. The GPU kernels support blocks
    of 32, 64, 128 or more columns (powers of two). Outside of experts, `in` must be a multiple of 64."""


Weight = torch.Tensor | Fp8Weight
"""A weight matrix `[out, in]` in the model's dtype, in FP8, or in a backend's own layout
(`Ops.pack_weight`)."""


@dataclass(frozen=True, slots=True)
class Fp8Activation:
    """FP8 activations with one scale per token, or one per group of a token's values."""

    values: torch.Tensor
    """Quantised activations, [tokens, n] float8_e4m3fn."""
    scales: torch.Tensor
    """Each token's scales, [tokens, 1] or [tokens, groups] float32."""
    dtype: torch.dtype
    """The model's dtype, which is also the result dtype of GEMMs on these activations."""


Activation = torch.Tensor | Fp8Activation
"""Activations `[tokens, n]` in the model's dtype or in FP8."""


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """An RMSNorm whose per-token factor, 1 / √(Σ x² / n + eps), has not been applied yet. The next GEMM
    multiplies its result by this factor."""

    values: torch.Tensor
    """Scaled values x × gain, [tokens, n], rounded once to x's dtype."""
    squares: torch.Tensor
    """Partial sums of squares, [parts, tokens] float32. A token's partial sums add up to Σ x²."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream between two half-layers (attention and MLP) of a decoder."""

    values: torch.Tensor
    """Residual values, [tokens, hidden]."""
    deferred_norm: DeferredNorm | None = None
    """Deferred norm of `values` for the next GEMM, or None if not computed."""
    normed: Fp8Activation | None = None
    """Quantised norm of `values` for the next GEMM, or None if not computed."""


@dataclass(frozen=True, slots=True)
class NextNorm:
    """The RMSNorm that follows a residual add, and whether the next GEMM expects it quantised or deferred."""

    gain: torch.Tensor
    """The RMSNorm's gain, [hidden]."""
    eps: float
    quantised: bool
    """Whether the next GEMM expects a quantised norm (`Residual.normed`) rather than a deferred one."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One rank's part of a mixture-of-experts layer: the router and this rank's experts. Each expert is an
    MLP with SwiGLU. With FP8, each `Fp8Weight` has an extra first dimension: values [experts, out, in], and
    scales [experts, out] or, with blocks, [experts, ⌈out / rows⌉, ⌈in / columns⌉]."""

    router: torch.Tensor
    """The router's matrix in the model's dtype: [experts of all ranks, hidden]."""
    gate_up: Weight
    """Gate and up matrices, [experts, 2 × intermediate, hidden]. Each expert's gate rows precede its up
    rows."""
    down: Weight
    """Down matrices, [experts, hidden, intermediate]."""
    top_k: int
    """Number of experts chosen for each token."""
    normalised: bool
    """If true, the softmax covers only the chosen experts' logits, so that their weights sum to one.
    Otherwise, it covers all experts' logits."""
    first: int = 0
    """Index of the row of `router` that corresponds to the first expert in `gate_up` and `down`. Experts on
    other ranks contribute zero."""


@dataclass(frozen=True, slots=True)
class ChoiceCount:
    """Counts the tokens routed to each expert of a layer."""

    totals: torch.Tensor
    """Number of tokens routed to each expert: [experts of all ranks] int64. Updated by the router."""
    live: torch.Tensor
    """Marks padding: [tokens] int64. Tokens with a negative value are padding and are not counted."""


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """The activations of the experts chosen by each token. Only the backend that computed `values` can read
    them."""

    chosen: torch.Tensor
    """Each token's chosen experts, highest logit first: [tokens, top_k] int32. Experts with equal logits are
    in index order."""
    weights: torch.Tensor
    """Routing weight of each chosen expert: [tokens, top_k] float32."""
    values: Any
    """The activations `silu(gate) × up`. In the reference implementation, their shape is [tokens × top_k,
    intermediate]."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Parameters of rotary position embedding (RoPE, Su et al. 2021) and of the optional QK-norm before
    it."""

    cos_sin: torch.Tensor
    """Cosines and sines, [positions, head_dim] float32, from `kernels.rope.cos_sin_table`."""
    q_norm: torch.Tensor | None = None
    """RMSNorm gain applied to each query head, [head_dim]. q_norm and k_norm are None if the model has no
    QK-norm."""
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(slots=True)
class KvPool:
    """One layer's KV cache on one rank. Keys and values are two tensors of shape
    `[blocks, kv_heads, 64, head_dim]`.

    Attention reads whole blocks and masks the positions past the end of a sequence, so the pool must contain
    only finite values; it is initialised with zeros.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scales: torch.Tensor | None = None
    """Scales of FP8 (e4m3) keys, one for each token and head: [blocks, kv_heads, 64] float32. None if keys
    and values are stored in the model's dtype."""
    v_scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all of the pool's tensors. Their first dimension is indexed by block number. FP8 tensors are
        returned as byte views, because torch cannot index FP8."""
        scales = [scales for scales in (self.k_scales, self.v_scales) if scales is not None]
        if not scales:
            return [self.keys, self.values]
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), *scales]

    def first(self, blocks: int) -> KvPool:
        """Return a view of the pool's first `blocks` blocks."""
        parts = (self.keys, self.values, self.k_scales, self.v_scales)
        return KvPool(*(None if part is None else part[:blocks] for part in parts))  # type: ignore[arg-type]


@dataclass(slots=True)
class ChunkSpan:
    """A prompt chunk's position in its forward pass and in its sequence."""

    first: int
    """Index of the chunk's first token in the pass."""
    count: int
    context: int
    """Number of tokens that precede the chunk in its sequence. Their keys and values are already cached when
    the pass starts."""
    slot: int
    """The sequence's slot, which is its row in the block table."""

    @property
    def last(self) -> int:
        """Index of the chunk's last token in the pass."""
        return self.first + self.count - 1

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that are in the cache after the pass."""
        return self.context + self.count


@dataclass(slots=True)
class AttentionInput:
    """Determines which keys each token of a forward pass attends to. The pass consists of the decode tokens,
    one per sequence, followed by the prompt chunks."""

    block_table: torch.Tensor
    """Block table on the device: [slots, columns] int64. Entries past the end of a sequence contain arbitrary
    but valid block numbers."""
    slots: torch.Tensor
    """Each decode sequence's slot, which is its row in the block table: [decodes] int64."""
    lens: torch.Tensor
    """Number of cached tokens in each decode sequence, including the new one: [decodes] int64. 0 marks a
    padding entry in a captured pass."""
    columns: int
    """Number of block-table columns used by the longest decode sequence, computed on the host."""
    chunks: list[ChunkSpan]
    tiles: Mapping[int | None, torch.Tensor] | None = None
    """Prefill tiles, keyed by attention window, in the format of
    `kernels.triton.attention_prefill.plan_tiles`. Captured passes use these tiles instead of `chunks`. The
    tiles are overwritten in place before each replay."""
    queries: torch.Tensor | None = None
    """Indices of the tokens for which attention is computed, [decodes] int64: each sequence's last token. The
    keys and values of all other tokens are still written to the cache. None means all tokens."""


class Ops(Protocol):
    """The operations of a decoder, implemented by each backend. All inputs are on the backend's device, and
    no gradients are computed."""

    name: str

    def pack_weight(self, weight: Weight) -> Weight:
        """Return the weight in the layout that is fastest for this backend's GEMMs. Other backends cannot
        read this layout."""

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        """Return the rows of `weight [rows, hidden]` for `token_ids [tokens]` int64: `[tokens, hidden]`.

        first: token id of the first row of `weight`, or None if `weight` covers the whole vocabulary. The
        result is zero for token ids outside `weight`, so the ranks' results add up to the embedding.
        """

    def linear(
        self, x: Activation, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `x [tokens, in] @ weight [out, in].T (+ bias [out])`, which has shape `[tokens, out]`. If
        `weight` is an `Fp8Weight`, x is first quantised per token (or, with blocks, per group of a token's
        inputs), unless it is already quantised. If `out` is given, the result is written to it."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute RMSNorm (Zhang and Sennrich 2019) over the last dimension in float32, and round the result
        once to x's dtype."""

    def norm_linear(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `linear(rms_norm(x.values))`. If `out` is given, the result is written to it. A deferred or
        quantised norm in `x` must have been computed with the same `norm_weight` and `eps`."""

    def norm_gate_up(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
    ) -> Activation:
        """Apply SwiGLU (Shazeer 2020) to `norm_linear(x)`: return `silu(gate) × up`, of shape
        `[tokens, out / 2]`. The gate is the first half of the GEMM's columns. If `weight` is an `Fp8Weight`,
        the result may already be quantised, because an FP8 GEMM follows."""

    def linear_add(
        self,
        x: Activation,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: Residual,
        next_gain: torch.Tensor | None,
    ) -> Residual:
        """Return `residual + linear(x)`. The result may overwrite `residual.values`.

        next_gain: gain `[out]` of the norm that follows, or None for no norm. With a gain, the returned
        residual may contain a deferred norm.
        """

    def next_norm(self, rows: int, weight: Weight, gain: torch.Tensor, eps: float) -> NextNorm | None:
        """Return the norm that the all-reduce after `linear_add` must also compute, or None if the next GEMM
        computes the norm itself.

        rows: number of result rows.
        weight: weight of the linear that computes the partial results. The next linear's weight must be of
          the same type.
        gain, eps: parameters of the norm.
        """

    def norm_experts(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        experts: Experts,
        count: ChoiceCount | None = None,
    ) -> ExpertActivation:
        """Choose each token's experts by the logits `rms_norm(x.values) @ router.T`, computed in float32.
        Return `silu(gate) × up` of the chosen experts, as `norm_gate_up` does for one MLP. count: if given,
        counts the tokens routed to each expert."""

    def experts_sum(
        self, x: ExpertActivation, experts: Experts, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return each token's sum of `weight × down(activation)` over its chosen experts: `[tokens, hidden]`
        in the router's dtype. If `out` is given, the result is written to it."""

    def experts_add(
        self, x: ExpertActivation, experts: Experts, residual: Residual, next_gain: torch.Tensor | None
    ) -> Residual:
        """Return `residual + experts_sum(x)`. May overwrite `residual.values`. next_gain: as in
        `linear_add`."""

    def plan_attention(self, inputs: AttentionInput) -> Any:
        """Prepare attention for a forward pass. Every layer passes the returned plan to `attend`."""

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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply QK-norm and RoPE to queries and keys, write keys and values to the pool, and compute
        causal paged attention. If `out` is given, the result is written to it.

        The result is `[tokens, heads, head_dim]` in qkv's dtype, or `[decodes, heads, head_dim]` for a plan
        with `AttentionInput.queries`. The softmax is computed in float32.

        qkv: `[tokens, (heads + 2 kv_heads) × head_dim]`, each token's query, key and value heads.
        positions, kv_slots: `[tokens]` int64. A KV slot is block × 64 + offset, and all slots are distinct.
          Slot -1 marks padding: no key or value is written, and that row of the result is undefined. A decode
          sequence has one entry in each of these tensors, for its newest token.
        window: each token attends to itself and the window - 1 tokens before it. None means no limit.
        """


def select_backend(device_type: str, dtype: torch.dtype = torch.float32, expansion_blocks: int = 0) -> Ops:
    """Return the backend for a torch device type ("cpu" or "cuda") and a model's dtype.

    expansion_blocks: see `kernels.cuda.CudaOps`; only an FP8 cache uses expansion blocks.

    On a GPU, float32 models (used only for comparisons) run in plain torch, because the Triton kernels
    support only 16-bit dtypes.

    Raises ValueError if no backend supports the device. The caller chooses the device; a backend never moves
    work to another device.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device_type!r}; supported devices: cpu, cuda")
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
    """Return the sampling operations of the backend with this name (`Ops.name`)."""
    if backend == "cuda":
        from kernels.triton import sampling as triton_sampling

        return triton_sampling
    from kernels import sampling

    return sampling
