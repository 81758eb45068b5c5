"""The operations of a decoder, and the choice of who computes them.

Every operation has a plain-torch twin in `kernels.reference`: the CPU backend and the tests' oracle.
Operations are cut where a fused kernel would be cut: what touches the same bytes is one call.

Words of the shapes: *tokens* of one pass, packed; *heads* and *kv_heads* of this rank; a *page* is one block
and head of the KV pool `[blocks, kv_heads, 64, head_dim]`, whose 64 tokens are one contiguous tile.
"""

from __future__ import annotations

from typing import Protocol

import torch

PAGE_TOKENS = 64
"""Tokens in a block of the KV pool."""


class Ops(Protocol):
    """What a backend offers. Inputs are on its device; `dtype` is the model's; nothing here needs
    gradients."""

    name: str

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A `[out, in]` weight in the layout that `linear` likes best; only `linear` may read the result."""

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        """Rows of `weight [rows, hidden]` for `token_ids [tokens]` int64: `[tokens, hidden]`.

        first: None where `weight` has every token; else the token id of its first row, and ids that are not
        among its rows give zeros (the sum over ranks is then the embedding).
        """

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [tokens, in] @ weight [out, in].T (+ bias [out])`: `[tokens, out]`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension, in float32, rounded once to x's
        dtype."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(rms_norm(residual + x), residual + x)`, both `[tokens, hidden]`. May overwrite both inputs."""

    def rope_cache_write(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
    ) -> torch.Tensor:
        """Splits `qkv [tokens, (heads + 2 kv_heads) × head_dim]`; norms each query and key head (`q_norm`,
        `k_norm` `[head_dim]`, or None); rotates both; writes keys and values into the pool; returns the
        queries `[tokens, heads, head_dim]`.

        positions, slots: `[tokens]` int64; slot = block × 64 + offset, distinct. cos_sin: `[positions,
        head_dim]` float32 of `kernels.rope.cos_sin_table`. keys, values: the pool, `[blocks, kv_heads, 64,
        head_dim]`.
        """

    def paged_attention_decode(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        lens: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention of one new token for each sequence: `[sequences, heads, head_dim]`, as q.

        block_tables: `[sequences, columns]` int64, entries past a sequence's length arbitrary but valid.
        lens: `[sequences]` int64, at least 1: tokens in the cache, the new one included. window: the token
        sees itself and the window - 1 before it. Softmax in float32. What a pool holds must be finite.
        """

    def paged_attention_prefill(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        context: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of one chunk, whose keys and values are in the cache already: as q.

        q: `[tokens, heads, head_dim]`, at positions context, context + 1, …. block_table: `[columns]` int64,
        covering context + tokens.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) × up` of `[tokens, 2 × n]`, gate first: `[tokens, n]` (SwiGLU, Shazeer 2020)."""


def select_backend(device_type: str) -> Ops:
    """The operations for tensors on a torch device type ("cpu" or "cuda").

    Raises ValueError for a device that no backend serves. The caller has chosen the device: a backend never
    moves work to another one.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device_type!r}; backends exist for cpu and cuda")
    from kernels import reference

    return reference
