"""Tests of the model states shown on screens."""

from __future__ import annotations

import re

import msgspec
import pytest

from console.lines import plain
from tests.console.frames import SIZES, session


def test_the_last_error_of_a_replica_that_is_ready_again_is_not_shown_as_a_current_one() -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.models
    for state, expected in (
        ("ready", "last error, before the latest start: killed"),
        ("loading", "last error: k"),
    ):
        replicas = [msgspec.structs.replace(one, state=state, last_error="killed") for one in first.replicas]
        models = [msgspec.structs.replace(first, replicas=replicas), *others]
        made.context.snapshot = msgspec.structs.replace(snapshot, models=models)
        made.run("screen models")
        [row] = [row for row in made.lines(120, 40) if plain(row).startswith("last error")]
        assert plain(row).startswith(expected) and row[0].role == ("dim" if state == "ready" else "bad")


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
def test_a_model_that_is_not_in_memory_is_not_shown_as_loading(size: tuple[int, int]) -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.models
    detail = "not in memory: the next request loads it"
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


def test_a_replica_without_recent_steps_shows_the_last_step_times_with_their_age() -> None:
    made = session()
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.models
    name = first.replicas[0].name
    [batch] = [one for one in snapshot.batches if one.replica == name]
    batch = msgspec.structs.replace(batch, step_ms=25.0, idle_us=12.0, mixed_step_ms=None, mixed_idle_us=None)
    replicas = [
        msgspec.structs.replace(one, step_ms=0.0, idle_us=0.0, mixed_step_ms=0.0, mixed_idle_us=0.0)
        for one in first.replicas
    ]
    models = [msgspec.structs.replace(first, replicas=replicas), *others]
    made.context.history.batches[name].clear()
    made.context.history.batches[name].append(batch)
    made.run("screen models")
    for age_s, shown in ((3.0, "25.0ms, 12µs idle"), (90.0, "25.0ms, 12µs idle, 1m30s ago")):
        made.context.snapshot = msgspec.structs.replace(snapshot, at=batch.at + age_s, models=models)
        text = " ".join(plain(row) for row in made.view.render(made.context, 70, 40))
        assert f"decode step       {shown} " in text
        assert re.search(r"mixed step +none in the last \d", text)
