"""Reads the telemetry in `history.db` from any process: the service state at a given time, time series of
metrics, and all samples in order."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from store.database import reading
from store.errors import StoreError
from store.samples import TelemetryLayout, TelemetrySample, unpack
from store.schemas import HISTORY
from store.telemetry import DETAILS, RESOLUTIONS, Resolution, unpack_interval

_VALID_S = 2.5
"""A one-second sample is valid until the next one, but for at most this many seconds."""
_PAGE_ROWS = 600
"""Maximum number of rows read through one connection. A reader that keeps its connection open prevents the
service from leaving WAL mode when it stops."""

MAX_LAYOUTS = 64
"""Maximum number of layouts that a reader keeps in memory. A decoded layout of a service with a single model
takes about 90 KB, and a month's recording can contain thousands of layouts."""


class RecordedSample(NamedTuple):
    """A recorded sample with each metric's range."""

    sample: TelemetrySample
    """The values for one second, or the averages over an interval that starts at `sample.at`."""
    resolution_s: int
    low: array[float]
    """The minimum of each metric in the interval."""
    high: array[float]


class MetricColumns(NamedTuple):
    """Values of several metrics over time. NaN means that a value is unknown."""

    resolution: Resolution
    at: list[float]
    metrics: dict[str, list[float]]
    """Each metric's values, keyed by metric name. A value is a one-second sample, or the mean of an
    interval."""


class StoredSample(NamedTuple):
    """A row of a telemetry table as stored. `at` is in unix milliseconds."""

    at: int
    layout: int
    samples: int
    numbers: bytes


class StoredDetails(NamedTuple):
    """A row of the details table as stored. `at` is in unix milliseconds."""

    at: int
    whole: bool
    document: bytes


class TooManyValuesError(ValueError):
    """Raised if a query asks for more values than its limit allows. The message gives the remedy."""


