"""Telemetry in `history.db`: the service state at one-second resolution for the last hour, and at coarser
resolutions before that. Each resolution has its own table. Coarse rows contain each metric's mean, minimum
and maximum, so that short incidents remain visible. `TelemetryLog` writes through the writer thread and never
blocks. `store.telemetry_reader` reads the tables. Details of each second, such as the unfinished requests,
are stored as documents in a format known only to the caller.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from store.samples import TelemetryLayout, TelemetrySample, pack, rounded, unpack
from store.writer import Writer

_MAX_FAILING_S = 60.0
"""How long samples wait in memory while the database refuses writes. After that, they are dropped, because
waiting request log rows need the memory."""
_MAX_WAITING_ROWS = 10_000
_COARSE_BITS = 10
"""Number of significant bits kept for metrics that vary within an interval. The error is below 0.05%."""


class Resolution(NamedTuple):
    """The resolution of a telemetry table."""

    table: str
    seconds: int
    kept_s: float | None
    """Age in seconds at which rows are removed; None for the coarsest table, whose age limit is a setting."""
    rows: int
    """Number of arrays packed into each row of the table: 1 (values) or 3 (means, minimums and maximums)."""

    @property
    def milliseconds(self) -> int:
        """A row's time span, in milliseconds."""
        return self.seconds * 1000


RESOLUTIONS = (
    Resolution("telemetry_1s", 1, 3600.0, 1),
    Resolution("telemetry_10s", 10, 86400.0, 3),
    Resolution("telemetry_60s", 60, None, 3),
)
"""The telemetry tables' resolutions, finest first."""
COARSE = RESOLUTIONS[1:]
DETAILS = "telemetry_details"
"""The table of per-second details. Its rows are kept as long as those of the finest resolution."""


class TelemetryLog:
    """Writes samples through `writer`, which must have the schema `store.schemas.HISTORY`. All methods must
    be called from the same thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: dict[str, list[TelemetrySample]] = {resolution.table: [] for resolution in COARSE}
        """The samples collected in the current interval of each coarse table."""

    def record(self, sample: TelemetrySample, details: tuple[bool, bytes] | None = None) -> bool:
        """Record a sample. `details` is a pair: a flag, and the document with this second's details. The flag
        is True for a full frame, which can be read without the preceding documents. Never blocks; returns
        False if the sample was dropped."""
        for resolution in COARSE:
            waiting = self._waiting[resolution.table]
            if waiting and sample.at // resolution.seconds != waiting[0].at // resolution.seconds:
                self._write(resolution)
            self._waiting[resolution.table].append(sample)
        if not self._has_capacity():
            self._writer.count_dropped(1)
            return False
        recorded = self._writer.submit(partial(_insert, RESOLUTIONS[0], [sample]))
        if details is not None:
            recorded = self._writer.submit(partial(_insert_details, sample.at, *details)) and recorded
        return recorded

    def close(self) -> None:
        """Write the intervals that are still incomplete."""
        for resolution in COARSE:
            if self._waiting[resolution.table]:
                self._write(resolution)

    def _write(self, resolution: Resolution) -> None:
        samples, self._waiting[resolution.table] = self._waiting[resolution.table], []
        if self._has_capacity():
            self._writer.submit(partial(_insert, resolution, samples))
        else:
            self._writer.count_dropped(1)

    def _has_capacity(self) -> bool:
        state = self._writer.state()
        failing_s = max(state.failing_s, self._writer.stalled_s)
        return failing_s < _MAX_FAILING_S and state.lag_rows < _MAX_WAITING_ROWS


def combine(samples: Sequence[TelemetrySample]) -> list[array[float]]:
    """Return each metric's mean, minimum and maximum over the samples. The last sample's layout determines
    the metrics and their order. A metric with no known value in any sample is NaN."""
    layout = samples[-1].layout
    columns = zip(*(_aligned(sample, layout) for sample in samples), strict=True)
    means, lows, highs = array("d"), array("d"), array("d")
    for column in columns:
        first = column[0]
        if column.count(first) == len(column):
            mean = low = high = first
        else:
            known = [number for number in column if number == number]
            if known:
                mean, low, high = math.fsum(known) / len(known), min(known), max(known)
            else:
                mean = low = high = math.nan
        means.append(mean)
        lows.append(low)
        highs.append(high)
    return [means, lows, highs]


def pack_interval(means: array[float], lows: array[float], highs: array[float]) -> bytes:
    """Compress an interval's metrics. Metrics that vary are rounded, with an error below 0.05%; constant
    metrics are exact. Minimums and maximums are stored as distances from the means, which compress better."""
    vague = rounded(means, _COARSE_BITS)
    means = array(
        "d",
        [
            exact if low == high else mean
            for exact, low, high, mean in zip(means, lows, highs, vague, strict=True)
        ],
    )
    below = array("d", [mean - low for mean, low in zip(means, lows, strict=True)])
    above = array("d", [high - mean for high, mean in zip(highs, means, strict=True)])
    return pack([means, rounded(below, _COARSE_BITS), rounded(above, _COARSE_BITS)])


def unpack_interval(packed: bytes) -> list[array[float]]:
    """Unpack the means, minimums and maximums packed by `pack_interval`. Raises ValueError if the bytes are
    damaged."""
    means, below, above = unpack(packed, 3)
    lows = array("d", [mean - distance for mean, distance in zip(means, below, strict=True)])
    highs = array("d", [mean + distance for mean, distance in zip(means, above, strict=True)])
    return [means, lows, highs]


def _aligned(sample: TelemetrySample, layout: TelemetryLayout) -> Iterable[float]:
    """Return the sample's numbers in the order given by `layout`."""
    if sample.layout is layout or sample.layout.document == layout.document:
        return sample.numbers
    return _mapped(sample, layout)


def _mapped(sample: TelemetrySample, layout: TelemetryLayout) -> Iterator[float]:
    known, numbers = sample.layout.metrics, sample.numbers
    for metric in layout.metrics:
        position = known.get(metric)
        yield math.nan if position is None else numbers[position]


def _insert(
    resolution: Resolution, samples: Sequence[TelemetrySample], connection: sqlite3.Connection
) -> None:
    last = samples[-1]
    single = resolution.rows == 1
    packed = pack([rounded(last.numbers)]) if single else pack_interval(*combine(samples))
    connection.execute(
        f"INSERT OR REPLACE INTO {resolution.table} (at, layout, samples, numbers) VALUES (?, ?, ?, ?)",
        (_ms(samples[0].at), _layout_id(connection, last.layout), len(samples), packed),
    )


def _insert_details(at: float, whole: bool, document: bytes, connection: sqlite3.Connection) -> None:
    connection.execute(
        f"INSERT OR REPLACE INTO {DETAILS} (at, whole, document) VALUES (?, ?, ?)", (_ms(at), whole, document)
    )


def _layout_id(connection: sqlite3.Connection, layout: TelemetryLayout) -> int:
    digest = hashlib.sha256(layout.document).digest()
    found = connection.execute("SELECT id FROM telemetry_layouts WHERE sha256 = ?", (digest,)).fetchone()
    if found is None:
        found = connection.execute(
            "INSERT INTO telemetry_layouts (sha256, document) VALUES (?, ?) RETURNING id",
            (digest, layout.packed()),
        ).fetchone()
    return int(found[0])


def _ms(at: float) -> int:
    return round(at * 1000)
