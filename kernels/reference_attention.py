"""Implements the CPU backend's attention (`kernels.reference`) over paged KV pools, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import PAGE_TOKENS, AttentionInput, ChunkSpan

_GATHERED_BYTES = 4 << 20
"""Maximum size, in bytes, of the keys that decode attention copies at a time. The same limit applies to the
values. The keys of a single sequence may exceed the limit. The limit bounds the working memory, keeps the
copy in the CPU cache and avoids large allocations. For each large buffer, the C library requests new pages
from the operating system, which makes attention for 64 sequences take 4 times as long."""

_Pool = tuple[torch.Tensor, torch.Tensor | None]
"""Keys or values `[blocks, kv_heads, 64, head_dim]`, and their scales `[blocks, kv_heads, 64]`, which are
None if the cache is not FP8."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decode_tables: torch.Tensor
    """Block-table rows of the decode sequences, [decodes, columns] int64."""
    lens: torch.Tensor
    queries: torch.Tensor | None
    chunks: list[tuple[ChunkSpan, torch.Tensor]]
    """The prompt chunks, each with the part of its block-table row that it uses."""


def plan_attention(inputs: AttentionInput) -> AttentionPlan:
    chunks = []
    for chunk in inputs.chunks:
        used = -(-chunk.end // PAGE_TOKENS)
        chunks.append((chunk, inputs.block_table[chunk.slot, :used]))
    tables = inputs.block_table[:, : inputs.columns].index_select(0, inputs.slots)
    # Replace block-table entries past the end of a sequence with the sequence's first block. Such entries may
    # point to other sequences' blocks, which may contain NaN. Masking multiplies by 0, and 0 × NaN is NaN.
    own = inputs.lens.unsqueeze(1) > torch.arange(tables.shape[1], device=tables.device) * PAGE_TOKENS
    tables = torch.where(own, tables, tables[:, :1])
    return AttentionPlan(tables, inputs.lens, inputs.queries, chunks)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention for a pass. This is the second half of `Ops.attend`. The pass's keys and values must
    already be in the pool. The result has q's dtype."""
    q = q if plan.queries is None else q.index_select(0, plan.queries)
    parts = []
    decodes = len(plan.lens)
    if decodes:
        part = q if decodes == len(q) else q[:decodes]
        tables = plan.decode_tables
        parts.append(
            paged_attention_decode(part, keys, values, tables, plan.lens, scale, window, k_scales, v_scales)
        )
    for chunk, table in plan.chunks:
        part = q[chunk.first : chunk.first + chunk.count]
        parts.append(
            paged_attention_prefill(
                part, keys, values, table, chunk.context, scale, window, k_scales, v_scales
            )
        )
    padding = len(q) - sum(len(part) for part in parts)
    if padding:
        parts.append(torch.zeros_like(q[:padding]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def paged_attention_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int | None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention for one new token per sequence: `[sequences, heads, head_dim]` in q's dtype.
    block_tables: `[sequences, columns]` int64.
    lens: `[sequences]` int64, the number of cached tokens including the new one, at least 1.
    """
    pools = ((keys, k_scales), (values, v_scales))
    column_bytes = keys[0].numel() * q.element_size()
    groups = _length_groups(lens.tolist(), window, max(1, _GATHERED_BYTES // column_bytes))
    if len(groups) == 1:
        return _attend_group(q, pools, block_tables, lens, scale, window, groups[0])
    out = torch.empty_like(q)
    for group in groups:
        rows = torch.tensor(group.rows, device=q.device)
        part = (q[rows], pools, block_tables[rows], lens[rows])
        out[rows] = _attend_group(*part, scale, window, group)
    return out


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that share one attention computation over the same range of block-table columns."""

    rows: list[int]
    first: int
    """First block-table column that any sequence in the group attends to."""
    last: int
    """End of the column range (exclusive)."""

    @property
    def columns(self) -> int:
        return (self.last - self.first) * len(self.rows)


def _length_groups(lens: list[int], window: int | None, most_columns: int) -> list[_Group]:
    """Group sequences of similar length to limit the padding: attention then copies at most about twice as
    many columns as needed. Only a group with a single sequence may copy more than `most_columns` columns."""
    last = [-(-length // PAGE_TOKENS) for length in lens]
    first = [0 if window is None else max(0, length - window) // PAGE_TOKENS for length in lens]

    def group(rows: list[int]) -> _Group:
        return _Group(rows, min(first[row] for row in rows), max(last[row] for row in rows))

    whole = group(list(range(len(lens))))
    groups = [whole]
    if whole.columns > 2 * (sum(last) - sum(first)):
        by_size: dict[int, list[int]] = {}
        for row, pages in enumerate(last):
            by_size.setdefault((pages - 1).bit_length(), []).append(row)
        groups = [group(rows) for rows in by_size.values()]
    if all(each.columns <= most_columns for each in groups):
        return groups
    parts = []
    for each in groups:
        count = max(1, most_columns // (each.last - each.first))
        parts += [group(each.rows[at : at + count]) for at in range(0, len(each.rows), count)]
    return parts


def _attend_group(
    q: torch.Tensor,
    pools: tuple[_Pool, _Pool],
    block_tables: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    window: int | None,
    group: _Group,
) -> torch.Tensor:
    sequences, heads, head_dim = q.shape
    kv_heads = pools[0][0].shape[1]
    pages = _pages(block_tables[:, group.first : group.last], kv_heads)
    tokens = (group.last - group.first) * PAGE_TOKENS
    shape = (sequences, kv_heads, tokens, head_dim)
    k, v = (_gather(pool, pages, q.dtype).view(shape) for pool in pools)
    position = torch.arange(group.first * PAGE_TOKENS, group.last * PAGE_TOKENS, device=q.device)
    lens = lens.unsqueeze(1)
    visible = position < lens
    if window is not None:
        visible &= position >= lens - window
    # The query heads of a KV head share its keys and mask, so they are passed to torch as query tokens.
    out = F.scaled_dot_product_attention(
        q.view(sequences, kv_heads, heads // kv_heads, head_dim),
        k,
        v,
        attn_mask=visible[:, None, None, :],
        scale=scale,
    )
    return out.reshape(q.shape)


def paged_attention_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention for one prompt chunk, whose keys and values must already be in the cache. The
    result has q's shape and dtype.

    q: `[tokens, heads, head_dim]`, at positions context, context + 1, ….
    block_table: `[columns]` int64, covering context + tokens positions.
    """
    count, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    end = context + count
    first = 0 if window is None else max(0, context + 1 - window) // PAGE_TOKENS
    last = -(-end // PAGE_TOKENS)
    start = first * PAGE_TOKENS
    pages = _pages(block_table[first:last].unsqueeze(0), kv_heads)
    shape = (kv_heads, 1, (last - first) * PAGE_TOKENS, head_dim)
    group = (kv_heads, heads // kv_heads, end - start, head_dim)
    pools = ((keys, k_scales), (values, v_scales))
    k, v = (_gather(pool, pages, q.dtype).view(shape)[:, :, : end - start].expand(group) for pool in pools)
    visible = None
    if start < context or window is not None:
        query = torch.arange(context, end, device=q.device).unsqueeze(1)
        key = torch.arange(start, end, device=q.device)
        visible = key <= query
        if window is not None:
            visible &= key > query - window
    out = F.scaled_dot_product_attention(
        q.view(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3),
        k,
        v,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _pages(block_tables: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the page numbers (block × kv_heads + head) for block tables `[sequences, columns]`, ordered by
    sequence, head and column. Copying pages in this order makes each head's tokens contiguous."""
    head = torch.arange(kv_heads, device=block_tables.device).unsqueeze(1)
    return (block_tables.unsqueeze(1) * kv_heads + head).flatten()


def _gather(pool: _Pool, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy pages to a tensor `[pages, 64, head_dim]` of dtype `dtype`. FP8 pages are multiplied by their
    scales."""
    numbers, scales = pool
    blocks, kv_heads, tokens, head_dim = numbers.shape
    numbers = numbers.view(blocks * kv_heads, tokens * head_dim)
    if scales is None:
        return numbers.index_select(0, pages).to(dtype)
    # FP8 pages are copied as bytes, because torch cannot index FP8 tensors.
    found = numbers.view(torch.uint8).index_select(0, pages).view(numbers.dtype).float()
    found = found.view(len(pages), tokens, head_dim)
    return found.mul_(scales.view(blocks * kv_heads, tokens, 1).index_select(0, pages)).to(dtype)