class TelemetryReader:
    """Reads the telemetry at `path`. Each call blocks for a few milliseconds and raises `StoreError` if the
    database cannot be read."""

    def __init__(self, path: Path, *, limit_s: float | None = None) -> None:
        """`limit_s` is the time limit per query; slower queries raise `SlowQueryError`."""
        self.path = path
        self._limit_s = limit_s
        self._layouts: dict[int, TelemetryLayout] = {}

    def span(self) -> tuple[float, float] | None:
        """Return the times of the oldest and newest samples, or None if there are none."""
        with self._reading() as connection:
            spans = [_span(connection, resolution) for resolution in RESOLUTIONS]
        known = [end for end in spans if end is not None]
        if not known:
            return None
        return min(first for first, _ in known) / 1000, max(last for _, last in known) / 1000

    def begin(self, resolution: Resolution) -> float | None:
        """Return the time of a resolution's oldest sample, or None if the resolution has no samples."""
        with self._reading() as connection:
            spans = _span(connection, resolution)
        return None if spans is None else spans[0] / 1000

    def snapshot(self, at: float) -> RecordedSample | None:
        """Return the sample that covers the time `at` (unix seconds), from the finest resolution that has
        one. Returns None if the service was not running then or the sample has been removed."""
        with self._reading() as connection:
            for resolution in RESOLUTIONS:
                row = connection.execute(
                    f"SELECT at, layout, numbers FROM {resolution.table} "
                    "WHERE at <= ? AND at > ? ORDER BY at DESC LIMIT 1",
                    (round(at * 1000), round((at - max(_VALID_S, resolution.seconds)) * 1000)),
                ).fetchone()
                if row is not None:
                    return self._recorded(connection, resolution, row)
        return None

    def samples(self, since: float, until: float, resolution: Resolution) -> Iterator[RecordedSample]:
        """Yield all samples of one resolution between two times, oldest first."""
        begin, end = round(since * 1000), round(until * 1000)
        while True:
            with self._reading() as connection:
                page = [
                    (row[0], self._recorded(connection, resolution, row))
                    for row in _rows(connection, resolution, begin, end, _PAGE_ROWS)
                ]
            for at, recorded in page:
                yield recorded
                begin = at + 1
            if len(page) < _PAGE_ROWS:
                return

    def neighbours(self, recorded: RecordedSample) -> tuple[float | None, float | None]:
        """Return the times of the samples before and after a sample. Each neighbour is taken from the finest
        resolution recorded at that time."""
        at = round(recorded.sample.at * 1000)
        behind = at + 1 if recorded.resolution_s == 1 else at + recorded.resolution_s * 1000
        with self._reading() as connection:
            earlier = [
                connection.execute(f"SELECT max(at) FROM {one.table} WHERE at < ?", (at,)).fetchone()[0]
                for one in RESOLUTIONS
            ]
            later = [
                connection.execute(f"SELECT min(at) FROM {one.table} WHERE at >= ?", (behind,)).fetchone()[0]
                for one in RESOLUTIONS
            ]
        before = max((found for found in earlier if found is not None), default=None)
        after = min((found for found in later if found is not None), default=None)
        return None if before is None else before / 1000, None if after is None else after / 1000

    def details(self, at: float) -> list[bytes]:
        """Return the documents that contain the details recorded for one second, whose time is `at` (unix
        seconds): the newest full frame recorded by then, followed by the changes since that frame. Returns an
        empty list if that second's details were not recorded."""
        end = round(at * 1000)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT at, document FROM {DETAILS} WHERE at <= ? AND at >= "
                f"(SELECT max(at) FROM {DETAILS} WHERE whole AND at <= ?) ORDER BY at",
                (end, end),
            ).fetchall()
        return [document for _, document in rows] if rows and rows[-1][0] == end else []

    def columns(
        self,
        wanted: Callable[[str], bool],
        since: float,
        until: float,
        *,
        resolution: Resolution | None = None,
        points: int,
        values: int,
    ) -> MetricColumns:
        """Return the values of the wanted metrics between two times, oldest first. If no resolution is given,
        use the finest resolution that covers the time span with at most `points` points. Raises
        TooManyValuesError if there are more than `points` points, or more than `values` values."""
        begin, end = round(since * 1000), round(until * 1000)
        found = MetricColumns(resolution or RESOLUTIONS[0], [], {})
        chosen: dict[int, dict[str, int]] = {}
        with self._reading() as connection:
            if resolution is None:
                found = found._replace(resolution=RESOLUTIONS[_choose(connection, begin, end, points)])
            for at, layout_id, packed in _rows(connection, found.resolution, begin, end, points + 1):
                layout = self._layout(connection, layout_id)
                if layout_id not in chosen:
                    chosen[layout_id] = {
                        name: place for name, place in layout.metrics.items() if wanted(name)
                    }
                numbers = self._unpack(packed, found.resolution, layout)[0]
                for name, place in chosen[layout_id].items():
                    column = found.metrics.setdefault(name, [])
                    column += [math.nan] * (len(found.at) - len(column))
                    column.append(numbers[place])
                found.at.append(at / 1000)
                count = len(found.at) * max(1, len(found.metrics))
                if len(found.at) > points or count > values:
                    raise TooManyValuesError(
                        f"the time span has more than {points:,} points or {values:,} values: select a "
                        "shorter time span, a coarser resolution or fewer metrics"
                    )
        for column in found.metrics.values():
            column += [math.nan] * (len(found.at) - len(column))
        return found

    def stored(self, resolution: Resolution, since: float, until: float, limit: int) -> list[StoredSample]:
        """Return the first `limit` rows of a resolution between two times, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT at, layout, samples, numbers FROM {resolution.table} "
                "WHERE at >= ? AND at <= ? ORDER BY at LIMIT ?",
                (round(since * 1000), round(until * 1000), limit),
            ).fetchall()
        return [StoredSample(*row) for row in rows]

    def stored_details(self, since: float, until: float) -> list[StoredDetails]:
        """Return the detail rows between two times, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT at, whole, document FROM {DETAILS} WHERE at >= ? AND at <= ? ORDER BY at",
                (round(since * 1000), round(until * 1000)),
            ).fetchall()
        return [StoredDetails(at, bool(whole), document) for at, whole, document in rows]

    def layouts(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the decompressed layout documents, keyed by layout id."""
        with self._reading() as connection:
            return {one: self._layout(connection, one).document for one in ids}

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return reading(self.path, HISTORY, self._limit_s)

    def _recorded(
        self, connection: sqlite3.Connection, resolution: Resolution, row: tuple[int, int, bytes]
    ) -> RecordedSample:
        at, layout_id, packed = row
        layout = self._layout(connection, layout_id)
        rows = self._unpack(packed, resolution, layout)
        sample = TelemetrySample(at / 1000, layout, rows[0])
        return RecordedSample(sample, resolution.seconds, rows[-2 % len(rows)], rows[-1])

    def _unpack(self, packed: bytes, resolution: Resolution, layout: TelemetryLayout) -> list[array[float]]:
        with self._damage_reported():
            rows = unpack(packed, 1) if resolution.rows == 1 else unpack_interval(packed)
            if len(rows[0]) != layout.length:
                raise ValueError(
                    f"a telemetry sample has {len(rows[0])} numbers, but its layout has {layout.length}"
                )
        return rows

    @contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise StoreError(f"{self.path}: {error}", "restore the file from a backup") from error

    def _layout(self, connection: sqlite3.Connection, layout_id: int) -> TelemetryLayout:
        known = self._layouts.get(layout_id)
        if known is None:
            row = connection.execute(
                "SELECT document FROM telemetry_layouts WHERE id = ?", (layout_id,)
            ).fetchone()
            if row is None:
                raise StoreError(
                    f"{self.path} has no telemetry layout {layout_id}", "restore the file from a backup"
                )
            with self._damage_reported():
                known = TelemetryLayout.unpacked(row[0])
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout_id] = known
        return known


def _span(connection: sqlite3.Connection, resolution: Resolution) -> tuple[int, int] | None:
    # Use two queries: SQLite answers each from one end of the index, whereas one query for both the minimum
    # and the maximum would read all rows.
    table = resolution.table
    first = connection.execute(f"SELECT min(at) FROM {table}").fetchone()[0]
    last = connection.execute(f"SELECT max(at) FROM {table}").fetchone()[0]
    return None if first is None else (first, last)


def _choose(connection: sqlite3.Connection, begin: int, end: int, limit: int) -> int:
    """Return the index of the finest resolution that covers the time span with at most `limit` points."""
    spans = [_span(connection, resolution) for resolution in RESOLUTIONS]
    oldest = min((found[0] for found in spans if found is not None), default=begin)
    start = max(begin, oldest)
    for number, resolution in enumerate(RESOLUTIONS):
        found = spans[number]
        few = (end - start) / resolution.milliseconds <= limit
        if few and found is not None and found[0] <= start + RESOLUTIONS[-1].milliseconds:
            return number
    return len(RESOLUTIONS) - 1


def _rows(
    connection: sqlite3.Connection, resolution: Resolution, begin: int, end: int, limit: int = -1
) -> Iterator[tuple[int, int, bytes]]:
    return connection.execute(
        f"SELECT at, layout, numbers FROM {resolution.table} WHERE at >= ? AND at <= ? ORDER BY at LIMIT ?",
        (begin, end, limit),
    )
