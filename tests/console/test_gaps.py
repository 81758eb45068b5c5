"""Tests that charts show the gaps in which the service or a replica reported nothing."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from appliance.snapshot import Snapshot
from console.history import MAX_POINTS, History
from console.lines import plain
from console.session import ConsoleSession
from tests.console.frames import source

BEFORE, DURING, AFTER = 20, 7, 4
"""Seconds before, during and after a restart of a replica."""


def restarting(snapshot: Snapshot, name: str) -> Snapshot:
    """Return the snapshot of a service whose replica with this name is restarting."""
    models = [
        msgspec.structs.replace(
            model,
            replicas=[
                msgspec.structs.replace(one, state="restarting") if one.name == name else one
                for one in model.replicas
            ],
        )
        for model in snapshot.models
    ]
    batches = [one for one in snapshot.batches if one.replica != name]
    return msgspec.structs.replace(snapshot, models=models, batches=batches)


@pytest.fixture
def restarted() -> tuple[ConsoleSession, str]:
    """Return a session that shows the steps of a replica until it restarts, and the replica's name."""
    fake = source(interval_s=1.0)
    made = ConsoleSession(fake)
    made.run("screen batches")
    name = fake.simulation.replicas[0].name
    for _ in range(BEFORE):
        made.accept(fake.step())
    for _ in range(DURING):
        made.accept(restarting(fake.step(), name))
    return made, name


def chart(made: ConsoleSession, name: str) -> tuple[str, str]:
    """Return the heading of a replica, and the lowest row of its chart."""
    rows = [plain(row) for row in made.lines(120, 40)]
    at = next(number for number, row in enumerate(rows) if f" {name} " in row)
    bottom = next(row for row in rows[at:] if row.startswith("   0% "))
    return rows[at], bottom[6:]


def test_a_replica_that_restarts_keeps_its_chart_with_unknown_columns(
    restarted: tuple[ConsoleSession, str],
) -> None:
    made, name = restarted
    heading, bottom = chart(made, name)
    assert "restarting: no steps reported" in heading
    assert bottom.endswith("┄" * DURING) and "▒" in bottom
    assert len(bottom.strip()) == BEFORE + DURING
    for _ in range(AFTER):
        made.accept(made.source.step())  # type: ignore[attr-defined]
    heading, bottom = chart(made, name)
    assert "seqs · busy" in heading
    assert "┄" * DURING in bottom and not bottom.endswith("┄")


def test_the_chart_of_a_replica_whose_model_was_unloaded_disappears(
    restarted: tuple[ConsoleSession, str],
) -> None:
    made, name = restarted
    snapshot = made.context.snapshot
    assert snapshot is not None
    models = [one for one in snapshot.models if all(replica.name != name for replica in one.replicas)]
    made.accept(msgspec.structs.replace(snapshot, at=snapshot.at + 1, models=models))
    assert not any(f" {name} " in plain(row) for row in made.lines(120, 40)[:12])
    # The history forgets the replica once its last known slice is too old to be shown.
    for second in range(MAX_POINTS):
        made.context.history.add(msgspec.structs.replace(snapshot, at=snapshot.at + 2 + second))
    assert name not in made.context.history.batches


@pytest.mark.parametrize("interval_s", [0.5, 5.0])
def test_time_without_snapshots_is_unknown_and_a_slow_refresh_is_not(interval_s: float) -> None:
    fake = source(interval_s=interval_s)
    made = ConsoleSession(fake)
    for _ in range(12):
        made.accept(fake.step())
    points = made.context.history.points
    assert all(point.generated_tokens_per_s is not None for point in list(points)[1:])
    before, step_s = len(points), max(1.0, interval_s)
    fake.simulation.advance(10 * step_s)
    made.accept(fake.step())
    added = list(points)[before:]
    assert [point.generated_tokens_per_s is None for point in added] == [True] * 10 + [False]
    assert {round(second.at - first.at, 6) for first, second in pairwise(added[:-1])} == {step_s}
    text = [plain(row) for row in made.lines(120, 40)]
    assert any("┄┄" in row for row in text)


def test_a_gap_is_never_longer_than_the_history() -> None:
    fake = source(interval_s=1.0)
    history = History()
    history.add(fake.step())
    history.add(msgspec.structs.replace(fake.step(), at=fake.simulation.now + 30 * 86_400.0))
    assert len(history.points) == MAX_POINTS
    assert [point.generated_tokens_per_s is None for point in history.points] == [True] * (MAX_POINTS - 1) + [
        False
    ]


def test_older_history_has_fewer_columns_and_says_so() -> None:
    fake = source(interval_s=1.0)
    made = ConsoleSession(fake)
    made.accept(fake.step())
    made.run("screen batches")
    assert "one column per second" in plain(made.lines(120, 40)[2])
    made.context.history.resolution_s = 10
    for width in (80, 120):
        assert "one column per 10 s" in plain(made.lines(width, 24)[2])
