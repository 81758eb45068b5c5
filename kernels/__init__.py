"""The operations of a decoder (`Ops`), their data types, and the choice of a backend.

Every operation has a reference implementation in plain torch, `kernels.reference`. It is the CPU backend and
the tests' oracle. One operation covers all work on the same bytes, so that a fused kernel can implement it.

In shapes, *tokens* counts the packed tokens of one pass; *heads* and *kv_heads* count the heads of this rank.
A *page* is one block and head of the KV pool `[blocks, kv_heads, 64, head_dim]`: a contiguous tile of 64
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.draws import SamplingOps

PAGE_TOKENS = 64
"""Number of tokens in a block of the KV pool."""

PDL_FROM = 90
"""Compute capability, times ten, from which a GPU supports programmatic dependent launch (PDL)."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An FP8 weight matrix with one scale per output row."""

    values: torch.Tensor
    """The quantised matrix: [out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """Scales of the rows: [out] float32. Row i of the matrix is `values[i] × scales[i]`."""


Weight = torch.Tensor | Fp8Weight
"""A weight matrix `[out, in]`: in the model's dtype, in the layout that `Ops.pack_weight` returns, or in
FP8."""


@dataclass(frozen=True, slots=True)
class Fp8Activation:
    """FP8 activations with one scale per token."""

    values: torch.Tensor
    """The quantised activations: [tokens, n] float8_e4m3fn."""
    scales: torch.Tensor
    """Scales of the tokens: [tokens, 1] float32."""
    dtype: torch.dtype
    """The model's dtype: the dtype before quantisation, and the dtype of a GEMM's result."""


Activation = torch.Tensor | Fp8Activation
"""Activations `[tokens, n]`: in the model's dtype, or in FP8."""


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """An RMSNorm without its last factor, 1 / √(Σ x² / n + eps) per token, which the next GEMM applies to its
    result."""

    values: torch.Tensor
    """The scaled values x × gain: [tokens, n], rounded once to x's dtype."""
    squares: torch.Tensor
    """Partial sums of squares: [parts, tokens] float32. The sum over all parts is Σ x² of a token."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream between two halves of a decoder layer."""

    values: torch.Tensor
    """The residual values: [tokens, hidden]."""
    deferred_norm: DeferredNorm | None = None
    """The deferred form of the norm that reads these values next, or None if the operation that produced the
    values did not compute it."""
    normed: Fp8Activation | None = None
    """The quantised result of the norm that reads these values next, or None as for `deferred_norm`."""


@dataclass(frozen=True, slots=True)
class NextNorm:
    """The norm that reads a residual next, in the form that the GEMM after the norm takes."""

    gain: torch.Tensor
    """Gain of the RMSNorm: [hidden]."""
    eps: float
    quantised: bool
    """Whether the GEMM takes a quantised norm (`Residual.normed`) instead of a deferred one."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The router and the routed experts of a mixture-of-experts layer on one rank. Each expert is an MLP with
    SwiGLU. If the experts are FP8, their `Fp8Weight`s have one more dimension before the others: values
    [experts, out, in] and scales [experts, out]."""

    router: torch.Tensor
    """The router's matrix, in the model's dtype: [experts, hidden]."""
    gate_up: Weight
    """[experts, 2 × intermediate, hidden]: the rows of an expert's gate, then the rows of its up matrix."""
    down: Weight
    """[experts, hidden, intermediate]."""
    top_k: int
    """Number of experts that each token chooses."""
    normalised: bool
    """Whether the softmax is over the logits of the chosen experts, so that their weights add up to one. If
    not, it is over the logits of all experts."""


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """The activations of the experts that each token has chosen. Only the backend that computed them can read
    `values`."""

    chosen: torch.Tensor
    """The experts of each token, by falling logit: [tokens, top_k] int32. Of equal logits, the one of the
    expert with the lower index comes first."""
    weights: torch.Tensor
    """The factors of their results: [tokens, top_k] float32."""
    values: Any
    """The activations `silu(gate) × up`. In the reference implementation: [tokens × top_k, intermediate]."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Parameters of rotary position embedding (RoPE, Su et al. 2021) and of the optional QK-norm before
    it."""

    cos_sin: torch.Tensor
    """Cosines and sines: [positions, head_dim] float32, from `kernels.rope.cos_sin_table`."""
    q_norm: torch.Tensor | None = None
    """Gain [head_dim] of the RMSNorm of each query head, or None if the model has no QK-norm (then k_norm is
    None too)."""
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(slots=True)
class KvPool:
    """One layer's KV cache on one rank: keys and values, `[blocks, kv_heads, 64, head_dim]` each.

    The pool starts as zeros and must stay finite: attention reads whole blocks and masks the positions after
    the end of a sequence.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scales: torch.Tensor | None = None
    """Scales of e4m3 keys, one per token and head: [blocks, kv_heads, 64] float32. None if keys and values
    have the model's dtype."""
    v_scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the pool, each with blocks as its first dimension. FP8 tensors are viewed as
        bytes, because torch cannot index FP8."""
        scales = [scales for scales in (self.k_scales, self.v_scales) if scales is not None]
        if not scales:
            return [self.keys, self.values]
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), *scales]


@dataclass(slots=True)
class ChunkSpan:
    """One prompt chunk in a pass."""

    first: int
    """Index of the chunk's first token in the pass."""
    count: int
    context: int
    """Number of tokens of the sequence before the chunk. Their keys and values are in the cache when the pass
    starts."""
    slot: int
    """The sequence's slot: its row of the block table."""

    @property
    def last(self) -> int:
        """Index of the chunk's last token in the pass."""
        return self.first + self.count - 1

    @property
    def end(self) -> int:
        """Number of tokens of the sequence that are in the cache when the pass ends."""
        return self.context + self.count


