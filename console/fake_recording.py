"""The simulated service's history: one snapshot per second for the last 15 minutes, in memory."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from appliance.history.pages import PastSnapshot
from appliance.pages import NamedRequest
from appliance.snapshot import Snapshot
from console import units
from console.fake_rows import FakeRows
from console.history import History
from console.recordings import HISTORY_POINTS, NOT_RECORDED, USAGE_NOT_RECORDED, Mark, PastTimeline
from console.source import ListName, ListRow, Row, SourceError, UnsupportedListError

_EVERY_S = 1.0
_KEPT = 900
"""Maximum number of snapshots to keep, at about 20 kB each."""
_VALID_S = 2.5


class FakeRecording:
    """Stores and delivers the demo's snapshots."""

    label = "demo"
    begin: float | None = None

    def __init__(self, rows: FakeRows) -> None:
        self._rows = rows
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._snapshots: deque[bytes] = deque(maxlen=_KEPT)
        self._history = History()
        self._alerts: dict[str, Mark] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot if at least a second has passed since the previous one."""
        if self._times and snapshot.at < self._times[-1] + _EVERY_S - 0.01:
            return
        self._times.append(snapshot.at)
        self._snapshots.append(zlib.compress(msgspec.msgpack.encode(snapshot), 1))
        self._history.add(snapshot)
        for one in snapshot.alerts:
            if one.state == "firing":
                self._alerts.setdefault(
                    one.id,
                    Mark(snapshot.at, True, f"{one.severity}: {units.about(one.where, one.description)}"),
                )

    async def instant(self, at: float | None) -> PastSnapshot:
        """Return the service's state at the time `at`, or the newest state if `at` is None."""
        times = list(self._times)
        index = len(times) - 1 if at is None else bisect_right(times, at) - 1
        if index < 0 or (at is not None and at > times[index] + _VALID_S):
            raise SourceError("nothing was recorded at this time: the demo keeps the last 15 minutes")
        return PastSnapshot(
            at=times[index],
            resolution_s=1,
            previous=times[index - 1] if index else None,
            next=times[index + 1] if index + 1 < len(times) else None,
            first=times[0],
            last=times[-1],
            details=True,
            snapshot=msgspec.msgpack.decode(zlib.decompress(self._snapshots[index]), type=Snapshot),
        )

    async def extend(self, history: History, until: float, resolution_s: int) -> None:
        """Update the chart points in `history` so that they end at the time `until`."""
        history.points.clear()
        history.points.extend([one for one in self._history.points if one.at <= until][-HISTORY_POINTS:])
        history.batches = {
            replica: deque([one for one in slices if one.at <= until], maxlen=slices.maxlen)
            for replica, slices in self._history.batches.items()
        }
        history.batches = {replica: slices for replica, slices in history.batches.items() if slices}

    async def timeline(self, since: float, until: float) -> PastTimeline:
        """Return the output token rates and events of a recorded period."""
        values = [
            (point.at, point.generated_tokens_per_s)
            for point in self._history.points
            if since <= point.at <= until
        ]
        marks = [
            Mark(row.at, False, f"{row.actor}: {row.subject} {row.target}".rstrip() + f": {row.text}")
            for row in self._rows.audit
            if row.at is not None and since <= row.at <= until
        ]
        marks += [mark for mark in self._alerts.values() if since <= mark.at <= until]
        return PastTimeline(since, until, values, sorted(marks))

    async def rows(self, name: ListName, until: float) -> Sequence[Row]:
        """Return the rows of a list as of a given time, newest first."""
        if name in ("settings", "findings", "models", "tenants", "callers", "silences", "rules"):
            raise UnsupportedListError(NOT_RECORDED)
        if name == "usage":
            raise UnsupportedListError(USAGE_NOT_RECORDED)
        return [row for row in self._rows.of(name) if (_time(row) or 0.0) <= until]

    async def export(self, since: float, until: float, path: Path) -> str:
        """Raise SourceError, because the demo's history cannot be exported."""
        raise SourceError("the demo cannot be exported: connect to a running service")

    async def close(self) -> None:
        """Do nothing."""


def _time(row: Row) -> float | None:
    """Return a row's time. For a request, this is the time at which the request finished."""
    if isinstance(row, ListRow):
        return row.at
    return row.finished_at if isinstance(row, NamedRequest) else None
