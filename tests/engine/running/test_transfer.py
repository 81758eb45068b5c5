"""Tests of pinned memory reservation."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from engine import transfer
from engine.transfer import reservations, reserve_pinned


@pytest.mark.parametrize(
    ("most", "largest"), [(1, 1), (2, 2), (3, 4), (262_144, 262_144), (262_145, 524_288)]
)
def test_pinned_memory_is_reserved_for_every_power_of_two_up_to_the_largest_transfer(
    most: int, largest: int
) -> None:
    sizes = [nbytes for _, nbytes in reservations(most)]
    assert sizes == [1 << bits for bits in range(len(sizes))]
    assert sizes[-1] == largest
    assert all(count >= 6 for count, _ in reservations(most))


class Memory:
    """A stand-in for a pinned buffer. It counts as allocated as long as it is referenced."""


def test_all_buffers_of_a_size_are_allocated_before_any_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a buffer were freed while others are still to be allocated, the next allocation would reuse it."""
    held, together, asked = Counter[int](), Counter[int](), Counter[int]()

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> Memory:
        assert dtype == torch.uint8 and pin_memory
        memory = Memory()
        weakref.finalize(memory, held.subtract, [nbytes])
        held[nbytes] += 1
        asked[nbytes] += 1
        together[nbytes] = max(together[nbytes], held[nbytes])
        return memory

    monkeypatch.setattr(transfer, "torch", SimpleNamespace(empty=empty, uint8=torch.uint8))
    reserve_pinned(300_000)
    assert asked == together == {nbytes: count for count, nbytes in reservations(300_000)}
    assert held.total() == 0
