"""Tests of the states of models on the screens."""

from __future__ import annotations

import msgspec
import pytest

from console.lines import plain
from tests.console.frames import SIZES, session


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_a_model_that_is_not_in_memory_is_not_shown_as_loading(size: tuple[int, int]) -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.models
    detail = "not in memory: its next request loads it"
    parked = msgspec.structs.replace(first, state="available", detail=detail, replicas=[])
    made.accept(msgspec.structs.replace(snapshot, models=[parked, *others]))
    made.run("screen models")
    rows = [plain(row) for row in made.lines(*size)]
    [row] = [row for row in rows if first.name in row and "on demand" in row and "─" not in row]
    assert "0/0" in row
    if size[0] > 60:
        assert any(f"{first.name}: loads on demand" in row for row in rows)
        assert detail in rows
    made.run("screen overview")
    if size[1] >= 40:
        assert any(f"{first.name} " in row and " on demand " in row for row in map(plain, made.lines(*size)))
