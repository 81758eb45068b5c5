"""Tests of recorded telemetry: samples can be read back, and old ones are removed."""

from __future__ import annotations

import math
import sqlite3
from array import array
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from store import retention
from store.database import open_readonly
from store.errors import StoreError
from store.samples import Splitter, TelemetryLayout, TelemetrySample, pack, rounded, unpack
from store.telemetry import (
    _MAX_WAITING_ROWS,
    RESOLUTIONS,
    TelemetryLog,
    combine,
    pack_interval,
    unpack_interval,
)
from store.telemetry_reader import MAX_LAYOUTS, TelemetryReader

START = 1_800_000_000.0
"""A multiple of 60, so that intervals begin at this time."""

CHARACTERS = "ab0.[]#= \x00\né漢🙂"
"""Ordinary characters, and those that have a meaning in names of metrics, in JSON or in UTF-8."""
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**50), 2**50),
    st.floats(allow_nan=False),
    st.text(CHARACTERS, max_size=5),
)
ENTRIES = st.fixed_dictionaries(
    {"name": st.text(CHARACTERS, max_size=3), "number": st.integers(0, 9)}, optional={"v": VALUES}
)
TREES = st.dictionaries(
    st.text(CHARACTERS, min_size=1, max_size=4).filter(lambda name: name != "="),
    st.recursive(
        VALUES | st.lists(ENTRIES, max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.text(CHARACTERS, min_size=1, max_size=3).filter(lambda name: name != "="),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    ),
    max_size=5,
)


@pytest.fixture
def telemetry(history):
    return TelemetryLog(history.writer)


@pytest.fixture
def reader(history):
    return TelemetryReader(history.path)


def tree(running: float, state: str = "ready") -> dict[str, Any]:
    return {
        "queue": {"running": running, "oldest_wait_s": running / 2},
        "models": [{"name": "demo", "replicas": [{"name": "demo-1", "state": state}]}],
        "gpus": [{"number": 0, "power_w": 300.0 + running, "throttle": None}],
    }


def record(telemetry: TelemetryLog, first: float, seconds: int, running=lambda second: second) -> None:
    splitter = Splitter()
    for second in range(seconds):
        assert telemetry.record(splitter.split(first + second, tree(running(second))))


@given(st.lists(TREES, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_tree_survives_splitting_and_packing(trees):
    splitter = Splitter()
    for one in trees:
        sample = splitter.split(START, one)
        [numbers] = unpack(pack([sample.numbers]), 1)
        assert TelemetryLayout.unpacked(sample.layout.packed()).tree(numbers) == one
        assert len(sample.layout.metrics) <= len(sample.numbers) == len(numbers)


def test_metrics_have_the_names_of_their_paths():
    sample = Splitter().split(START, tree(3))
    assert list(sample.layout.metrics) == ["queue.running", "queue.oldest_wait_s", "gpus[0].power_w"]
    assert sample.layout.texts["models[demo].replicas[demo-1].state"] == "ready"
    assert sample.value("gpus[0].power_w") == 303.0
    assert sample.value("gpus[1].power_w") is None


def test_a_metric_that_alternates_with_null_keeps_its_layout():
    splitter = Splitter()
    layouts = [splitter.split(START, {"ttft_ms": value}).layout for value in (5.0, None, 7.0, None)]
    assert len({id(layout) for layout in layouts}) == 1
    assert layouts[1].tree([math.nan]) == {"ttft_ms": None}


def test_each_second_is_read_back_exactly(history, telemetry, reader):
    record(telemetry, START, 30)
    history.writer.flush()
    for second in (0, 17, 29):
        recorded = reader.snapshot(START + second + 0.9)
        assert recorded is not None and recorded.resolution_s == 1
        assert recorded.sample.tree() == tree(second)
    assert reader.span() == (START, START + 29)


def test_a_time_at_which_the_service_did_not_run_has_no_snapshot(history, telemetry, reader):
    assert reader.span() is None and reader.snapshot(START) is None
    record(telemetry, START, 5)
    record(telemetry, START + 600, 5)
    history.writer.flush()
    assert reader.snapshot(START - 1) is None
    assert reader.snapshot(START + 300) is None
    assert reader.snapshot(START + 602) is not None


def test_coarse_rows_keep_the_extremes_of_an_incident(history, telemetry, reader):
    record(telemetry, START, 125, lambda second: 500 if second == 33 else 10)
    history.writer.flush()
    minutes = list(reader.samples(START, START + 125, RESOLUTIONS[2]))
    assert [row.sample.at for row in minutes] == [START, START + 60]
    position = minutes[0].sample.layout.metrics["queue.running"]
    assert minutes[0].high[position] == pytest.approx(500, rel=5e-4)
    assert minutes[0].low[position] == pytest.approx(10, rel=5e-3)
    assert minutes[0].sample.numbers[position] == pytest.approx(10 + 490 / 60, rel=5e-4)
    tens = list(reader.samples(START, START + 125, RESOLUTIONS[1]))
    assert [row.high[position] for row in tens] == pytest.approx([10, 10, 10, 500, *[10] * 8], rel=5e-4)
    # Values that do not change are stored exactly.
    assert (tens[0].low[position], tens[0].sample.numbers[position], tens[0].high[position]) == (10, 10, 10)


def test_intervals_that_are_not_complete_are_written_when_the_service_stops(history, telemetry, reader):
    record(telemetry, START, 5)
    telemetry.close()
    history.writer.flush()
    assert len(list(reader.samples(START, START + 60, RESOLUTIONS[2]))) == 1


def running(reader: TelemetryReader, seconds: int, points: int) -> list[float]:
    """Return the times of the values of `queue.running`, in seconds since the start."""
    found = reader.columns(
        lambda name: name == "queue.running", START, START + seconds, points=points, values=1000
    )
    return [at - START for at in found.at]


def test_the_finest_resolution_with_few_enough_points_is_chosen(history, telemetry, reader):
    record(telemetry, START, 137)
    history.writer.flush()
    assert running(reader, 200, 200) == list(range(137))
    assert running(reader, 200, 100) == list(range(0, 130, 10))
    assert running(reader, 200, 10) == [0, 60]


def test_the_minutes_are_used_when_the_seconds_are_removed(history, telemetry, reader):
    record(telemetry, START, 180)
    history.writer.flush()
    remove = partial(
        retention.remove_telemetry, before={"telemetry_1s": START + 150, "telemetry_10s": START + 90}
    )
    while history.writer.call(remove).result(60).more:
        pass
    assert reader.snapshot(START + 30).resolution_s == 60
    assert reader.snapshot(START + 100).resolution_s == 10
    assert reader.snapshot(START + 160).resolution_s == 1
    assert running(reader, 180, 200) == [0, 60]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=False), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_rounding_keeps_the_stated_precision(values):
    numbers = array("d", values)
    for bits, error in ((23, 1e-7), (10, 5e-4)):
        for before, after in zip(numbers, rounded(numbers, bits), strict=True):
            assert after == pytest.approx(
                before, rel=error, abs=0.5 if abs(before) >= 1 << 24 else 1e-40, nan_ok=True
            )


def test_times_bytes_and_counts_are_exact_in_each_second():
    values = array("d", [1_800_000_000.123, float(121 << 30), 12_345_678.0, 16_384.0, math.inf])
    assert rounded(values) == values


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_an_intervals_extremes_enclose_its_values_within_the_precision(rows):
    splitter = Splitter()
    samples = [splitter.split(START, dict(zip("abc", row, strict=True))) for row in rows]
    means, lows, highs = unpack_interval(pack_interval(*combine(samples)))
    for position, column in enumerate(zip(*rows, strict=True)):
        size = max(map(abs, column))
        assert lows[position] == pytest.approx(min(column), abs=2e-3 * size + 1e-37)
        assert highs[position] == pytest.approx(max(column), abs=2e-3 * size + 1e-37)
        assert means[position] == pytest.approx(sum(column) / len(column), abs=1e-3 * size + 1e-37)


def test_combining_samples_of_different_layouts_matches_metrics_by_name():
    splitter = Splitter()
    first = splitter.split(START, {"a": 1.0, "removed": 5.0})
    second = splitter.split(START + 1, {"new": 2.0, "a": 3.0})
    means, lows, highs = combine([first, second])
    assert (list(means), list(lows), list(highs)) == ([2.0, 2.0], [2.0, 1.0], [2.0, 3.0])


def test_layouts_are_removed_with_their_last_row(history, telemetry, reader):
    splitter = Splitter()
    for second in range(250):
        telemetry.record(splitter.split(START + second, tree(second, state=f"loading {second % 50}%")))
    history.writer.flush()
    rows, remove = (
        0,
        partial(
            retention.remove_telemetry, before=dict.fromkeys((one.table for one in RESOLUTIONS), START + 240)
        ),
    )
    while True:
        removed = history.writer.call(remove).result(60)
        assert removed.rows <= retention.BATCH_ROWS
        rows += removed.rows
        if not removed.more:
            break
    assert rows == 240 + 24 + 4
    with closing(open_readonly(history.path)) as connection:
        [(left,)] = connection.execute("SELECT count(*) FROM telemetry_layouts")
    assert left == 10
    assert reader.snapshot(START + 245) is not None


def test_a_reader_keeps_a_limited_number_of_layouts_in_memory(history, telemetry, reader):
    splitter, count = Splitter(), MAX_LAYOUTS + 6
    for second in range(count):
        telemetry.record(splitter.split(START + second, tree(second, state=f"loading {second}%")))
    history.writer.flush()
    samples = reader.samples(START, START + count, RESOLUTIONS[0])
    states = [one.sample.layout.texts["models[demo].replicas[demo-1].state"] for one in samples]
    assert states == [f"loading {second}%" for second in range(count)]
    assert len(reader._layouts) <= MAX_LAYOUTS


def test_a_reader_does_not_confuse_a_new_layout_with_a_removed_one(history, telemetry, reader):
    splitter = Splitter()
    for second, values in enumerate(({"a": 1}, {"a": 1, "b": 2}, {"a": 1})):
        telemetry.record(splitter.split(START + second, values))
    history.writer.flush()
    assert reader.snapshot(START + 1).sample.tree() == {"a": 1, "b": 2}
    history.writer.call(partial(retention.remove_telemetry, before={"telemetry_1s": START + 2})).result(60)
    telemetry.record(splitter.split(START + 3, {"c": 7, "d": 9}))
    history.writer.flush()
    assert reader.snapshot(START + 3).sample.tree() == {"c": 7, "d": 9}


def test_samples_are_dropped_and_counted_while_the_database_has_failed_for_a_minute(
    history, telemetry, monkeypatch
):
    sample = Splitter().split(START, tree(1))
    monkeypatch.setattr(type(history.writer), "stalled_s", property(lambda writer: 61.0))
    before = history.writer.state().dropped_rows
    assert not telemetry.record(sample)
    assert history.writer.state().dropped_rows == before + 1


def test_samples_are_dropped_and_counted_while_too_many_rows_wait(history, telemetry, reader):
    sample = Splitter().split(START, tree(1))
    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        recorded = 0
        while telemetry.record(replace(sample, at=START + min(recorded, 9999) / 1000)):
            recorded += 1
        state = history.writer.state()
        assert state.lag_rows == _MAX_WAITING_ROWS
        assert state.dropped_rows == 1
        other.execute("COMMIT")
    history.writer.flush()
    assert telemetry.record(replace(sample, at=START + 60))
    history.writer.flush()
    rows = list(reader.samples(START, START + 61, RESOLUTIONS[0]))
    assert len(rows) == recorded + 1


def test_columns_have_one_value_per_time_and_stay_within_their_limits(history, telemetry, reader):
    splitter = Splitter()
    for second in range(20):
        metrics = {"a": float(second), "b": None if second < 5 else 1.0} | ({"c": 2} if second > 9 else {})
        telemetry.record(splitter.split(START + second, metrics))
    history.writer.flush()

    def columns(**limits: int):
        wanted = {"points": 100, "values": 1000, **limits}
        return reader.columns(
            lambda name: name != "a", START, START + 19, resolution=RESOLUTIONS[0], **wanted
        )

    found = columns()
    assert found.at == [START + second for second in range(20)]
    assert [math.isnan(value) for value in found.metrics["b"]] == [True] * 5 + [False] * 15
    assert found.metrics["c"][10:] == [2.0] * 10 and all(map(math.isnan, found.metrics["c"][:10]))
    with pytest.raises(ValueError, match="more than 19 points"):
        columns(points=19)
    with pytest.raises(ValueError, match="or 39 values"):
        columns(values=39)


def test_neighbours_are_found_across_resolutions_and_gaps(history, telemetry, reader):
    record(telemetry, START, 120)
    record(telemetry, START + 1000, 5)
    history.writer.flush()
    remove = partial(
        retention.remove_telemetry, before={"telemetry_1s": START + 100, "telemetry_10s": START + 60}
    )
    while history.writer.call(remove).result(60).more:
        pass

    def neighbours(at: float):
        before, after = reader.neighbours(reader.snapshot(START + at))
        return None if before is None else before - START, None if after is None else after - START

    assert neighbours(5) == (None, 60)
    assert neighbours(65) == (0, 70)
    assert neighbours(95) == (80, 100)
    assert neighbours(100) == (90, 101)
    assert neighbours(119) == (118, 1000)
    assert neighbours(1004) == (1003, None)


def test_details_are_read_from_the_newest_whole_document(history, telemetry, reader):
    splitter = Splitter()
    for second in range(8):
        whole = second in (0, 5)
        details = None if second == 3 else (whole, str(second).encode())
        telemetry.record(splitter.split(START + second, tree(second)), details)
    history.writer.flush()
    assert reader.details(START + 2) == [b"0", b"1", b"2"]
    assert reader.details(START + 3) == []
    assert reader.details(START + 7) == [b"5", b"6", b"7"]
    assert history.writer.call(partial(retention.remove_details, before=START + 6)).result(60).rows == 5
    assert reader.details(START + 7) == []


def test_a_damaged_row_is_reported_with_its_file(history, telemetry, reader):
    record(telemetry, START, 1)
    history.writer.flush()
    history.writer.call(
        lambda connection: connection.execute("UPDATE telemetry_1s SET numbers = x'00'")
    ).result(60)
    with pytest.raises(StoreError, match=r"history\.db: a telemetry sample is damaged"):
        reader.snapshot(START)


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("UPDATE telemetry_layouts SET document = x'00'", "a telemetry layout is damaged"),
        ("UPDATE telemetry_layouts SET document = x'789c030000000001'", "Input data was truncated"),
        ("UPDATE telemetry_1s SET layout = 3 - layout", r"has [13] numbers, but its layout has [13]"),
    ],
)
def test_a_damaged_layout_is_reported_with_its_file(history, telemetry, reader, sql, reason):
    splitter = Splitter()
    telemetry.record(splitter.split(START, {"a": 1}))
    telemetry.record(splitter.split(START + 1, {"b": 2, "c": 3, "a": 1}))
    history.writer.flush()
    history.writer.call(lambda connection: connection.execute(sql)).result(60)
    for read in (
        lambda: reader.snapshot(START),
        lambda: reader.columns(lambda name: True, START, START + 1, points=10, values=10),
    ):
        with pytest.raises(StoreError, match=rf"history\.db: .*{reason}.*restore the file from a backup"):
            read()


def test_numbers_that_do_not_fill_the_rows_are_refused():
    with pytest.raises(ValueError, match="does not fit 3 rows of numbers"):
        unpack(pack([array("d", [1.0, 2.0])]), 3)


def test_a_sample_can_be_converted_back_to_its_tree():
    assert TelemetrySample(START, TelemetryLayout(b'{"a":0}'), array("d", [math.nan])).tree() == {"a": None}
