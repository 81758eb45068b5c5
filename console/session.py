"""An operator's session: the newest snapshot, the current screen, the badges, and the commands that change
them. A session needs no terminal."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from appliance.snapshot import Snapshot
from console.context import Compared, Context
from console.filters import Cell
from console.frame import FrameState, frame
from console.glyphs import GLYPH_SETS, GlyphSet
from console.history import History
from console.lines import Line
from console.roles import Role
from console.screens.base import FAR, JUMP_LETTERS, MIN_HEIGHT, MIN_WIDTH, PAGE, View
from console.screens.compare import CompareView
from console.screens.registry import all_views, alternate_views
from console.screens.table import TableView
from console.source import ListName, Row, SnapshotSource
from console.themes import THEMES, ThemeName
from console.timeline import PastState

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.25, 60.0
_MIN_STALE_S = 2.5
_MOVES = {
    "up": -1,
    "down": 1,
    "page-up": -PAGE,
    "page-down": PAGE,
    "first": -FAR,
    "last": FAR,
}

_PANEL_COMMANDS = ("zoom", "jump", "open", "variant", "move left", "move right")
"""Commands that change panels or move a cursor. On a list of facts, they have no visible effect."""


class ConsoleSession:
    """The state of a console."""

    def __init__(self, source: SnapshotSource, *, write: bool = False) -> None:
        self.source = source
        incident_since = source.recording().begin if source.kind == "replay" else None
        self.views = all_views()
        self.theme: ThemeName = "dark"
        self.state = FrameState(
            context=Context(write=write, incident_since=incident_since),
            view=self.views[0],
            views=self.views,
            label=source.label,
            demo=source.kind == "demo",
        )
        self.comparison = CompareView()
        self._hidden = [*alternate_views(), self.comparison]
        """Screens without a tab."""
        self._live = self.state.context
        """The screens' input while the console is live."""
        self._received: float | None = None
        """Monotonic time at which the newest snapshot arrived."""
        self._newest: Snapshot | None = None
        self._back: list[View] = []
        self._forward: list[View] = []

    @property
    def context(self) -> Context:
        """The screens' current input."""
        return self.state.context

    @property
    def view(self) -> View:
        """The current screen."""
        return self.state.view

    def newest(self) -> Context:
        """Return the live input with the newest snapshot, even while updates are paused."""
        return replace(self._live, snapshot=self._newest)

    def lines(self, width: int, height: int) -> list[Line]:
        """Return the frame for a terminal of this size."""
        self._tick()
        return frame(self.state, width, height)

    # ── the source ───────────────────────────────────────────────────────────────────────────

    def accept(self, snapshot: Snapshot) -> None:
        """Add the next snapshot to the history and show it unless updates are paused."""
        before = self._newest
        if before is not None and snapshot.started_at > before.started_at + 0.5:
            self.state.restarted_at = snapshot.at
        self._newest, self._received = snapshot, time.monotonic()
        self.state.error = ""
        self._live.history.interval_s = self.source.interval_s
        self._live.history.add(snapshot)
        if not self.state.paused:
            self._live.snapshot = snapshot

    def prepend(self, earlier: History) -> None:
        """Add recorded points to the live charts."""
        self._live.history.prepend(earlier)

    def fail(self, reason: str) -> None:
        """Record that the source failed. The newest snapshot stays on screen, marked as stale."""
        self.state.error = reason

    def take_rows(
        self, name: ListName, rows: Sequence[Row], error: str = "", *, context: Context | None = None
    ) -> None:
        """Store a list, or the reason it could not be read, in `context` (default: the screens' live
        input)."""
        target = self._live if context is None else context
        if error:
            target.row_errors[name] = error
        else:
            target.row_errors.pop(name, None)
            target.rows[name] = rows

    # ── history ─────────────────────────────────────────────────────────────────────────────

    @property
    def past(self) -> PastState | None:
        """The displayed past state, or None if the console is live."""
        return self.state.past

    @property
    def compared(self) -> Compared | None:
        """The first state of a comparison, or None if none has been chosen."""
        return self.context.compared

    def show_past(self, past: PastState, history: History) -> None:
        """Show a past state on all screens. Actions are disabled while viewing history."""
        if self.state.past is None:
            live = self._live
            self.state.context = Context(
                glyphs=live.glyphs,
                keys=live.keys,
                compared=live.compared,
                is_past=True,
                incident_since=live.incident_since,
            )
        self.state.past = past
        self.context.snapshot, self.context.history = past.instant.snapshot, history

    def leave_past(self) -> None:
        """Return to live."""
        if self.state.past is not None:
            self._live.glyphs, self._live.compared = self.context.glyphs, self.context.compared
            self.state.context, self.state.past = self._live, None
            self._live.snapshot = self._newest

    def shown_instant(self) -> Compared | None:
        """Return the displayed snapshot and its resolution, for a comparison."""
        snapshot, past = self.context.snapshot, self.state.past
        if snapshot is None:
            return None
        return Compared(snapshot, 1 if past is None else past.instant.resolution_s)

    def pin(self, instant: Compared) -> None:
        """Choose the first state of a comparison."""
        self.context.compared = instant

    @property
    def needs_tick(self) -> bool:
        """Whether the frame shows the newest snapshot's age, which changes even without a new snapshot."""
        if self.state.past is not None:
            return False
        return self.state.stale_s is not None or self._age_s() > self._stale_after_s()

    def _tick(self) -> None:
        age = self._age_s()
        if self._newest is not None:
            self.state.now = self._newest.at + age
        shown = not self.state.paused and self.state.past is None
        stale = self._received is not None and shown and age > self._stale_after_s()
        self.state.stale_s = age if stale else None

    def _age_s(self) -> float:
        return 0.0 if self._received is None else time.monotonic() - self._received

    def _stale_after_s(self) -> float:
        return max(_MIN_STALE_S, 3 * self.source.interval_s)

    # ── commands ─────────────────────────────────────────────────────────────────────────────

    def run(self, command: str) -> bool:
        """Run a command from the key table if it affects only the session. Return False for other
        commands."""
        self.state.message = ""
        word, _, rest = command.partition(" ")
        view = self.view
        if command in _PANEL_COMMANDS and not self.state.has_panels and not self.state.help:
            self.say(
                f"this key in {view.title} needs a terminal of at least {MIN_WIDTH}×{MIN_HEIGHT}", "warn"
            )
        elif word == "move":
            self._move(rest)
        elif command in ("screen back", "screen forward"):
            self._travel(rest)
        elif word == "screen":
            self._screen(rest)
        elif word == "help":
            self.state.help, self.state.help_scroll = not self.state.help, 0
        elif word == "open":
            self._open(view)
        elif word == "back":
            if self.state.help:
                self.state.help = False
            else:
                view.back()
        elif word == "zoom":
            if not view.zoom():
                self.say(f"{view.title} has only one panel", "warn")
        elif word == "jump" and not view.can_jump:
            self.say(f"{view.title} has no rows or panels to jump to", "warn")
        elif word == "jump":
            self.context.jumping, self.state.frozen, self.state.help = True, None, False
            self.say("type the letter of a row or panel, or any other key to cancel", "dim")
        elif word == "variant":
            if view.alternate:
                self._screen(view.alternate)
            elif view.variants:
                view.next_variant()
            else:
                self.say(f"{view.title} has only one view", "warn")
        elif word == "pause":
            self._pause()
        elif word == "mark" and isinstance(view, TableView):
            view.toggle_mark()
        elif word == "sort" and isinstance(view, TableView):
            self._sort(view, rest)
        elif word == "filter" and isinstance(view, TableView) and rest:
            view.filter = "" if rest == "none" else rest
        elif word == "glyphs":
            self._glyphs(rest)
        elif word == "theme":
            self._theme(rest)
        elif word in ("interval", "faster", "slower"):
            self._interval(word, rest)
        elif word in ("mark", "sort"):
            self.say(f"{view.title} has no rows to {word}", "warn")
        else:
            return False
        return True

    def jump(self, letter: str) -> None:
        """Leave jump mode and go to the row or panel labelled with `letter`, if there is one. `letter` is
        empty for keys that are not characters."""
        self.stop_jumping()
        view = self.view
        if not letter or letter not in JUMP_LETTERS or not view.jump(JUMP_LETTERS.index(letter)):
            return
        if isinstance(view, TableView) and view.cursor not in map(view.id_of, view.ordered(self.context)):
            self.say(f"{view.cursor} is no longer in the list", "warn")

    def stop_jumping(self) -> None:
        """Leave jump mode."""
        if self.context.jumping:
            self.context.jumping, self.state.frozen, self.state.message = False, None, ""

    def say(self, message: str, role: Role = "text") -> None:
        """Show a message in the footer until the next key press."""
        self.state.message, self.state.message_role = message, role

    def export(self, form: str) -> str:
        """Return the displayed table as CSV or JSON. Raises ValueError if the format is unknown or there is
        no data yet."""
        if self.context.snapshot is None:
            raise ValueError("no data received yet: wait for the first snapshot")
        names, rows = self.view.export(self.context)
        if form == "json":
            encoded = msgspec.json.encode([dict(zip(names, row, strict=True)) for row in rows])
            return msgspec.json.format(encoded, indent=2).decode() + "\n"
        if form != "csv":
            raise ValueError(f"unknown format {form!r}: use csv or json")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
        return text.getvalue()

    def copied(self) -> str:
        """Return the text to copy: the marked rows, or the row under the cursor. On a screen without rows, it
        is the id of the request under the cursor."""
        if not isinstance(self.view, TableView):
            return self.view.request(self.context) if self.state.has_panels else ""
        wanted = set(self.view.selected(self.context))
        names, rows = self.view.export(self.context)
        ordered = self.view.ordered(self.context)
        chosen = [row for row, one in zip(rows, ordered, strict=True) if self.view.id_of(one) in wanted]
        table: list[Sequence[Cell]] = [names, *chosen]
        return "\n".join("\t".join("" if cell is None else str(cell) for cell in row) for row in table)

    def _move(self, where: str) -> None:
        if self.state.help:
            self.state.help_scroll = max(0, self.state.help_scroll + _MOVES.get(where, 0))
        elif where in ("left", "right"):
            self.view.sideways(-1 if where == "left" else 1)
        elif self.state.has_panels:
            self.view.move(_MOVES[where])
        else:
            self.view.scroll = max(0, self.view.scroll + _MOVES[where])

    def _screen(self, name: str) -> None:
        keys = [view.key for view in self.views]
        index = keys.index(self.view.key) if self.view.key in keys else 0
        if name in ("next", "previous"):
            chosen = self.views[(index + (1 if name == "next" else -1)) % len(self.views)]
        else:
            chosen = next(view for view in [*self.views, *self._hidden] if name in (view.key, view.name))
        if chosen is not self.view:
            self._back.append(self.view)
            self._forward.clear()
            self.state.view = chosen
        self.state.help = False

    def _open(self, view: View) -> None:
        """Open the row under the cursor, or the request it refers to."""
        if view.open():
            return
        request = view.request(self.context)
        running = (
            {one.request_id for one in self.context.snapshot.requests} if self.context.snapshot else set()
        )
        if not request:
            self.say("there is no request under the cursor", "warn")
            return
        self._screen("requests" if request in running else "finished")
        chosen = self.view
        assert isinstance(chosen, TableView)
        chosen.filter, chosen.cursor, chosen.detail = "", request, request

    def _travel(self, where: str) -> None:
        origin, target = (self._back, self._forward) if where == "back" else (self._forward, self._back)
        if origin:
            target.append(self.view)
            self.state.view = origin.pop()

    def _pause(self) -> None:
        self.state.paused = not self.state.paused
        shown = self.context.snapshot
        if self.state.paused and shown is not None:
            # Copy the requests, because the event stream updates those of earlier snapshots in place.
            requests = [msgspec.structs.replace(one) for one in shown.requests]
            self.context.snapshot = msgspec.structs.replace(shown, requests=requests)
        elif not self.state.paused and self._newest is not None:
            self.context.snapshot = self._newest

    def _sort(self, view: TableView[Any], how: str) -> None:
        if how in ("next", "previous"):
            view.next_sort(1 if how == "next" else -1)
        elif how == "reverse":
            view.reverse = not view.reverse
        elif found := next((column for column in view.columns if how.lower() in column.names), None):
            view.sort(found.name)
        else:
            names = ", ".join(column.names[0] for column in view.columns)
            self.say(f"unknown column {how!r}: use one of {names}", "bad")

    def _glyphs(self, name: str) -> None:
        at = GLYPH_SETS.index(self.context.glyphs)
        chosen = name or GLYPH_SETS[(at + 1) % len(GLYPH_SETS)]
        if chosen in get_args(GlyphSet):
            self.context.glyphs = chosen  # type: ignore[assignment]
            self.say(f"chart characters: {chosen}", "dim")
        else:
            self.say(f"unknown glyphs {name!r}: use {', '.join(GLYPH_SETS)}", "bad")

    def _theme(self, name: str) -> None:
        names = list(THEMES)
        following = names[(names.index(self.theme) + 1) % len(names)]
        chosen = next((one for one in names if one == name), None) if name else following
        if chosen is None:
            self.say(f"unknown theme {name!r}: use {', '.join(names)}", "bad")
        else:
            self.theme = chosen
            self.say(f"theme {chosen}", "dim")

    def _interval(self, word: str, text: str) -> None:
        current = self.source.interval_s
        try:
            wanted = current / 2 if word == "faster" else current * 2 if word == "slower" else float(text)
        except ValueError:
            self.say(f"{text!r} is not a number of seconds: type a number, as in interval 2", "bad")
            return
        self.source.interval_s = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, wanted))
        self.say(f"refresh every {self.source.interval_s:g} s", "dim")