@dataclass(slots=True)
class AttentionInput:
    """The attention input of a pass: which keys each token attends to. A pass has the decode tokens first,
    one per sequence, then the prompt chunks."""

    block_table: torch.Tensor
    """The device's block table: [slots, columns] int64. Entries after the end of a sequence are arbitrary
    valid block numbers."""
    slots: torch.Tensor
    """Slot of each decode, that is, its row of the block table: [decodes] int64."""
    lens: torch.Tensor
    """Number of cached tokens of each decode, the new token included: [decodes] int64. 0 marks padding of a
    captured pass."""
    columns: int
    """Largest number of block-table columns that any decode uses, computed on the host."""
    chunks: list[ChunkSpan]
    tiles: Mapping[int | None, torch.Tensor] | None = None
    """Lists of prefill tiles by attention window, for captured passes: they replace `chunks`, and
    `kernels.triton.attention_prefill.plan_tiles` writes them in place."""
    queries: torch.Tensor | None = None
    """Indices of the tokens whose attention is computed: [decodes] int64, the last token of each sequence.
    The other tokens are only written to the cache. None: the decodes are the first tokens, and attention is
    computed for every token."""


class Ops(Protocol):
    """The operations that a backend implements. Inputs are on the backend's device, `dtype` is the model's
    dtype, and no operation needs gradients."""

    name: str

    def pack_weight(self, weight: Weight) -> Weight:
        """Return the weight in the layout that the backend's GEMMs prefer. Only GEMMs of this backend can
        read it."""

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        """Return the rows of `weight [rows, hidden]` for `token_ids [tokens]` int64: `[tokens, hidden]`.

        first: the token id of the first row of `weight`, or None if `weight` covers the whole vocabulary.
        Token ids outside the rows give zeros, so that the sum over all ranks is the embedding.
        """

    def linear(self, x: Activation, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x [tokens, in] @ weight [out, in].T (+ bias [out])`: `[tokens, out]`. If `weight` is an
        `Fp8Weight`, x is quantised per token first, unless x is already quantised."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Compute RMSNorm (Zhang and Sennrich 2019) over the last dimension in float32, rounded once to x's
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
        """Return `linear(rms_norm(x.values))`, in `out` if `out` is given. `x.deferred_norm` and `x.normed`,
        if present, were computed with `norm_weight` and `eps`."""

    def norm_gate_up(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
    ) -> Activation:
        """Return `silu(gate) × up` of `norm_linear(x)`: `[tokens, out / 2]` (SwiGLU, Shazeer 2020). The gate
        is the first half of the columns. With an `Fp8Weight` the result may be quantised already, since its
        only reader is a GEMM with another `Fp8Weight`."""

    def linear_add(
        self,
        x: Activation,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: Residual,
        next_gain: torch.Tensor | None,
    ) -> Residual:
        """Return `residual + linear(x)`. May overwrite `residual.values`. With `next_gain [out]`, the gain of
        the norm that reads the result next, the returned residual may carry a deferred norm; None: no norm
        reads the result."""

    def next_norm(self, rows: int, weight: Weight, gain: torch.Tensor, eps: float) -> NextNorm | None:
        """Return the norm that the sum of several ranks' parts of `linear_add` should compute, or None if the
        next GEMM computes the norm itself.

        rows: number of rows of the result. weight: of the linear whose parts are summed; the next linear's
        weight has the same type. gain, eps: of the norm that reads the result.
        """

    def norm_experts(
        self, x: Residual, norm_weight: torch.Tensor, eps: float, experts: Experts
    ) -> ExpertActivation:
        """Choose the experts of each token by the logits `rms_norm(x.values) @ router.T`, which are computed
        in float32, and return `silu(gate) × up` of the chosen experts, as `norm_gate_up` does for one MLP."""

    def experts_sum(self, x: ExpertActivation, experts: Experts) -> torch.Tensor:
        """Return each token's sum of `weight × down(activation)` over its chosen experts: `[tokens, hidden]`
        in the router's dtype."""

    def experts_add(
        self, x: ExpertActivation, experts: Experts, residual: Residual, next_gain: torch.Tensor | None
    ) -> Residual:
        """Return `residual + experts_sum(x)`. May overwrite `residual.values`. next_gain: as in
        `linear_add`."""

    def plan_attention(self, inputs: AttentionInput) -> Any:
        """Prepare what `attend` needs. Called once per pass; every layer uses the result."""

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
        """Split `qkv [tokens, (heads + 2 kv_heads) × head_dim]`, apply QK-norm and RoPE to the query and key
        heads, write keys and values to the pool, and return the causal paged attention of the pass:
        `[tokens, heads, head_dim]` in qkv's dtype, or `[decodes, heads, head_dim]` if the plan's input has
        `queries`. The softmax is in float32.

        positions, kv_slots: `[tokens]` int64. A KV slot is block × 64 + offset; slots are distinct. Slot -1
        marks padding: no key or value is written, and its row of the result is undefined. The position and KV
        slot of a decode belong to the last of its `lens` tokens. window: a token sees itself and the window -
        1 tokens before it.
        """


def select_backend(device_type: str, dtype: torch.dtype = torch.float32, expansion_blocks: int = 0) -> Ops:
    """Return the operations for tensors of a model's dtype on a torch device type ("cpu" or "cuda").

    expansion_blocks: see `kernels.cuda.CudaOps`; only an FP8 cache uses expansion blocks.

    float32 on a GPU runs in plain torch: it is only used for comparisons, and the Triton kernels support
    16-bit dtypes only.

    Raises ValueError if no backend supports the device. The caller chooses the device: a backend never moves
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
