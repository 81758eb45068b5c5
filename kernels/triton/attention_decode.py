"""Paged attention of one new token for each sequence, split over the cache (Flash-Decoding, Dao et al. 2023).

Every program finds its item of work for itself, from the lengths on the device: sequences are cut into pieces
of at most so many pages that all pieces of the batch fit the grid (as FlashInfer plans on the host, Ye et al.
2025). The grid depends on the number of sequences alone, so a CUDA graph replays it at any lengths, a short
sequence is one piece, and a long one among them is spread over as many programs as it needs. A sequence that
is one piece is finished there; of one that is cut, each piece leaves its sums in the workspace, and the last
to arrive adds them up, in the order of the cache: one kernel, and the same bits every time.

The query heads of a KV head are the rows of one tensor-core tile (16 or more). FP8 tiles are converted to
float16: on Hopper one instruction for two values, where bfloat16 takes several.

With a `Rotation`, what comes in is the product of q, k and v: the kernel norms and rotates what it reads of
it, and whoever has a sequence's last page writes the new key and value there and adds them to the sums out of
registers. So no launch stands between that product and attention, and what does not come from it (lengths,
rows, angles) is read before it has ended.
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
"""Most pieces whose sums are read together. The loop over them is unrolled: of 128, as small heads would have
room for, a kernel takes a minute to compile."""


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What `decode` keeps between its programs. One for each stream; every layer of a model uses the same.

    Made for one number of KV heads, group and head_dim, and for at most `sequences` sequences.
    """

    partial: torch.Tensor
    """`[items, kv_heads, group, head_dim]` float32: sums of pieces."""
    stats: torch.Tensor
    """`[items, kv_heads, 2, group]` float32: their largest scores and sums of weights."""
    arrived: torch.Tensor
    """`[sequences, kv_heads]` int32: pieces that are there. Zero between launches."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a launch uses the GPU."""

    items: int
    """Programs for each KV head: the most pieces that the sequences are cut into; at least one for each."""
    stages: int
    """Of the pipeline over pages: page numbers and tiles are (stages - 1) / 2 iterations ahead each."""
    maxnreg: int | None = 128
    """Most registers of a thread."""
    at_once: int = 4096
    """Sums that are read together where pieces are added up."""
    num_warps: int = 4
    least_pages: int = 1
    """A sequence of no more is not cut: reading them one after another is cheaper than adding up sums."""


def config_for(
    sequences: int, kv_heads: int, head_dim: int, element_size: int, multiprocessors: int
) -> DecodeConfig:
    """For a batch of that many sequences, at whatever lengths.

    A single sequence of a 2-byte cache is best as one program a multiprocessor, since a launch that overlaps
    the one in front of it is not spread evenly; a few as two. FP8 wants more of them, to hide the conversion:
    where there is work for five at once, 96 registers let them in.
    """
    fp8 = element_size == 1
    waves = 4 if sequences > 16 or (fp8 and sequences > 1) else 2 if fp8 or sequences > 1 else 1
    items = max(sequences, sequences - 1 + waves * multiprocessors // kv_heads)
    stages = 5 if PAGE_TOKENS * head_dim * element_size <= 16384 else 3
    return DecodeConfig(
        items=items, stages=stages, maxnreg=96 if fp8 and sequences > 128 and head_dim <= 128 else 128
    )


def pieces_at_once(config: DecodeConfig, group: int, head_dim: int) -> int:
    """How many pieces of a sequence are read together where they are added up."""
    return min(_MAX_AT_ONCE, max(1, config.at_once // (group * head_dim)))


def config_on(keys: torch.Tensor, sequences: int) -> DecodeConfig:
    """`config_for` a cache, `[blocks, kv_heads, 64, head_dim]`, on its device."""
    _, kv_heads, _, head_dim = keys.shape
    return config_for(sequences, kv_heads, head_dim, keys.element_size(), multiprocessors_of(keys.device))


def max_items(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Of `DecodeConfig.items`, that a workspace has room for."""
    return sequences + 4 * multiprocessors // kv_heads


def allocate_workspace(
    sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """For `decode` of up to `sequences` sequences with these heads."""
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
    """Attention of one new token for each sequence over its pages: `[sequences, heads, head_dim]`, as q.

    q: `[sequences, heads, head_dim]`, heads contiguous. With a `rotation`, the product of queries, keys and
    values, `[sequences, (heads + 2 kv_heads) × head_dim]`: the new keys and values are not in the cache yet
    and are written there; the cache must not be shared between sequences where their new tokens stand. Then
    slots, lens and cos_sin are read before the kernel in front has ended, so with PDL a kernel without it must
    stand between what wrote them and this one, as the embedding does in a decoder's pass.
    keys, values: `[blocks, kv_heads, 64, head_dim]`,
    contiguous, in q's dtype, or float8_e4m3fn with `k_scales`, `v_scales` `[blocks, kv_heads, 64]` float32.
    block_table: `[max_rows, columns]` int32 or int64. slots: `[sequences]`, the block table's row of each.
    lens: `[sequences]`, tokens in the cache, the new one included; 0: padding, whose result is zeros and of
    which nothing else is read. window: the token sees itself and the window - 1 before it.
    config: None: `config_for`. The result's last bits depend on its `items`.
    The softmax is in float32. Takes no lengths on the host, so a CUDA graph may hold it.
    """
    blocks, kv_heads, _, head_dim = keys.shape
    sequences, heads = q.shape[0], _query_heads(q, kv_heads, head_dim, rotation)
    group = heads // kv_heads
    gp = int(triton.next_power_of_2(group))
    scaled = k_scales is not None
    if out is None:
        out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    if config is None:
        config = config_on(keys, sequences)
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
        AT_ONCE=pieces_at_once(config, gp, head_dim),
        LEAST=config.least_pages,
        NEW=rotation is not None,
        NORM=rotation is not None and rotation.q_norm is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.maxnreg,
    )
    return out


def _query_heads(q: torch.Tensor, kv_heads: int, head_dim: int, rotation: Rotation | None) -> int:
    """Raises ValueError for a product that these heads do not make."""
    if rotation is None:
        return q.shape[1]
    heads = q.shape[1] // head_dim - 2 * kv_heads
    if q.shape[1] % head_dim or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} columns, which are not (heads + 2 × {kv_heads}) × {head_dim} with heads a "
            f"multiple of {kv_heads}"
        )
    if (rotation.q_norm is None) != (rotation.k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    return heads


def _check_workspace(
    workspace: DecodeWorkspace, sequences: int, items: int, heads: tuple[int, int, int]
) -> None:
    most, *shape = workspace.partial.shape
    if tuple(shape) != heads:
        raise ValueError(
            f"workspace is for kv_heads, group and head_dim {tuple(shape)}, the batch has {heads}; "
            "make one with allocate_workspace"
        )
    if sequences > workspace.arrived.shape[0]:
        raise ValueError(
            f"workspace is for {workspace.arrived.shape[0]} sequences, the batch has {sequences}; "
            "make a larger one"
        )
    if not sequences <= items <= most:
        raise ValueError(
            f"items is {items}, not between the {sequences} sequences and the workspace's {most}"
        )


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _scan_width(sequences: int) -> int:
    """Few widths, since each is a kernel to compile."""
    for width in (1, 16, 128, 1024):
        if sequences <= width:
            return width
    return int(triton.next_power_of_2(sequences))


def multiprocessors_of(device: torch.device) -> int:
    """4 where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
