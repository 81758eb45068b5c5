"""Reads the scales of FP8 matrices from checkpoints that store one scale per block of FP8_BLOCK rows and
columns (`weight_block_size`)."""

from __future__ import annotations

import torch

from engine.config import FP8_BLOCK
from engine.model.layers import WeightShard


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a checkpoint's scales for a matrix `[out, in]`."""
    out, inputs = shape
    return -(-out // FP8_BLOCK), -(-inputs // FP8_BLOCK)


def fill_scales(shard: WeightShard, scales: torch.Tensor) -> None:
    """Copy a shard's block scales from those of the full matrix. If a shard boundary splits a checkpoint
    block, the shards on both sides get that block's scale."""
    assert shard.target is not None and shard.scales is not None and shard.block is not None
    rows, columns = shard.block
    shard.scales.copy_(_scales_at(shard, scales, range(0, shard.target.shape[0], rows), columns))


def dequantised(
    shard: WeightShard, numbers: torch.Tensor, first_row: int, scales: torch.Tensor
) -> torch.Tensor:
    """Return the e4m3 values of a shard, multiplied by their scales, in float32.

    numbers: rows of the shard from row `first_row` onwards, `[rows, columns of the shard]`.
    scales: the scales of the full matrix.
    """
    return numbers.float() * _scales_at(shard, scales, range(first_row, first_row + len(numbers)), 1)


def _scales_at(shard: WeightShard, scales: torch.Tensor, rows: range, column_step: int) -> torch.Tensor:
    """Return the scales for the given rows of a shard, at every `column_step`th column."""
    assert shard.target is not None
    first_row, first_column = (shard.start, 0) if shard.dim == 0 else (0, shard.start)
    row = first_row + torch.arange(rows.start, rows.stop, rows.step, device=scales.device)
    column = first_column + torch.arange(0, shard.target.shape[1], column_step, device=scales.device)
    return scales[row // FP8_BLOCK][:, column // FP8_BLOCK]
