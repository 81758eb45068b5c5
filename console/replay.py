"""A source that shows recorded history. It can move through time and play the recording."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.history.forecasts import QuotaForecast
from appliance.history.pages import PastSnapshot
from appliance.pages import ChainReport
from appliance.snapshot import Snapshot
from console.history import History
from console.recordings import RecordedPast
from console.source import ListName, Row, SourceError

SPEEDS = (1, 2, 5, 10, 30, 60, 300)
_HALF_MS = 0.0005
_GAP_S = 2.5
"""Maximum time between two samples, in seconds. A longer period without samples is a gap."""
PAST_IS_FIXED = "history is read-only: type :live to return to live"
FILE_IS_FIXED = "this console is replaying a file, which cannot be changed: connect to a running service"


class ReplaySource:
    """Delivers a recording's snapshots."""

    kind: Literal["replay"] = "replay"

    def __init__(self, recording: RecordedPast, at: float | None = None, *, interval_s: float = 1.0) -> None:
        """`at` is the time to show first, in unix seconds; by default, `begin` chooses it. While playing,
        snapshots are `interval_s` apart."""
        self.label = recording.label
        self.interval_s = interval_s
        self.reads_blocks = False
        self.speed = SPEEDS[0]
        self.instant: PastSnapshot | None = None
        self.history = History()
        self._recording = recording
        self._start = at
        self._clock = 0.0
        """The time in the recording that playback has reached."""

    async def next(self) -> Snapshot:
        """Return the first snapshot on the first call, and the next one on each later call. Raises
        SourceError at the end of the recording."""
        if self.instant is None:
            return await (self.begin() if self._start is None else self.seek(self._start))
        return await self.play()

    async def seek(self, at: float | None) -> Snapshot:
        """Move to a time, or to the newest sample if `at` is None. Raises SourceError if nothing was recorded
        at that time."""
        instant = await self._recording.instant(at)
        # Recorded times are rounded to milliseconds.
        await self._recording.extend(self.history, instant.at + _HALF_MS, instant.resolution_s)
        self.history.complete(instant.snapshot.batches)
        self.instant, self._clock = instant, max(at or 0.0, instant.at)
        return instant.snapshot

    async def begin(self) -> Snapshot:
        """Move to the recording's `begin` time, or to its first sample if nothing was recorded then. If
        `begin` is None, move to the newest sample."""
        if self._recording.begin is not None:
            with contextlib.suppress(SourceError):
                return await self.seek(self._recording.begin)
        await self.seek(None)
        assert self.instant is not None
        return self.instant.snapshot if self._recording.begin is None else await self.seek(self.instant.first)

    async def step(self, count: int) -> Snapshot:
        """Move to the next sample if `count` is positive, otherwise to the previous one. Raises SourceError
        at either end of the recording."""
        current = self.instant
        if current is None:
            return await self.begin()
        # The service may have recorded more samples since the current sample was read.
        if count > 0 and current.next is None:
            current = await self._recording.instant(current.at + _HALF_MS)
        at = current.next if count > 0 else current.previous
        if at is None:
            raise SourceError("this is the newest sample" if count > 0 else "this is the oldest sample")
        return await self.seek(at + _HALF_MS)

    async def play(self) -> Snapshot:
        """Advance playback by the interval times the playback speed, skipping gaps in the recording."""
        assert self.instant is not None
        following = self.instant.next
        if following is None:
            return await self.step(1)
        clock = self._clock + self.interval_s * self.speed
        if clock < following:
            if clock > self.instant.at + max(_GAP_S, self.instant.resolution_s):
                return await self.seek(following + _HALF_MS)
            self._clock = clock
            return self.instant.snapshot
        try:
            return await self.seek(clock)
        except SourceError:
            return await self.seek(following + _HALF_MS)

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Return the rows of a list as of the displayed time."""
        if self.instant is None:
            raise SourceError("no sample has been read yet")
        return await self._recording.rows(name, self.instant.snapshot.at)

    async def verify(self) -> ChainReport:
        """Raise SourceError, because a recording does not contain the audit chain."""
        raise SourceError("a recording does not contain the audit chain: connect to a running service")

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Raise SourceError, because recorded history cannot be changed."""
        raise SourceError(FILE_IS_FIXED)

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Raise SourceError, because recorded history cannot be changed."""
        raise SourceError(FILE_IS_FIXED)

    def recording(self) -> RecordedPast:
        """Return the recording."""
        return self._recording

    async def close(self) -> None:
        """Release the recording."""
        await self._recording.close()
