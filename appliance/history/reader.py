"""Reads the recorded history from `history.db` or an incident file, for the admin API and the console. The
functions block for several milliseconds. They raise `StoreError` if the file cannot be read."""

from __future__ import annotations

import fnmatch
import math
import re
import time
from pathlib import Path

import msgspec

from appliance.history.details import MAX_RECORDED_REQUESTS, decode_details
from appliance.history.pages import (
    MAX_VALUES,
    AlertLogPage,
    AlertLogQuery,
    PastSnapshot,
    SnapshotQuery,
    StoredDetailsRow,
    StoredPage,
    StoredQuery,
    StoredRow,
    TelemetryColumns,
    TelemetryQuery,
)
from appliance.snapshot import Alert, RequestPhase, Snapshot, UnfinishedRequest, with_blocks
from store.alerts import AlertReader, AlertRow
from store.errors import StoreError
from store.requests import LoggedRequest, RequestReader
from store.telemetry import RESOLUTIONS, Resolution
from store.telemetry_reader import RecordedSample, TelemetryReader, TooManyValuesError

SHOWN_ENDED_S = 3600.0
_SHOWN_ALERTS = 200
_LITERAL = str.maketrans({"[": "[[]", "?": "[?]"})
"""Escapes all characters that are special in `fnmatch` patterns, except `*`."""


class NotRecordedError(LookupError):
    """Raised if nothing was recorded at the requested time. The message gives the recorded period."""


class PastReader:
    """Reads the recorded history in one file."""

    def __init__(self, path: Path, *, limit_s: float | None = None) -> None:
        """`limit_s` is the time limit per query, in seconds. Slower queries raise `SlowQueryError`."""
        self._telemetry = TelemetryReader(path, limit_s=limit_s)
        self._requests = RequestReader(path, limit_s=limit_s)
        self._alerts = AlertReader(path)

    def snapshot(self, query: SnapshotQuery) -> PastSnapshot:
        """Return the service state at a given time. Raises NotRecordedError if no sample covers this time."""
        span = self._telemetry.span()
        if span is None:
            raise NotRecordedError(
                "nothing has been recorded yet: the service records a sample every second while it runs"
            )
        at = span[1] if query.at is None else query.at
        recorded = self._telemetry.snapshot(at)
        if recorded is None:
            raise NotRecordedError(
                f"nothing was recorded at {_local(at)}, because the service was not running then, or the "
                f"sample has been removed: choose a time from {_local(span[0])} to {_local(span[1])}"
            )
        sample, fine = recorded.sample, recorded.resolution_s == 1
        try:
            details = decode_details(self._telemetry.details(sample.at)) if fine else None
            snapshot = msgspec.convert(sample.tree(), Snapshot)
        except ValueError as error:  # raised by decode_details, or a ValidationError
            raise StoreError(
                f"the sample at {_local(sample.at)} is in a different format ({error}): read it with the "
                "appliance version that recorded it"
            ) from error
        if not fine:
            snapshot.at = sample.at
            snapshot.started_at = _highest(recorded, "started_at") or snapshot.started_at
        if details is not None:
            snapshot.requests, snapshot.alerts = details.requests, details.alerts
            snapshot.stalls = details.stalls
            with_blocks(snapshot, details.blocks)
        else:
            at = snapshot.at
            rows = self._requests.unfinished(at, MAX_RECORDED_REQUESTS)
            snapshot.requests = [logged_request(row, at) for row in rows]
            alerts = self._alerts.shown(at, SHOWN_ENDED_S, _SHOWN_ALERTS)
            snapshot.alerts = [alert_at(row, at) for row in alerts]
        previous, following = self._telemetry.neighbours(recorded)
        return PastSnapshot(
            at=sample.at,
            resolution_s=recorded.resolution_s,
            previous=previous,
            next=following,
            first=span[0],
            last=span[1],
            details=details is not None,
            snapshot=snapshot,
        )

    def columns(self, query: TelemetryQuery) -> TelemetryColumns:
        """Return measurements over time. Raises TooManyValuesError if the query selects too many values."""
        # Patterns translated by fnmatch match in time proportional to the name's length. If each star were
        # translated to ".*", a few stars would be enough to block the whole process.
        patterns = [fnmatch.translate(one.strip().translate(_LITERAL)) for one in query.metrics.split(",")]
        wanted = re.compile("|".join(patterns))
        found = self._telemetry.columns(
            lambda name: wanted.fullmatch(name) is not None,
            query.since,
            query.until,
            resolution=None if query.resolution_s is None else _resolution(query.resolution_s),
            points=query.points,
            values=MAX_VALUES,
        )
        return TelemetryColumns(
            resolution_s=found.resolution.seconds,
            at=found.at,
            metrics={
                name: [value if math.isfinite(value) else None for value in column]
                for name, column in found.metrics.items()
            },
        )

    def stored(self, query: StoredQuery) -> StoredPage:
        """Return a page of samples as they are stored."""
        resolution = _resolution(query.resolution_s)
        rows = self._telemetry.stored(resolution, query.since, query.until, query.limit)
        layouts = self._telemetry.layouts({row.layout for row in rows})
        fine = bool(rows) and resolution is RESOLUTIONS[0]
        details = self._telemetry.stored_details(query.since, rows[-1].at / 1000) if fine else []
        return StoredPage(
            rows=[StoredRow(**row._asdict()) for row in rows],
            layouts=layouts,
            details=[StoredDetailsRow(**row._asdict()) for row in details],
            next=(rows[-1].at + 1) / 1000 if len(rows) == query.limit else None,
        )

    def alert_log(self, query: AlertLogQuery) -> AlertLogPage:
        """Return the alerts between two times."""
        return AlertLogPage(rows=self._alerts.between(query.since, query.until, query.limit))


