"""The operations on an NVIDIA GPU: our Triton kernels, and cuBLAS through torch where it is faster.

Nothing here waits for the device or asks it for a number, so a pass can be captured in a CUDA graph. Kernels
are launched with programmatic dependent launch: each fetches its weights while the one before it drains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import AttentionInput
from kernels.reference import embedding
from kernels.triton import attention_decode, attention_prefill, fused
from kernels.triton.attention_decode import DecodeWorkspace

__all__ = ["CudaOps"]


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    inputs: AttentionInput
    decodes: int
    tiles: dict[int | None, torch.Tensor]
    """The prefill's tiles by window, made by the first layer that has it."""


class CudaOps:
    """See `kernels.Ops`. One for each replica: it owns the workspaces of its kernels."""

    name = "cuda"

    def __init__(self) -> None:
        self._workspaces: dict[tuple[int, int, int], DecodeWorkspace] = {}

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Weights are read as they lie."""
        return weight

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        return embedding(token_ids, weight, first)

    # ── products ─────────────────────────────────────────────────────────────────────────────────

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return fused.rms_norm(x, weight, eps, pdl=True)

    def norm_linear(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.rms_norm(x, norm_weight, eps)
        if out is None or bias is not None:
            result = F.linear(normed, weight, bias)
            return result if out is None else out.copy_(result)
        return torch.mm(normed, weight.t(), out=out)

    def norm_gate_up(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return fused.silu_mul(self.norm_linear(x, norm_weight, eps, weight, bias), pdl=True)

    def linear_add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        if bias is not None:
            residual.add_(bias)
        # cuBLAS adds the product to what lies in its output.
        return torch.addmm(residual, x, weight.t(), out=residual)

    # ── attention ────────────────────────────────────────────────────────────────────────────────

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
        return fused.rope_cache_write(
            qkv, positions, slots, cos_sin, q_norm, k_norm, eps, keys, values, heads, pdl=True
        )

    def plan_attention(self, inputs: AttentionInput) -> _AttentionPlan:
        return _AttentionPlan(inputs, len(inputs.rows), {})

    def attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: _AttentionPlan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        inputs, decodes = plan.inputs, plan.decodes
        out = torch.empty_like(q)
        if decodes:
            attention_decode.decode(
                q[:decodes],
                keys,
                values,
                inputs.block_table,
                inputs.rows,
                inputs.lens,
                scale,
                self._workspace(q, keys.shape[1], inputs.block_table.shape[0]),
                window,
                out=out[:decodes],
            )
        if inputs.chunks:
            if window not in plan.tiles:
                chunks = [attention_prefill.Chunk(c.first, c.count, c.context, c.row) for c in inputs.chunks]
                host = attention_prefill.plan_tiles(chunks, q.shape[1], keys.shape[1], window)
                plan.tiles[window] = torch.from_numpy(host).to(q.device, non_blocking=True)
            tiles = plan.tiles[window]
            attention_prefill.prefill(q, keys, values, inputs.block_table, tiles, scale, window, out=out)
        return out

    def _workspace(self, q: torch.Tensor, kv_heads: int, sequences: int) -> DecodeWorkspace:
        _, heads, head_dim = q.shape
        key = (heads, kv_heads, head_dim)
        if key not in self._workspaces:
            self._workspaces[key] = attention_decode.allocate_workspace(
                sequences, heads, kv_heads, head_dim, q.device
            )
        return self._workspaces[key]
