# mypy: allow-untyped-defs
"""The two ends of a decode step on the tables of the running sequences: where each row's token stands, before
the pass; the sampled token as the row's next input, after it. One launch each; both may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import PAGE_TOKENS

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token a row to be computed; all `[rows]` int64. Of padding, nothing is read or written."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    """Block × 64 + offset in the KV pool; -1: padding."""
    lens: torch.Tensor
    """Tokens of the sequence, this one included, which is where the next will stand; 0: padding."""
    slots: torch.Tensor
    """Of the tables; 0 for padding."""

    def first(self, count: int) -> Decodes:
        return Decodes(
            self.token_ids[:count],
            self.positions[:count],
            self.kv_slots[:count],
            self.lens[:count],
            self.slots[:count],
        )


def empty_decodes(rows: int, device: torch.device) -> Decodes:
    token_ids, positions, kv_slots, lens, slots = (
        torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5)
    )
    return Decodes(token_ids, positions, kv_slots, lens, slots)


def place(
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    decodes: Decodes,
) -> None:
    """Fill `decodes` for `slots` [slots] int64 of the tables, -1 for padding.

    last_tokens, lengths: [table rows] int64, what is fed and what is cached; block_table: [table rows,
    columns] int64.
    """
    _place[(triton.cdiv(len(slots), _BLOCK),)](
        slots,
        last_tokens,
        lengths,
        block_table,
        block_table.stride(0),
        decodes.token_ids,
        decodes.positions,
        decodes.kv_slots,
        decodes.lens,
        decodes.slots,
        len(slots),
        PAGE=PAGE_TOKENS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def advance(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """`token_ids` at `positions`, [slots] int64, become the next input of `slots` (-1: padding); a bad token
    (negative) becomes token 0."""
    _advance[(triton.cdiv(len(slots), _BLOCK),)](
        slots, token_ids, positions, last_tokens, lengths, len(slots), BLOCK=_BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize=["stride", "count"])
def _place(
    rows,
    last_tokens,
    lengths,
    block_table,
    stride,
    token_ids,
    positions,
    slots,
    lens,
    table_rows,
    count,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(rows + i, mask=inside, other=-1)
    real = row >= 0
    position = tl.load(lengths + row, mask=real, other=0)
    block = tl.load(block_table + row * stride + position // PAGE, mask=real, other=0)
    tl.store(token_ids + i, tl.load(last_tokens + row, mask=real, other=0), mask=inside)
    tl.store(positions + i, position, mask=inside)
    tl.store(slots + i, tl.where(real, block * PAGE + position % PAGE, -1), mask=inside)
    tl.store(lens + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(table_rows + i, tl.where(real, row, 0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _advance(rows, token_ids, positions, last_tokens, lengths, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(rows + i, mask=inside, other=-1)
    real = row >= 0
    token = tl.load(token_ids + i, mask=inside, other=0)
    tl.store(last_tokens + row, tl.where(token < 0, 0, token), mask=real)
    tl.store(lengths + row, tl.load(positions + i, mask=inside, other=0), mask=real)
