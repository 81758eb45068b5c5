"""Reads tensors that are split among the ranks by column: each rank reads some of the rows, then the ranks
exchange columns.

A rank's columns are spread over all rows in the file. Reading only those columns would take a system call for
every few KB, and reading all rows on each rank would multiply the page-cache and PCIe traffic by the number
of ranks. Each rank therefore reads an equal share of the rows, then receives its columns of the other rows in
an all-to-all exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.model.checkpoint import TensorEntry
from engine.model.slices import TensorSlice
from engine.parallel import all_to_all

_AT_ONCE_BYTES = 16 << 20
"""If a rank's columns of a tensor exceed this size in bytes, they are copied to the parameter in several
steps."""


class Columns(NamedTuple):
    """One rank's columns in consecutive rows of a tensor."""

    first_row: int
    numbers: torch.Tensor
    """Values in the file's dtype: `[rows, columns of the rank]`."""


class ColumnExchange:
    """Exchanges columns between the ranks, for one tensor at a time. All ranks must add the same tensors in
    the same order."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._sending: torch.Tensor | None = None
        self._rows_read = 0

    def can_split(self, entry: TensorEntry) -> bool:
        """Return whether the tensor's rows and columns divide evenly among the ranks."""
        rows, columns = entry.shape
        return self._ranks > 1 and rows % self._ranks == 0 and columns % self._ranks == 0

    def part(self, name: str, entry: TensorEntry) -> TensorSlice:
        """Return the range of a tensor's rows that this rank reads."""
        rows = entry.shape[0] // self._ranks
        return TensorSlice(name, entry, self._rank * rows, rows)

    def add(self, part: TensorSlice, numbers: torch.Tensor) -> Iterator[Columns]:
        """Add the next rows that this rank has read: `[rows, all columns]`. After the tensor's last rows,
        exchange columns with the other ranks and yield this rank's columns of all rows."""
        rows, width = part.entry.shape[0] // self._ranks, part.entry.shape[1] // self._ranks
        if self._sending is None:
            self._sending, self._rows_read = numbers.new_empty((self._ranks, rows, width)), 0
        begin = part.first_row - self._rank * rows
        by_rank = numbers.view(part.rows, self._ranks, width).movedim(1, 0)
        self._sending[:, begin : begin + part.rows] = by_rank
        self._rows_read += part.rows
        if self._rows_read == rows:
            sending, self._sending = self._sending, None
            # The rows received from different ranks are consecutive in memory, so a single copy can fill a
            # small tensor.
            at_once = max(rows, _AT_ONCE_BYTES // (width * numbers.itemsize))
            for index, received in enumerate(all_to_all(sending).flatten(0, 1).split(at_once)):
                yield Columns(index * at_once, received)
