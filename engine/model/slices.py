"""Describes row ranges of the tensors in safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.model.checkpoint import TensorEntry

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows `[first_row, first_row + rows)` of a tensor in a file. A scalar counts as one row. A slice always
    contains complete rows, because reading a few KB of each row would be slower.
    """

    name: str
    entry: TensorEntry
    first_row: int
    rows: int
    shared: bool = False
    """Whether other ranks or other replicas also read the slice's rows."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.entry.dtype]

    @property
    def row_bytes(self) -> int:
        # Dividing the tensor's size is faster than multiplying its dimensions, and there can be tens of
        # thousands of tensors.
        shape = self.entry.shape
        return self.entry.nbytes // shape[0] if shape and shape[0] else self.entry.nbytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def offset(self) -> int:
        """Offset of the slice's first byte in the file."""
        return self.entry.offset + self.first_row * self.row_bytes

    def view(self, numbers: torch.Tensor) -> torch.Tensor:
        """View the raw bytes in `numbers` (`[bytes]`) as a tensor of shape `[rows, ...]` in the file's
        dtype."""
        return numbers.view(self.dtype).view(self.rows, *self.entry.shape[1:])


def cut(whole: TensorSlice, block_bytes: int) -> Iterator[TensorSlice]:
    """Split a non-empty slice into blocks of complete rows. Each block has at most `block_bytes` bytes,
    unless a single row is larger."""
    rows = max(1, block_bytes // whole.row_bytes)
    for first in range(0, whole.rows, rows):
        yield replace(whole, first_row=whole.first_row + first, rows=min(rows, whole.rows - first))