def logged_request(row: LoggedRequest, at: float) -> UnfinishedRequest:
    """Return a logged request's state at a given time (in unix seconds). Values missing from the log, such as
    the number of tokens generated by that time, are None."""
    age_s = max(0.0, at - row.created_at)
    queue_s = None if row.queue_ms is None else row.queue_ms / 1000
    ttft_s = None if row.ttft_ms is None else row.ttft_ms / 1000
    waiting = row.state == "ended" and (queue_s is None or age_s < queue_s)
    started = ttft_s is not None and age_s >= ttft_s
    phase: RequestPhase | None = None
    if row.state == "ended":
        phase = "queued" if waiting else "decode" if started else "prefill"
    return UnfinishedRequest(
        request_id=row.request_id,
        state="queued" if waiting else "running",
        model=row.model or "",
        tenant=row.tenant or "",
        key_id=row.key_id or "",
        peer=row.peer or "",
        front="",
        replica="" if waiting else row.replica or "",
        attempt=None,
        age_s=age_s,
        prompt_tokens=row.prompt_tokens,
        max_tokens=None,
        class_name=row.request_class,
        phase=phase,
        stream=row.stream,
        queue_s=age_s if waiting else queue_s,
        ttft_s=ttft_s if started else None,
        cached_tokens=row.cached_tokens if started else None,
        computed_tokens=row.prompt_tokens if started else None,
    )


def alert_at(row: AlertRow, at: float) -> Alert:
    """Return an alert's state at a given time (in unix seconds). Silences are omitted, because logged alerts
    do not contain them."""
    ended = row.ended_at is not None and row.ended_at <= at
    acknowledged = row.acknowledged_at is not None and row.acknowledged_at <= at
    return Alert(
        id=row.id,
        rule=row.rule,
        severity=row.severity,
        state="resolved" if ended else "acknowledged" if acknowledged else "firing",
        where=row.subject,
        description=row.description,
        cause=row.cause,
        remedy=row.remedy,
        since=row.since,
        ended_at=row.ended_at if ended else None,
        value=row.value,
        threshold=row.threshold,
        unit=row.unit,
        suppressed=row.suppressed,
        acknowledged_by=row.acknowledged_by if acknowledged else "",
    )


def _resolution(seconds: int) -> Resolution:
    return next(one for one in RESOLUTIONS if one.seconds == seconds)


def _highest(recorded: RecordedSample, metric: str) -> float | None:
    position = recorded.sample.layout.metrics.get(metric)
    return None if position is None else recorded.high[position]


def _local(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


__all__ = ["NotRecordedError", "PastReader", "TooManyValuesError", "alert_at", "logged_request"]
