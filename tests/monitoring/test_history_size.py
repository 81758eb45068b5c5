"""Tests of the size of the recorded telemetry of a large service, and of the time to read it."""

from __future__ import annotations

import sqlite3
import statistics
import time
from contextlib import closing
from pathlib import Path

from appliance.core.recording import sampled_tree
from appliance.history.details import DetailEncoder
from appliance.history.pages import SnapshotQuery
from appliance.history.reader import PastReader
from store.samples import Splitter
from store.schemas import HISTORY
from store.telemetry import DETAILS, RESOLUTIONS, TelemetryLog
from store.writer import Writer
from tests.monitoring.large_service import large_service

START, RECORDED_S, DAY_S = 1_800_000_000, 216, 86_400
LIMIT_MB = 145
LIMIT_OPEN = 20
"""Maximum CPU time for opening a second, as a multiple of the CPU time for recording one. It is about 7,
because up to 30 differences are applied to a complete record."""


def test_a_day_of_a_large_service_fits_the_documented_size_and_a_minute_opens_quickly(
    tmp_path: Path,
) -> None:
    """The size is extrapolated from a short recording. The details are kept for an hour."""
    path = tmp_path / "history.db"
    writer = Writer(path, HISTORY, synchronous="NORMAL")
    writer.start()
    telemetry, splitter, encoder = TelemetryLog(writer), Splitter(), DetailEncoder()
    recorded_s = []
    for snapshot, blocks in large_service(START, RECORDED_S):
        began = time.thread_time()
        sample = splitter.split(snapshot.at, sampled_tree(snapshot))
        assert telemetry.record(sample, encoder.encode(snapshot, blocks))
        recorded_s.append(time.thread_time() - began)
    telemetry.close()
    assert writer.flush(600)
    writer.close()

    day_bytes = 3600 * mean_bytes(path, DETAILS, "document")
    for one in RESOLUTIONS:
        rows = min(DAY_S, one.kept_s or DAY_S) / one.seconds
        day_bytes += rows * mean_bytes(path, one.table, "numbers")
    assert 10 < day_bytes / 1e6 <= LIMIT_MB
    documented = (Path(__file__).resolve().parents[2] / "docs" / "store.md").read_text()
    assert f"at most {LIMIT_MB} MB" in documented

    past, opened_s = PastReader(path), []
    for second in range(5, RECORDED_S, 10):
        began = time.thread_time()
        past.snapshot(SnapshotQuery(at=START + second + 0.5))
        opened_s.append(time.thread_time() - began)
    assert statistics.median(opened_s) <= LIMIT_OPEN * statistics.median(recorded_s)


def mean_bytes(path: Path, table: str, column: str) -> float:
    """Return the mean number of bytes in a column of a table."""
    with closing(sqlite3.connect(path)) as connection:
        [(size,)] = connection.execute(f"SELECT avg(length({column})) FROM {table}")
    return float(size)
