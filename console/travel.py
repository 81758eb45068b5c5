"""Viewing history: shows past states on the same screens as the live state, steps through history or plays
it, compares two times, and exports slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from appliance.quantities import past_time
from console import units
from console.context import Compared
from console.keys import key_of
from console.past_dialogs import Slice, SliceDialog, TimeDialog
from console.recordings import PastTimeline, RecordedPast
from console.replay import SPEEDS, ReplaySource
from console.source import ListName, SourceError
from console.timeline import WINDOW_POINTS, PastState

if TYPE_CHECKING:
    from console.app import ConsoleApp

_NO_LIVE = "this console is replaying a file: there is no live service to return to"
_AROUND_S = 300.0
_MIN_SPAN_S = 60.0
_EDGE = 0.05
"""Size of the scroll zone at each end of the timeline, as a fraction of its length. When the displayed time
enters a zone, the timeline scrolls."""


class TimeTravel:
    """Shows past states of the service in a console."""

    def __init__(self, app: ConsoleApp) -> None:
        self._app = app
        self._source: ReplaySource | None = app.source if isinstance(app.source, ReplaySource) else None
        self._timeline: PastTimeline | None = None
        self._window: tuple[int, float] = (0, 0.0)
        """The timeline's resolution, and the time of the newest sample when the timeline was read."""
        self._playing = False

    @property
    def source(self) -> ReplaySource:
        """The console's source of recorded history."""
        if self._source is None:
            self._source = ReplaySource(self._app.source.recording())
        return self._source

    def recording(self) -> RecordedPast:
        """Return the console's recorded history."""
        return self.source.recording()

    def run(self, command: str) -> bool:
        """Run a command from the key table. Return False if it is unrelated to history."""
        word, _, rest = command.partition(" ")
        past = self._app.session.past
        if word in ("mark", "pause"):
            if past is None:
                return False
            self._toggle_play()
        elif word == "time" and rest:
            self._move(rest)
        elif word == "time":
            self._ask_for_time()
        elif word == "compare":
            self._compare(rest)
        elif word == "incident":
            self._ask_for_slice()
        elif word == "live":
            self.leave()
        else:
            return False
        return True

    def run_line(self, word: str, rest: str) -> None:
        """Run a typed command: time TIME, compare TIME, live or incident. Raises ValueError for an invalid
        time."""
        if word == "time" and rest:
            self.open(past_time(rest, self._now()))
        elif word == "compare" and rest:
            self._start(self._compare_with(past_time(rest, self._now())))
        else:
            self.run(word)

    def _now(self) -> float:
        """Return the reference time for relative times such as -20m. For a running service, this is the
        service's current time, which can differ from this machine's. For a recording in a file, it is the end
        of the recording."""
        source = self._source
        if source is not None and source is self._app.source:
            return time.time() if source.instant is None else source.instant.last
        return self._app.session.state.now or time.time()

    # ── moving ───────────────────────────────────────────────────────────────────────────────

    def open(self, at: float | None) -> None:
        """Show a past state. If `at` is None, `ReplaySource.begin` chooses the time."""
        self._start(self._moved(self.source.begin() if at is None else self.source.seek(at)))

    def leave(self) -> None:
        """Return to the live service."""
        if self._app.source is self._source:
            self._app.session.say(_NO_LIVE, "warn")
            return
        self._playing = False
        for group in ("past", "past-lists"):
            self._app.workers.cancel_group(self._app, group)
        self._app.session.leave_past()

    def read_lists(self) -> None:
        """Read the screen's lists."""
        self._app.run_worker(self._read_lists(), group="past-lists", exclusive=True)

    def _move(self, how: str) -> None:
        source = self.source
        if how in ("back", "forward"):
            if self._app.session.past is None:
                # Stepping back from the live service shows the newest recorded sample.
                self._start(self._moved(source.seek(None)))
            else:
                self._start(self._moved(source.step(1 if how == "forward" else -1)))
        elif how in ("slower", "faster"):
            place = SPEEDS.index(source.speed) + (1 if how == "faster" else -1)
            source.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, place))]
            self._app.session.say(f"replay speed: {source.speed}x", "dim")
            if (past := self._app.session.past) is not None:
                past.speed = source.speed
        else:
            self._start(self._to_event(forward=how == "next-event"))

    def _toggle_play(self) -> None:
        if self._playing:
            self._playing = False
            self._app.workers.cancel_group(self._app, "past")
            self._show()
        else:
            self._start(self._play())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a move, cancelling any move in progress."""
        self._playing = False
        self._app.run_worker(work, group="past", exclusive=True, exit_on_error=True)

    async def _moved(self, movement: Coroutine[Any, Any, object]) -> None:
        try:
            await movement
        except SourceError as error:
            self._app.session.say(str(error), "warn")
            self._app.redraw()
            return
        await self._arrived()

    async def _play(self) -> None:
        self._playing = True
        self._show()
        while True:
            await asyncio.sleep(self.source.interval_s)
            before = self.source.instant
            try:
                await self.source.play()
            except SourceError as error:
                self._playing = False
                self._app.session.say(f"replay stopped: {error}", "dim")
                self._show()
                return
            if self.source.instant is not before:
                await self._arrived()

    async def _to_event(self, *, forward: bool) -> None:
        if self._app.session.past is None:
            await self._moved(self.source.seek(None))
        instant = self.source.instant
        if instant is None:
            return
        span_s = self._span_s()
        since, until = (instant.at, instant.at + span_s) if forward else (instant.at - span_s, instant.at)
        try:
            marks = (await self.source.recording().timeline(since, until)).marks
        except SourceError as error:
            self._app.session.say(str(error), "warn")
            self._app.redraw()
            return
        step = instant.resolution_s
        found = [mark for mark in marks if mark.at >= instant.at + step] if forward else marks
        found = found if forward else [mark for mark in found if mark.at < instant.at]
        if not found:
            side = "after" if forward else "before"
            self._app.session.say(
                f"no operator actions or alerts in the {units.seconds(span_s)} {side} this time", "warn"
            )
            self._app.redraw()
            return
        await self._moved(self.source.seek(found[0].at if forward else found[-1].at))

    async def _arrived(self) -> None:
        """Show the snapshot immediately; then read and show the timeline and lists."""
        self._show()
        await self._read_timeline()
        await self._read_lists()
        self._show()

    def _show(self) -> None:
        instant = self.source.instant
        if instant is None:
            return
        past = PastState(instant, self._timeline, self._playing, self.source.speed)
        self._app.session.show_past(past, self.source.history)
        self._app.redraw()

    # ── data for the displayed time ──────────────────────────────────────────────────────────

    def _span_s(self) -> float:
        instant = self.source.instant
        return float(WINDOW_POINTS * (1 if instant is None else instant.resolution_s))

    async def _read_timeline(self) -> None:
        instant = self.source.instant
        assert instant is not None
        span_s, known = self._span_s(), self._timeline
        if known is not None and self._window[0] == instant.resolution_s:
            edge = _EDGE * span_s
            has_later = instant.last > self._window[1] + edge
            inside = known.since + (edge if instant.first < known.since else 0) <= instant.at
            inside = inside and instant.at <= known.until - (edge if has_later else -edge)
            if inside:
                return
        until = min(instant.at + span_s / 2, instant.last)
        try:
            since = max(until - span_s, min(instant.first, until - _MIN_SPAN_S))
            self._timeline = await self.source.recording().timeline(since, until)
            self._window = instant.resolution_s, until
        except SourceError as error:
            self._app.session.say(str(error), "warn")

    async def _read_lists(self) -> None:
        session = self._app.session
        for name in session.view.lists():
            await self._read_list(name)
        self._app.redraw()

    async def _read_list(self, name: ListName) -> None:
        session, context = self._app.session, self._app.session.context
        try:
            session.take_rows(name, await self.source.rows(name), context=context)
        except SourceError as error:
            context.rows.pop(name, None)
            session.take_rows(name, [], str(error), context=context)

    # ── comparing and exporting ──────────────────────────────────────────────────────────────

    def _compare(self, rest: str) -> None:
        session = self._app.session
        shown = session.shown_instant()
        if shown is None:
            session.say("no data received yet", "warn")
        elif rest == "pin" or session.compared is None:
            session.pin(shown)
            session.say(
                f"first time set to {units.date(shown.at)}: go to another time and press "
                f"{key_of(session.context.keys, 'compare')} to compare"
            )
        elif session.view.name == "compare":
            session.run("screen back")
        else:
            session.run("screen compare")

    async def _compare_with(self, at: float) -> None:
        session = self._app.session
        try:
            instant = await self.source.recording().instant(at)
        except SourceError as error:
            session.say(str(error), "warn")
        else:
            session.pin(Compared(instant.snapshot, instant.resolution_s))
            session.run("screen compare")
        self._app.redraw()

    def _ask_for_time(self) -> None:
        self._app.run_worker(self._time_dialog(), group="past-dialog", exclusive=True)

    async def _time_dialog(self) -> None:
        try:
            newest = await self.source.recording().instant(None)
        except SourceError as error:
            self._app.session.say(str(error), "warn")
            self._app.redraw()
            return
        note = f"Recorded from {units.date(newest.first)} to {units.date(newest.last)}"
        at = await self._app.push_screen_wait(TimeDialog(now=self._now(), note=note))
        if at is not None:
            self.open(at)

    def _ask_for_slice(self) -> None:
        if self._app.is_web:
            # A browser must not write files on the server.
            self._app.session.say(
                "cannot export from a browser: run appliance history export on the server", "warn"
            )
            return
        self._app.run_worker(self._slice_dialog(), group="past-dialog", exclusive=True)

    async def _slice_dialog(self) -> None:
        session = self._app.session
        shown, compared = session.shown_instant(), session.compared
        at = self._now() if session.past is None or shown is None else shown.at
        since, until = at - _AROUND_S, at + (0.0 if session.past is None else _AROUND_S)
        if session.past is not None:
            until = min(until, session.past.instant.last)
            since = max(since, session.past.instant.first)
        if compared is not None and compared.at != at:
            since, until = sorted((compared.at, at))
        chosen = await self._app.push_screen_wait(SliceDialog(since, until, now=self._now()))
        if chosen is not None:
            await self._export(chosen)

    async def _export(self, chosen: Slice) -> None:
        session = self._app.session
        session.say(f"writing {chosen.path}…", "dim")
        self._app.redraw()
        try:
            session.say(await self.source.recording().export(*chosen), "good")
        except SourceError as error:
            session.say(str(error), "bad")
        self._app.redraw()
