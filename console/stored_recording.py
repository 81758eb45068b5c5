"""Reads recorded history from a service's databases, through the admin API or from a file. This module is
imported only when an operator views history, because importing the database readers takes time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from appliance.history.incident_export import export_incident
from appliance.history.pages import AlertLogQuery, PastSnapshot, SnapshotQuery, TelemetryQuery
from appliance.history.sources import FilePast, PastError, PastSource, ServicePast
from appliance.pages import MAX_PAGE_ROWS, AuditQuery, LogQuery, NamedRequest, RequestLogQuery
from console import units
from console.history import HISTORY_METRICS, History
from console.list_rows import audit_row, log_row
from console.recordings import HISTORY_POINTS, NOT_RECORDED, USAGE_NOT_RECORDED, Mark, PastTimeline
from console.source import MAX_ROWS, ListName, Row, SourceError, UnsupportedListError

_MARKS = 500
_PAGES = 4
"""Maximum number of request log pages to search for finished requests."""
_TIMELINE_METRIC = "rates.generated_tokens_per_s"
_TIMELINE_POINTS = 600

Answer = TypeVar("Answer")


class StoredRecording:
    """Recorded history from a running service or a file."""

    def __init__(self, past: PastSource, begin: float | None = None) -> None:
        self.label = past.label
        self.begin = begin
        self._past = past

    async def instant(self, at: float | None) -> PastSnapshot:
        """Return the service's state at the time `at` (unix seconds), or the newest state if `at` is None."""
        return await _in_thread(lambda: self._past.snapshot(SnapshotQuery(at=at)))

    async def extend(self, history: History, until: float, resolution_s: int) -> None:
        """Update the chart points in `history` so that they end at the time `until`. Read only missing
        points."""
        since = history.continued_from(until, resolution_s, HISTORY_POINTS)
        query = TelemetryQuery(
            metrics=HISTORY_METRICS,
            since=since,
            until=until,
            resolution_s=resolution_s,  # type: ignore[arg-type]
            points=HISTORY_POINTS + 20,
        )
        history.add_columns(await _in_thread(lambda: self._past.columns(query)))

    async def timeline(self, since: float, until: float) -> PastTimeline:
        """Return the output token rates and events of a recorded period."""

        def read() -> PastTimeline:
            columns = self._past.columns(
                TelemetryQuery(metrics=_TIMELINE_METRIC, since=since, until=until, points=_TIMELINE_POINTS)
            )
            values = columns.metrics.get(_TIMELINE_METRIC, [None] * len(columns.at))
            alerts = self._past.alert_log(AlertLogQuery(since=since, until=until, limit=_MARKS)).rows
            marks = [
                Mark(row.raised_at, True, f"{row.severity}: {units.about(row.subject, row.description)}")
                for row in alerts
                if row.raised_at >= since and not row.suppressed_by
            ]
            note = ""
            try:
                for action in self._past.audit(AuditQuery(since=since, until=until, limit=_MARKS)).rows:
                    row = audit_row(action)
                    text = f"{row.actor}: {row.subject} {row.target}".rstrip() + f": {row.text}"
                    if row.at is not None:
                        marks.append(Mark(row.at, False, text))
            except PastError as error:
                note = str(error)
            return PastTimeline(since, until, list(zip(columns.at, values, strict=True)), sorted(marks), note)

        return await _in_thread(read)

    async def rows(self, name: ListName, until: float) -> Sequence[Row]:
        """Return the rows of a list as of a given time, newest first."""
        match name:
            case "audit":
                query = AuditQuery(until=until, limit=MAX_ROWS)
                page = await _in_thread(lambda: self._past.audit(query))
                return [audit_row(action) for action in page.rows]
            case "logs":
                lines = (
                    await _in_thread(lambda: self._past.log_lines(LogQuery(until=until, limit=MAX_ROWS)))
                ).lines
                if not lines:
                    raise UnsupportedListError(
                        "no log lines are stored for this time: older lines are in the journal "
                        "(appliance logs)"
                    )
                return [log_row(one) for one in reversed(lines)]
            case "finished":
                return await _in_thread(lambda: self._finished(until))
            case "usage":
                raise UnsupportedListError(USAGE_NOT_RECORDED)
        raise UnsupportedListError(NOT_RECORDED)

    def _finished(self, until: float) -> list[NamedRequest]:
        """Return the requests that had finished by this time, most recent arrivals first. The request log is
        ordered by arrival, so requests that finished later must be skipped."""
        query = RequestLogQuery(until=until, state="ended", limit=MAX_PAGE_ROWS)
        found: list[NamedRequest] = []
        for _ in range(_PAGES):
            page = self._past.request_log(query)
            found += [row for row in page.rows if row.finished_at is not None and row.finished_at <= until]
            if len(found) >= MAX_ROWS or page.next is None:
                break
            query = msgspec.structs.replace(query, before=page.next)
        return found[:MAX_ROWS]

    async def export(self, since: float, until: float, path: Path) -> str:
        """Write a period of the history to an incident file and return a description of the file."""
        done = await _in_thread(lambda: export_incident(self._past, since, until, path))
        notes = "".join(f" ({note})" for note in done.notes)
        return (
            f"wrote {done.path}: {done.samples:,} samples, {done.requests:,} requests, {done.alerts:,} "
            f"alerts, {done.actions:,} actions, {done.log_lines:,} log lines{notes}"
        )

    async def close(self) -> None:
        """Release resources such as temporary files."""
        await asyncio.to_thread(self._past.close)


def service_recording(run_dir: Path, key: str | None) -> StoredRecording:
    """Return a running service's history."""
    return StoredRecording(ServicePast(run_dir, key))


def file_recording(path: Path) -> StoredRecording:
    """Return the recording in `history.db` or an incident file. Raises SourceError if the file cannot be
    read."""
    try:
        past = FilePast(path)
    except PastError as error:
        raise SourceError(str(error)) from error
    since = None if past.facts is None else past.facts.get("since", "missing")
    try:
        return StoredRecording(past, None if since is None else float(since))
    except ValueError as error:
        past.close()
        raise SourceError(
            f"{path} has no valid start time (since: {since}): export it again with appliance history export"
        ) from error


async def _in_thread(read: Callable[[], Answer]) -> Answer:
    try:
        return await asyncio.to_thread(read)
    except PastError as error:
        raise SourceError(str(error)) from error
