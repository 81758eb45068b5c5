"""Parameters and responses of the admin API routes for the recorded history: the service state at a given
time, measurements over time, stored samples and alerts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from appliance.pages import MAX_PAGE_ROWS, Rows, Time
from appliance.snapshot import Snapshot
from store.alerts import AlertRow

MAX_POINTS = 2000
"""Maximum number of points in time in a `GET /telemetry` response."""
MAX_VALUES = 200_000
"""Maximum number of values in a `GET /telemetry` response."""
MAX_STORED_ROWS = 200
"""Maximum number of stored samples in a page."""

Seconds = Literal[1, 10, 60]
"""Resolutions in seconds."""


class SnapshotQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /telemetry/snapshot`."""

    at: Time | None = None
    """Time in unix seconds. Default: the newest sample."""


class PastSnapshot(msgspec.Struct, kw_only=True):
    """The service state at a time in the recorded history. All times are in unix seconds."""

    at: float
    """Time of the sample, or start of the interval."""
    resolution_s: int
    """Resolution in seconds. At 1, the values are those of a single second. Otherwise, numbers are means over
    an interval of this length that starts at `at`, and texts are those at the interval's end."""
    previous: float | None
    """Time of the preceding sample, or null."""
    next: float | None
    """Time of the following sample, or null."""
    first: float
    """Time of the oldest recorded sample."""
    last: float
    """Time of the newest recorded sample."""
    details: bool
    """Whether unfinished requests and alerts were recorded at the time `at`. If not, they are derived from
    the request and alert logs, and some values, such as the number of tokens so far, are null."""
    snapshot: Snapshot


class TelemetryQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /telemetry`."""

    metrics: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    """Comma-separated metric names, such as queue.running,gpus[*].power_w. * stands for any characters."""
    since: Time
    """Beginning of the period, in unix seconds."""
    until: Time
    """End of the period, in unix seconds."""
    resolution_s: Seconds | None = None
    """Resolution in seconds. Default: the finest one with at most `points` points in the period."""
    points: Annotated[int, msgspec.Meta(ge=1, le=MAX_POINTS)] = 600
    """Maximum number of points in time."""


class TelemetryColumns(msgspec.Struct, kw_only=True):
    """Measurements over time, oldest first."""

    resolution_s: int
    """Resolution in seconds. At 1, the values are those of single seconds. Otherwise, they are means over
    intervals of this length."""
    at: list[float]
    """Sample times, or interval starts, in unix seconds."""
    metrics: dict[str, list[float | None]]
    """For each metric name, one value per time in `at`. Unknown values are null."""


class StoredQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /telemetry/stored`."""

    since: Time
    until: Time
    resolution_s: Seconds = 1
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_STORED_ROWS)] = MAX_STORED_ROWS


class StoredRow(msgspec.Struct, kw_only=True):
    """A sample as stored in `history.db`."""

    at: int
    """Unix milliseconds."""
    layout: int
    samples: int
    numbers: bytes


class StoredDetailsRow(msgspec.Struct, kw_only=True):
    """One second's unfinished requests and alerts, as stored in `history.db`."""

    at: int
    whole: bool
    document: bytes


class StoredPage(msgspec.Struct, kw_only=True):
    """Stored samples, oldest first, in the format of `store.samples`. Bytes are base64-encoded."""

    rows: list[StoredRow]
    layouts: dict[int, bytes]
    """The layouts of the samples in `rows`, by layout id."""
    details: list[StoredDetailsRow]
    """The details recorded in the same seconds as the samples in `rows`. Empty if the resolution is not 1."""
    next: float | None
    """The value of `since` for the next page; null on the last page."""


class AlertLogQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /alert-log`."""

    since: Time
    until: Time
    limit: Rows = MAX_PAGE_ROWS


class AlertLogPage(msgspec.Struct, kw_only=True):
    """Alerts raised in the period or already active at its start, newest first."""

    rows: list[AlertRow]
