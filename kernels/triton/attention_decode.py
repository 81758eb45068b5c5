"""Implements paged attention for one new token per sequence (decode), with split-KV (Flash-Decoding, Dao et
al. 2023).

A sequence's KV pages are divided into splits. Each program of the grid determines its split from the sequence
lengths on the device. The maximum number of pages per split is chosen so that the whole batch's splits fit
into the grid. FlashInfer (Ye et al. 2025) computes the splits on the host instead. The grid depends only on
the number of sequences, so one CUDA graph supports all lengths. A short sequence is a single split and needs
no combine step; a long one is distributed over many programs. If a sequence has several splits, each split
writes its partial result to the workspace, and the program that finishes last combines the results in cache
order. No second kernel is needed, and the result is deterministic.

The query heads of a KV head are the rows of one tensor-core tile, which has at least 16 rows. FP8 tiles are
converted to float16. On Hopper, one instruction converts two values to float16, whereas a conversion to
bfloat16 takes several instructions.

With a `Rotation`, the input is the result of the qkv GEMM, and the kernel applies QK-norm and RoPE to the
heads that it reads. The program that handles a sequence's last page writes the new key and value to the cache
and computes attention to them from registers. Therefore, no other kernel runs between the qkv GEMM and
attention.
Inputs that do not depend on the GEMM are read before it ends: lengths, slots, angles and, with
`DecodeConfig.early`, each split's first page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import PAGE_TOKENS, Rotation
from kernels.triton.attention_decode_kernel import decode_kernel

_LOG2_E = 1.4426950408889634

_MAX_AT_ONCE = 32
"""Maximum number of splits whose partial results are loaded together. The loop over these splits is unrolled.
With small heads, 128 would be possible, but compiling the kernel would take a minute."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Scratch memory for `decode`. Each stream needs its own workspace, which all of a model's layers can
    share. kv_heads, group (query heads per KV head), head_dim and the maximum number of sequences are fixed
    when the workspace is allocated."""

    partial: torch.Tensor
    """The splits' unnormalised attention results: `[items, kv_heads, group, head_dim]` float32."""
    stats: torch.Tensor
    """The splits' maximum scores and softmax sums: `[items, kv_heads, 2, group]` float32."""
    arrived: torch.Tensor
    """Number of splits that have finished: `[sequences, kv_heads]` int32. Zero between launches."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The decode attention kernel's launch parameters."""

    items: int
    """Number of programs per KV head. This is also the maximum total number of splits. It must be at least
    the number of sequences."""
    stages: int
    """Number of pipeline stages in the loop over pages. Page numbers and tiles are each prefetched
    (stages - 1) / 2 iterations ahead."""
    maxnreg: int | None = 128
    """Maximum number of registers per thread."""
    at_once: int = 4096
    """Number of partial results that the combine step loads at a time."""
    num_warps: int = 4
    min_pages: int = 1
    """Sequences with at most this many pages are not split, because reading the pages in one program is
    faster than combining splits."""
    early: bool = False
    """Whether a program loads its first page before the qkv GEMM ends. Used only with a `Rotation`. The GEMM
    does not change this page, but loading it early occupies registers for longer."""


