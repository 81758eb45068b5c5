"""Implements the operations on NVIDIA GPUs with Triton kernels, or with cuBLAS (through torch) where cuBLAS
is faster.

No operation waits for the device or reads a value from it, so a forward pass can be captured in a CUDA graph.
The kernels use programmatic dependent launch (PDL): each kernel loads its weights while the previous kernel
finishes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels import (
    Activation,
    AttentionInput,
    ChoiceCount,
    ExpertActivation,
    Experts,
    Fp8Activation,
    Fp8Weight,
    KvPool,
    NextNorm,
    Residual,
    Rotation,
    Weight,
)
from kernels.reference import embedding
from kernels.triton import attention_decode, attention_prefill, fused, linear
from kernels.triton import experts as moe
from kernels.triton.attention_decode import DecodeConfig, DecodeWorkspace
from kernels.triton.embedding import embedding_part
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_rows import Workspace
from kernels.triton.linear_table import Table

__all__ = ["CudaOps"]


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """One pass's prefill tiles, shared by all layers with the same attention window. `pages`, `expanded` and
    `direct` are documented in `attention_prefill.Expansion`."""

    pages: torch.Tensor | None
    expanded: torch.Tensor | None
    direct: torch.Tensor | None
    hopper: bool = False
    """Whether `attention_prefill_hopper` computes the tiles whose keys and values are in the model's dtype.
    These are the expanded tiles if the cache is FP8, otherwise the direct tiles."""


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    inputs: AttentionInput
    chunks: dict[int | None, _ChunkPlan]
    """Chunk plans, keyed by attention window. The first layer with a given window creates the plan for that
    window."""


class CudaOps:
    """Implements `kernels.Ops` on an NVIDIA GPU. An instance owns its kernels' workspaces, so each replica
    and each stream needs a separate instance.

    expansion_blocks: maximum number of FP8 cache blocks that one prefill pass converts to the model's dtype
      before attention (`attention_prefill.Expansion`); 0 disables the conversion.
    table: the device's measured GEMM plans, or None to choose all plans by rules.
    pdl: whether the device supports programmatic dependent launch (`kernels.PDL_FROM`). Kernels that use PDL
      do not compile for other devices.
    hopper_multiprocessors: number of multiprocessors of a Hopper GPU (compute capability 9), or 0 for other
      GPUs. Hopper GPUs use separate kernels for long prompts and for weights with one scale per block.
    """

    name = "cuda"

    def __init__(
        self,
        expansion_blocks: int = 0,
        table: Table | None = None,
        *,
        pdl: bool,
        hopper_multiprocessors: int = 0,
    ) -> None:
        self._expansion_blocks = expansion_blocks
        self.pdl = pdl
        self._hopper_multiprocessors = hopper_multiprocessors
        self._table = replace(Table() if table is None else table, hopper=hopper_multiprocessors > 0)
        self._decode_workspaces: dict[tuple[int, int, int], DecodeWorkspace] = {}
        self._scratches: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._product_workspace: Workspace | None = None

    def pack_weight(self, weight: Weight) -> Weight:
        """Return the weight unchanged, because GPU GEMMs need no special layout."""
        return weight

    def embedding(self, token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
        if first is None:
            return embedding(token_ids, weight, first)
        return embedding_part(token_ids, weight, first, pdl=self.pdl)

    # ── GEMMs ────────────────────────────────────────────────────────────────────────────────────

    def linear(
        self, x: Activation, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(x, weight, bias=bias, out=out)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return fused.rms_norm(x, weight, eps, pdl=self.pdl)

    def norm_linear(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._norm_product(x, norm_weight, eps, weight, bias=bias, out=out)

    def norm_gate_up(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        weight: Weight,
        bias: torch.Tensor | None,
    ) -> Activation:
        normed = (x, norm_weight, eps, weight)
        if isinstance(weight, Fp8Weight):
            block, dtype = weight.block, weight.values.dtype
            if self._plan(len(x.values), weight.values, block) is None:
                # torch's FP8 GEMM cannot fuse SwiGLU, so a single kernel computes SwiGLU and quantises the
                # result. torch's GEMM needs square blocks, and the next weight has blocks of the same size.
                product, group = self._norm_product(*normed, bias=bias), 0 if block is None else block[0]
                quantised = fused.silu_mul_fp8(product, values=dtype, group=group, pdl=self.pdl)
                return Fp8Activation(*quantised, product.dtype)
        return self._norm_product(*normed, bias=bias, silu_mul=True)

    def linear_add(
        self,
        x: Activation,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: Residual,
        next_gain: torch.Tensor | None,
    ) -> Residual:
        values = residual.values
        options: dict[str, Any] = {"bias": bias, "residual": values, "out": values}
        plan = None if next_gain is None else self._sharing_plan(len(values), weight)
        if plan is None:
            return Residual(self._product(x, weight, **options))
        deferred_norm = linear.allocate_deferred_norm(plan, values)
        options |= {"next_gain": next_gain, "deferred_norm": deferred_norm, "plan": plan}
        return Residual(self._product(x, weight, **options), deferred_norm)

    def next_norm(self, rows: int, weight: Weight, gain: torch.Tensor, eps: float) -> NextNorm | None:
        if isinstance(weight, Fp8Weight):
            # One-row GEMMs normalise and quantise their input themselves. The all-reduce does not support one
            # scale per group.
            return NextNorm(gain, eps, quantised=True) if rows > 1 and weight.block is None else None
        return NextNorm(gain, eps, quantised=False) if self._sharing_plan(rows, weight) is not None else None

    def _norm_product(
        self, x: Residual, norm_weight: torch.Tensor, eps: float, weight: Weight, **options: Any
    ) -> torch.Tensor:
        if x.normed is not None:
            return self._product(x.normed, weight, **options)
        plan = None if x.deferred_norm is None else self._sharing_plan(len(x.values), weight)
        if x.deferred_norm is None or plan is None:
            return self._product(x.values, weight, norm_weight=norm_weight, eps=eps, **options)
        return self._product(
            x.deferred_norm.values, weight, squares=x.deferred_norm.squares, eps=eps, plan=plan, **options
        )

    def _sharing_plan(self, rows: int, weight: Weight) -> GemmPlan | None:
        """Return a GEMM's plan if it can share a norm with an adjacent GEMM, otherwise None. float16 GEMMs
        never share norms: a shared norm stores x × gain before applying the norm's factor, and this product
        may exceed float16's range.
        """
        if isinstance(weight, Fp8Weight) or weight.dtype == torch.float16:
            return None
        plan = self._plan(rows, weight)
        return plan if plan is not None and plan.tiled else None

    def _plan(self, rows: int, weight: torch.Tensor, block: tuple[int, int] | None = None) -> GemmPlan | None:
        """Return a GEMM's plan, or None if cuBLAS computes the GEMM."""
        outputs, inputs = weight.shape
        return self._table.choose(rows, outputs, inputs, weight.dtype, block)

    def _product(self, x: Activation, weight: Weight, **options: Any) -> torch.Tensor:
        """Call `linear.linear` or `linear.linear_fp8`, depending on the types of weight and x."""
        device = x.values.device if isinstance(x, Fp8Activation) else x.device
        options |= {"workspace": self._workspace(device), "table": self._table, "pdl": self.pdl}
        if not isinstance(weight, Fp8Weight):
            assert isinstance(x, torch.Tensor)
            return linear.linear(x, weight, **options)
        options["block"] = weight.block
        if isinstance(x, Fp8Activation):
            options |= {"x_scale": x.scales, "dtype": x.dtype}
            return linear.linear_fp8(x.values, weight.values, weight.scales, **options)
        return linear.linear_fp8(x, weight.values, weight.scales, **options)

    def _workspace(self, device: torch.device) -> Workspace:
        if self._product_workspace is None:
            self._product_workspace = linear.allocate_workspace(device)
        return self._product_workspace

    # ── experts ──────────────────────────────────────────────────────────────────────────────────

    def norm_experts(
        self,
        x: Residual,
        norm_weight: torch.Tensor,
        eps: float,
        experts: Experts,
        count: ChoiceCount | None = None,
    ) -> ExpertActivation:
        table, workspace = self._table, self._workspace(x.values.device)
        plans = table.choose_experts(len(x.values), moe.shape_of(experts))
        options: dict[str, Any] = {"count": count, "plans": plans, "pdl": self.pdl}
        return moe.activate(x.values, norm_weight, eps, experts, workspace=workspace, **options)

    def experts_sum(
        self, x: ExpertActivation, experts: Experts, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        workspace = self._workspace(x.chosen.device)
        return moe.weighted_sum(x, experts, workspace=workspace, out=out, pdl=self.pdl)

    def experts_add(
        self, x: ExpertActivation, experts: Experts, residual: Residual, next_gain: torch.Tensor | None
    ) -> Residual:
        values, workspace = residual.values, self._workspace(x.chosen.device)
        options: dict[str, Any] = {"residual": values, "out": values, "pdl": self.pdl}
        return Residual(moe.weighted_sum(x, experts, workspace=workspace, **options))

    # ── attention ────────────────────────────────────────────────────────────────────────────────

    def plan_attention(self, inputs: AttentionInput) -> _AttentionPlan:
        tiles = inputs.tiles or {}
        return _AttentionPlan(inputs, {window: _ChunkPlan(None, None, tiles[window]) for window in tiles})

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        rotation: Rotation,
        pool: KvPool,
        heads: int,
        plan: _AttentionPlan,
        scale: float,
        window: int | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._only_decodes(plan.inputs):
            return self._decode(qkv, pool, plan.inputs, heads, scale, window, rotation, out)
        q = fused.rope_cache_write(qkv, positions, kv_slots, rotation, pool, heads, pdl=self.pdl)
        if plan.inputs.queries is not None:
            asking = q.index_select(0, plan.inputs.queries)
            return self._decode(asking, pool, plan.inputs, heads, scale, window, None, out)
        decodes, out = len(plan.inputs.slots), torch.empty_like(q) if out is None else out
        if decodes:
            self._decode(q[:decodes], pool, plan.inputs, heads, scale, window, None, out[:decodes])
        if plan.inputs.chunks or plan.inputs.tiles:
            self._prefill(q, pool, plan, scale, window, out)
        return out

    def _only_decodes(self, inputs: AttentionInput) -> bool:
        return not inputs.chunks and not inputs.tiles and inputs.queries is None

    def _decode(
        self,
        q: torch.Tensor,
        pool: KvPool,
        inputs: AttentionInput,
        heads: int,
        scale: float,
        window: int | None,
        rotation: Rotation | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _, kv_heads, _, head_dim = pool.keys.shape
        most = inputs.block_table.shape[0]
        return attention_decode.decode(
            q,
            pool.keys,
            pool.values,
            inputs.block_table,
            inputs.slots,
            inputs.lens,
            scale,
            self._decode_workspace(most, heads, kv_heads, head_dim, q.device),
            window,
            pool.k_scales,
            pool.v_scales,
            out,
            rotation,
            self.pdl,
            self._decode_config(len(q), pool.keys, heads // kv_heads),
        )

    def _decode_config(self, sequences: int, keys: torch.Tensor, group: int) -> DecodeConfig:
        return attention_decode.config_on(keys, sequences, group)

    def _prefill(
        self,
        q: torch.Tensor,
        pool: KvPool,
        plan: _AttentionPlan,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        inputs, table, scales = plan.inputs, plan.inputs.block_table, (pool.k_scales, pool.v_scales)
        if window not in plan.chunks:
            expand = pool.k_scales is not None
            plan.chunks[window] = self._plan_chunks(q, pool.keys, inputs, window, expand)
        chunks = plan.chunks[window]
        if chunks.expanded is not None:
            assert chunks.pages is not None and pool.k_scales is not None and pool.v_scales is not None
            wide = self._scratch(pool.keys, q.dtype)
            narrow = (pool.keys, pool.values, pool.k_scales, pool.v_scales)
            attention_prefill.expand(*narrow, table, chunks.pages, *wide, self.pdl)
            read = (*wide, None, chunks.expanded)
            if chunks.hopper:
                self._prefill_on_hopper(q, *read, scale, out)
            else:
                attention_prefill.prefill(q, *read, scale, window, out=out, pdl=self.pdl)
        if chunks.direct is not None:
            cached = (pool.keys, pool.values, table, chunks.direct)
            if chunks.hopper and pool.k_scales is None:
                self._prefill_on_hopper(q, *cached, scale, out)
            else:
                attention_prefill.prefill(q, *cached, scale, window, *scales, out=out, pdl=self.pdl)

    def _prefill_on_hopper(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor | None,
        tiles: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        # Imported here because Gluon is not available on every machine that imports this module.
        from kernels.triton import attention_prefill_hopper

        read = (keys, values, table, tiles)
        attention_prefill_hopper.prefill(q, *read, scale, out, self._hopper_multiprocessors, self.pdl)

    def _plan_chunks(
        self, q: torch.Tensor, keys: torch.Tensor, inputs: AttentionInput, window: int | None, expand: bool
    ) -> _ChunkPlan:
        def on_device(rows: np.ndarray) -> torch.Tensor | None:
            return torch.from_numpy(rows).to(q.device, non_blocking=True) if len(rows) else None

        _, heads, head_dim = q.shape
        kv_heads = keys.shape[1]

        def on_hopper(tiles: np.ndarray) -> bool:
            return self._hopper_multiprocessors > 0 and attention_prefill.suits_hopper(
                tiles, heads, kv_heads, head_dim, q.dtype, window
            )

        if not expand or not self._expansion_blocks:
            tiles = attention_prefill.plan_tiles(inputs.chunks, heads, kv_heads, window)
            return _ChunkPlan(None, None, on_device(tiles), on_hopper(tiles) and not expand)
        blocks = self._expansion_blocks
        made = attention_prefill.plan_expansion(inputs.chunks, heads, kv_heads, window, blocks)
        planned = (on_device(made.pages), on_device(made.expanded), on_device(made.direct))
        return _ChunkPlan(*planned, on_hopper(made.expanded))

    def _decode_workspace(
        self, sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeWorkspace:
        key = (heads, kv_heads, head_dim)
        if key not in self._decode_workspaces:
            made = attention_decode.allocate_workspace(sequences, heads, kv_heads, head_dim, device)
            self._decode_workspaces[key] = made
        return self._decode_workspaces[key]

    def _scratch(self, keys: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scratch pool for expanded keys and values, which every layer overwrites."""
        _, kv_heads, _, head_dim = keys.shape
        key = (kv_heads, head_dim, dtype)
        if key not in self._scratches:
            shape = (2, self._expansion_blocks, *keys.shape[1:])
            self._scratches[key] = torch.empty(shape, dtype=dtype, device=keys.device)
        both = self._scratches[key]
        return both[0], both[1]
