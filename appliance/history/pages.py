"""Parameters and answers of the admin API's routes for the recorded history: the state of the service at a
given time, measurements over time, stored samples and alerts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from appliance.pages import MAX_PAGE_ROWS, Rows, Time
from appliance.snapshot import Snapshot
from store.alerts import AlertRow

MAX_POINTS = 2000
"""Maximum number of points in time in a response of `GET /telemetry`."""
MAX_VALUES = 200_000
"""Maximum number of values in a response of `GET /telemetry`."""
MAX_STORED_ROWS = 200
"""Maximum number of stored samples in a page."""

Seconds = Literal[1, 10, 60]
"""Resolutions in seconds."""


class SnapshotQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /telemetry/snapshot`."""

    at: Time | None = None
    """Time in unix seconds. Default: the newest sample."""


class PastSnapshot(msgspec.Struct, kw_only=True):
    """The state of the service at a time in the recorded history. Times are in unix seconds."""

    at: float
    """Time of the sample, or start of the interval."""
    resolution_s: int
    """1: the values of one second. Otherwise, numbers are means over an interval of this length that begins
    at `at`, and texts are from the end of the interval."""
    previous: float | None
    """Time of the previous sample; null if there is none."""
    next: float | None
    """Time of the next sample; null if there is none."""
    first: float
    """Time of the oldest recorded sample."""
    last: float
    """Time of the newest recorded sample."""
    details: bool
    """Whether the unfinished requests and the alerts were recorded at the time `at`. Otherwise, they are
    derived from the request log and the alert log, and values such as the tokens so far are null."""
    snapshot: Snapshot


class TelemetryQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /telemetry`."""

    metrics: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    """Names of metrics, separated by commas, such as queue.running,gpus[*].power_w. In a
    name, * stands for any characters."""
    since: Time
    """First time, in unix seconds."""
    until: Time
    """Last time, in unix seconds."""
    resolution_s: Seconds | None = None
    """Resolution in seconds. Default: the finest that covers the time span with at most `points` points."""
    points: Annotated[int, msgspec.Meta(ge=1, le=MAX_POINTS)] = 600
    """Maximum number of points in time."""


class TelemetryColumns(msgspec.Struct, kw_only=True):
    """Measurements over time, oldest first."""

    resolution_s: int
    """1: values of single seconds. Otherwise, means over intervals of this many seconds."""
    at: list[float]
    """Times of the samples, or starts of the intervals, in unix seconds."""
    metrics: dict[str, list[float | None]]
    """For each metric, by name, one value per time in `at`. Unknown values are null."""


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
    """The unfinished requests and the alerts in one second, as stored in `history.db`."""

    at: int
    whole: bool
    document: bytes


class StoredPage(msgspec.Struct, kw_only=True):
    """Stored samples, oldest first, in the format of `store.samples`. Bytes are encoded in base64."""

    rows: list[StoredRow]
    layouts: dict[int, bytes]
    """The layouts of the samples in `rows`, keyed by layout id."""
    details: list[StoredDetailsRow]
    """The details recorded at the same seconds as the samples in `rows`. Empty if the resolution is not 1."""
    next: float | None
    """Pass this as `since` to get the next page. Null on the last page."""


class AlertLogQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /alert-log`."""

    since: Time
    until: Time
    limit: Rows = MAX_PAGE_ROWS


class AlertLogPage(msgspec.Struct, kw_only=True):
    """Alerts raised between two times, plus those already active at the start of the interval. Newest
    first."""

    rows: list[AlertRow]
