"""Exports a slice of the recorded history as an incident file. The history comes from a running service or
from files."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from appliance.history.pages import AlertLogQuery, Seconds, StoredQuery
from appliance.history.sources import ACTIONS, LOG_LINES, PastError, PastSource
from appliance.pages import MAX_PAGE_ROWS, AuditQuery, LogQuery, RequestLogQuery
from store.errors import StoreError
from store.incidents import IncidentWriter

MAX_INCIDENT_BYTES = 256 << 20
MAX_INCIDENT_S = 86_400.0
_EARLIER_S = 30.0
"""Partial frames of recorded details depend on a full frame that is at most this many seconds older."""
_RUNNING_S = 3600.0
"""Requests that arrived up to this many seconds before the exported period are also exported, because they
may have been unfinished when the period began."""
_RESOLUTIONS: tuple[Seconds, ...] = (1, 10, 60)


class Incident(msgspec.Struct, kw_only=True):
    """An incident file's contents."""

    path: str
    since: float
    until: float
    samples: int
    requests: int
    alerts: int
    actions: int
    log_lines: int
    bytes: int
    notes: list[str]
    """Descriptions of data that could not be exported, with reasons."""


def export_incident(past: PastSource, since: float, until: float, path: Path) -> Incident:
    """Write the history between two times (in unix seconds) to `path`, which must not exist. Raises PastError
    if the export fails."""
    if not since < until:
        raise PastError("the slice ends before it begins: swap the two times")
    if until - since > MAX_INCIDENT_S:
        raise PastError(
            f"a slice can be at most {MAX_INCIDENT_S / 3600:g} h long: select a shorter time span"
        )
    try:
        with IncidentWriter(path, MAX_INCIDENT_BYTES) as writer:
            samples = _samples(past, writer, since, until)
            if not samples:
                raise PastError(
                    "nothing was recorded in this time span: choose one in which the service was running"
                )
            requests = _requests(past, writer, since, until)
            rows = past.alert_log(AlertLogQuery(since=since, until=until)).rows
            writer.alerts(rows)
            missing: dict[str, str] = {}
            counts = {ACTIONS: 0, LOG_LINES: 0}
            for part, export, discard in (
                (ACTIONS, _actions, writer.discard_actions),
                (LOG_LINES, _lines, writer.discard_lines),
            ):
                try:
                    counts[part] = export(past, writer, since, until)
                except PastError as error:
                    missing[part] = str(error)
                    discard()
            facts = {"since": since, "until": until, "exported_at": time.time()}
            writer.describe({"source": past.label, **{name: repr(at) for name, at in facts.items()}})
            writer.describe({f"without {part}": reason for part, reason in missing.items()})
            size = writer.size
    except StoreError as error:
        raise PastError(str(error)) from error
    return Incident(
        path=str(path),
        since=since,
        until=until,
        samples=samples,
        requests=requests,
        alerts=len(rows),
        actions=counts[ACTIONS],
        log_lines=counts[LOG_LINES],
        bytes=size,
        notes=[f"without {part}: {reason}" for part, reason in missing.items()],
    )


def _samples(past: PastSource, writer: IncidentWriter, since: float, until: float) -> int:
    count = 0
    for resolution_s in _RESOLUTIONS:
        # Start before the exported period, to include the interval that covers its beginning and the full
        # frame on which its first partial frames depend.
        query = StoredQuery(
            since=since - max(_EARLIER_S, resolution_s), until=until, resolution_s=resolution_s
        )
        while True:
            page = past.stored(query)
            rows = [(row.at, row.layout, row.samples, row.numbers) for row in page.rows]
            writer.samples(resolution_s, rows, page.layouts)
            writer.details((row.at, row.whole, row.document) for row in page.details)
            count += sum(row.at >= since * 1000 for row in page.rows)
            if page.next is None:
                break
            query = msgspec.structs.replace(query, since=page.next)
    return count


def _requests(past: PastSource, writer: IncidentWriter, since: float, until: float) -> int:
    query = RequestLogQuery(since=since - _RUNNING_S, until=until, limit=MAX_PAGE_ROWS)
    count = 0
    while True:
        page = past.request_log(query)
        rows = [row for row in page.rows if row.finished_at is None or row.finished_at >= since]
        writer.requests(rows)
        count += len(rows)
        if page.next is None:
            return count
        query = msgspec.structs.replace(query, before=page.next)


def _actions(past: PastSource, writer: IncidentWriter, since: float, until: float) -> int:
    query = AuditQuery(since=since, until=until, limit=MAX_PAGE_ROWS)
    count = 0
    while True:
        page = past.audit(query)
        writer.actions(
            # An action without a valid time is stored at the beginning of the slice.
            (since if row.began_at is None else row.began_at, row.seq, msgspec.json.encode(row).decode())
            for row in page.rows
        )
        count += len(page.rows)
        if page.next is None:
            return count
        query = msgspec.structs.replace(query, before=page.next)


def _lines(past: PastSource, writer: IncidentWriter, since: float, until: float) -> int:
    seen: set[int] = set()
    while True:
        page = past.log_lines(LogQuery(until=until, limit=MAX_PAGE_ROWS))
        lines = [line for line in page.lines if line.at >= since and line.number not in seen]
        writer.lines((line.at, line.number, msgspec.json.encode(line).decode()) for line in lines)
        seen.update(line.number for line in lines)
        if not lines or len(page.lines) < MAX_PAGE_ROWS:
            return len(seen)
        until = lines[0].at