def config_for(
    sequences: int, kv_heads: int, group: int, head_dim: int, element_size: int, multiprocessors: int
) -> DecodeConfig:
    """Return the launch parameters for this number of sequences. They do not depend on the sequence lengths.

    With a 16-bit cache, a single sequence is fastest with one program per multiprocessor, because a launch
    that overlaps the previous kernel distributes its programs unevenly. Batches of 2 to 16 sequences are
    fastest with two programs per multiprocessor. An FP8 cache needs more programs to hide the conversion,
    unless each program has 8 warps. With enough sequences, a limit of 96 registers per thread lets five
    programs share a multiprocessor.

    A single sequence is limited by attention latency, not by memory bandwidth. Its programs therefore load
    their first page early, and combine more splits at a time, which takes more registers: 168 per thread with
    4 warps. Programs have 8 warps if there are so many query heads per KV head that a split's partial sums
    are large. If, in addition, there are only 3 or 4 KV heads, loading the first page early makes batches of
    a few sequences faster.
    """
    fp8, wide = element_size == 1, group >= 8 and head_dim <= 128
    few = wide and 2 < kv_heads <= 4 and sequences <= (4 if fp8 else 8)
    waves = 4 if sequences > 16 or (fp8 and sequences > 1) else 2 if fp8 or sequences > 1 else 1
    if few:
        waves = min(sequences, 2)
    items = max(sequences, sequences - 1 + waves * multiprocessors // kv_heads)
    stages = 5 if PAGE_TOKENS * head_dim * element_size <= 16384 else 3
    if few and sequences > 1:
        return DecodeConfig(items, stages, maxnreg=168, at_once=8192, early=True)
    if sequences == 1 and head_dim <= 128:
        if wide and (few or not fp8):
            maxnreg = None if fp8 else 128
            return DecodeConfig(items, stages, maxnreg, at_once=16384, num_warps=8, early=True)
        if wide and kv_heads <= 2:
            return DecodeConfig(items, stages, maxnreg=168, at_once=16384, num_warps=8, early=True)
        return DecodeConfig(items, stages, maxnreg=168, at_once=8192, early=True)
    return DecodeConfig(
        items=items, stages=stages, maxnreg=96 if fp8 and sequences > 128 and head_dim <= 128 else 128
    )


def splits_at_once(config: DecodeConfig, group: int, head_dim: int) -> int:
    """Return how many of a sequence's splits the combine step loads together."""
    return min(_MAX_AT_ONCE, max(1, config.at_once // (group * head_dim)))


def config_on(keys: torch.Tensor, sequences: int, group: int) -> DecodeConfig:
    """Return decode attention's launch parameters for a cache `[blocks, kv_heads, 64, head_dim]` on the GPU
    that holds it. group: number of query heads per KV head."""
    _, kv_heads, _, head_dim = keys.shape
    multiprocessors = multiprocessors_of(keys.device)
    return config_for(sequences, kv_heads, group, head_dim, keys.element_size(), multiprocessors)


def max_items(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the maximum `DecodeConfig.items` supported by a workspace."""
    return sequences + 4 * multiprocessors // kv_heads


def allocate_workspace(
    sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """Allocate a workspace for `decode` with up to `sequences` sequences and the given head counts."""
    items = max_items(sequences, kv_heads, multiprocessors_of(device))
    group = triton.next_power_of_2(heads // kv_heads)
    return DecodeWorkspace(
        partial=torch.empty(items, kv_heads, group, head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(items, kv_heads, 2, group, dtype=torch.float32, device=device),
        arrived=torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
    )


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    pdl: bool = True,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Compute attention for one new token per sequence: `[sequences, heads, head_dim]` in q's dtype.

    q: `[sequences, heads, head_dim]`, heads contiguous. With `rotation`, q is the result of the qkv GEMM,
      `[sequences, (heads + 2 kv_heads) × head_dim]`.
    keys, values: `[blocks, kv_heads, 64, head_dim]`, contiguous, in q's dtype, or float8_e4m3fn with
      `k_scales`, `v_scales` `[blocks, kv_heads, 64]` float32.
    block_table: `[slots, columns]` int32 or int64.
    slots: `[sequences]`, each sequence's row in the block table.
    lens: `[sequences]`, number of cached tokens, including the new token. A length of 0 marks padding: its
      result is zeros, and none of its other inputs are read.
    window: each token attends to itself and the window - 1 tokens before it.
    rotation: if given, the call also writes the new keys and values to the cache. Sequences must not share
      the blocks that receive their new tokens. With PDL and a rotation, slots, lens, cos_sin, the block table
      and the cache may be read before the previous kernel has finished. A kernel without PDL, e.g. a
      decoder's embedding, must therefore run between the writes to these tensors and this kernel.
    config: launch parameters; if None, `config_for` chooses them. The last bits of the result depend on
      `config.items`.

    The softmax is computed in float32. No length is read on the host, so the launch can be captured in a CUDA
    graph.
    """
    blocks, kv_heads, _, head_dim = keys.shape
    sequences, heads = q.shape[0], _query_heads(q, kv_heads, head_dim, rotation)
    group = heads // kv_heads
    gp = int(triton.next_power_of_2(group))
    scaled = k_scales is not None
    if out is None:
        out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    if config is None:
        config = config_on(keys, sequences, group)
    items = config.items
    _check_workspace(workspace, sequences, items, (kv_heads, gp, head_dim))
    compute = q.dtype if keys.dtype == q.dtype else torch.float16
    lines = blocks * kv_heads * PAGE_TOKENS
    tile = [PAGE_TOKENS, head_dim]
    decode_kernel[(items * kv_heads,)](
        q,
        TensorDescriptor(keys, [lines, head_dim], [head_dim, 1], tile),
        TensorDescriptor(values, [lines, head_dim], [head_dim, 1], tile),
        k_scales,
        v_scales,
        block_table,
        slots,
        lens,
        out,
        workspace.partial,
        workspace.stats,
        workspace.arrived,
        sequences,
        items,
        block_table.stride(0),
        q.stride(0),
        scale * _LOG2_E,
        keys,
        values,
        None if rotation is None else rotation.cos_sin,
        None if rotation is None else rotation.q_norm,
        None if rotation is None else rotation.k_norm,
        0.0 if rotation is None else rotation.eps,
        KV_HEADS=kv_heads,
        HEADS=group,
        HEAD_DIM=head_dim,
        GROUP=gp,
        TILE_ROWS=max(16, gp),
        SCAN=_scan_width(sequences),
        WINDOW=window or 0,
        SCALED=scaled,
        COMPUTE=_TRITON_DTYPES[compute],
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        SPREAD=max(1, head_dim // (8 * config.num_warps)),
        STAGES=config.stages,
        AT_ONCE=splits_at_once(config, gp, head_dim),
        MIN_PAGES=config.min_pages,
        NEW=rotation is not None,
        NORM=rotation is not None and rotation.q_norm is not None,
        EARLY=config.early and rotation is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.maxnreg,
    )
    return out


def _query_heads(q: torch.Tensor, kv_heads: int, head_dim: int, rotation: Rotation | None) -> int:
    """Return the number of query heads. Raises ValueError if q's shape does not match kv_heads and
    head_dim."""
    if rotation is None:
        return q.shape[1]
    heads = q.shape[1] // head_dim - 2 * kv_heads
    if q.shape[1] % head_dim or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} columns; expected (heads + 2 × {kv_heads}) × {head_dim}, "
            f"where heads is a multiple of {kv_heads}"
        )
    if (rotation.q_norm is None) != (rotation.k_norm is None):
        raise ValueError("only one of q_norm and k_norm is given; give both or neither")
    return heads


def _check_workspace(
    workspace: DecodeWorkspace, sequences: int, items: int, heads: tuple[int, int, int]
) -> None:
    most, *shape = workspace.partial.shape
    if tuple(shape) != heads:
        raise ValueError(
            f"workspace has kv_heads, group and head_dim {tuple(shape)}, but the batch has {heads}; "
            "create a matching workspace with allocate_workspace"
        )
    if sequences > workspace.arrived.shape[0]:
        raise ValueError(
            f"workspace supports {workspace.arrived.shape[0]} sequences, but the batch has {sequences}; "
            "allocate a larger workspace"
        )
    if not sequences <= items <= most:
        raise ValueError(
            f"items is {items}; must be at least {sequences} (number of sequences) "
            f"and at most {most} (the workspace's capacity)"
        )


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _scan_width(sequences: int) -> int:
    """Return the block size of the scan over sequences. Only a few sizes are used, because the kernel is
    compiled separately for each."""
    for width in (1, 16, 128, 1024):
        if sequences <= width:
            return width
    return int(triton.next_power_of_2(sequences))


def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 4 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
