# mypy: allow-untyped-defs
"""The first and last kernels of a decode step. Both use the tables on the GPU that hold the state of the
running sequences. `place` computes the position and KV slot of each sequence's token before the forward pass.
`advance` stores each sampled token as the sequence's next input. Both kernels can be captured in a CUDA
graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import PAGE_TOKENS

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Decodes:
    """The inputs of a decode pass, one token per sequence. All tensors are `[decodes]` int64. Padding entries
    are not written to the cache."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    """Each token's KV slot, block × 64 + offset in the KV pool, or -1 for padding."""
    lens: torch.Tensor
    """Each sequence's length, including the new token, or 0 for padding. The length equals the next token's
    position."""
    slots: torch.Tensor
    """Each token's sequence slot in the device tables, or 0 for padding."""

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
    """Fill `decodes` for the sequences in `slots`.

    slots: [decodes] int64; -1 marks padding.
    last_tokens, lengths: [slots] int64, each slot's input token and number of cached tokens.
    block_table: [slots, columns] int64.
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
    """Store sampled tokens and their positions as the next inputs of their sequences. A bad token (negative
    id) is stored as token 0.

    slots, token_ids, positions: [decodes] int64; slot -1 marks padding.
    last_tokens, lengths: [slots] int64, the tables to update.
    """
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
