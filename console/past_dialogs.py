"""The history dialogs: one asks which time to show, the other which slice to export."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Button, Input, Label, Static

from appliance.quantities import past_time
from console import units
from console.dialogs import Dialog, KeyHint, R, ScrollArea, text
from console.files import FileError, path_of


class Slice(NamedTuple):
    """A period of recorded history to export, and the file to write."""

    since: float
    until: float
    path: Path


class _PastDialog(Dialog[R]):
    """A dialog with explanatory texts above its input fields."""

    DEFAULT_CSS = """
    _PastDialog #dialog { width: 72; }
    _PastDialog .note { color: $text-muted; height: auto; }
    _PastDialog .field { height: 1; }
    _PastDialog .field Label { width: 10; }
    """
    notes: tuple[str, ...] = ()

    def fields(self) -> Iterator[tuple[str, str, str]]:
        """Return each field's label, value and placeholder."""
        raise NotImplementedError

    def body(self) -> ComposeResult:
        with ScrollArea(id="body"):
            for note in self.notes:
                yield Static(text(note), classes="note")
            for label, value, absent in self.fields():
                with Horizontal(classes="field"):
                    yield Label(label)
                    yield Input(value=value, placeholder=absent, id=label, compact=True)


class TimeDialog(_PastDialog[float | None]):
    """Asks for a time in history. The result is None if the operator cancels."""

    def __init__(self, *, now: float, note: str) -> None:
        """Times are relative to `now` (unix seconds). `note` describes what has been recorded."""
        super().__init__()
        self._now = now
        self.notes = ("14:03 or 14:03:20 (most recent), -20m, or 2026-11-20T14:03", note)

    def title_text(self) -> str:
        return "Go to a time in history"

    def fields(self) -> Iterator[tuple[str, str, str]]:
        yield "time", "", "-20m"

    def key_hints(self) -> list[KeyHint]:
        return [KeyHint("enter", "open"), KeyHint("esc", "cancel")]

    def on_mount(self) -> None:
        """Focus the time field."""
        super().on_mount()
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _open(self) -> None:
        try:
            self.dismiss(past_time(self.query_one(Input).value, self._now))
        except ValueError as error:
            self.show_error(f"time {error}")


class SliceDialog(_PastDialog[Slice | None]):
    """Asks for the slice to export. The result is None if the operator cancels."""

    notes = (
        "The file contains metrics, requests, alerts, operator actions and log lines, but no prompts or "
        "responses. Open it on any machine: appliance console --replay FILE",
    )

    def __init__(self, since: float, until: float, *, now: float) -> None:
        """`since` and `until` delimit the proposed slice. Times that the operator enters are relative to
        `now`. All three are in unix seconds."""
        super().__init__()
        self._since, self._until, self._now = since, until, now

    def title_text(self) -> str:
        return "Export an incident file"

    def fields(self) -> Iterator[tuple[str, str, str]]:
        name = time.strftime("incident-%Y%m%d-%H%M%S.db", time.localtime(self._since))
        yield "from", units.date(self._since), "14:03"
        yield "to", units.date(self._until), "14:10"
        yield "file", name, name

    def buttons(self) -> Iterator[Button]:
        yield Button("Cancel", id="cancel", compact=True)
        yield Button("Export", id="export", variant="primary", compact=True)

    def key_hints(self) -> list[KeyHint]:
        hints = super().key_hints()
        focused = self.focused
        return [KeyHint("enter", "export"), *hints[1:]] if focused and focused.id == "file" else hints

    def on_mount(self) -> None:
        """Focus the file name field."""
        super().on_mount()
        self.query_one("#file", Input).focus()

    def _time(self, name: str) -> float:
        """Return the time in a field. Raises a ValueError that names the field if the text is not a time."""
        try:
            return past_time(self.query_one(f"#{name}", Input).value, self._now)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None

    @on(Button.Pressed, "#export")
    @on(Input.Submitted, "#file")
    def _export(self) -> None:
        try:
            since, until = self._time("from"), self._time("to")
        except ValueError as error:
            self.show_error(str(error))
            return
        name = self.query_one("#file", Input).value.strip()
        if not name or since >= until:
            self.show_error(
                "enter a file name" if not name else "the start (from) must be before the end (to)"
            )
            return
        try:
            path = path_of(name)
            if os.path.lexists(path):
                raise FileError(f"{path} already exists: choose another name, or remove the file")
        except FileError as error:
            self.show_error(str(error))
            return
        self.dismiss(Slice(since, until, path))

    @on(Input.Submitted, "#from,#to")
    def _next_field(self) -> None:
        self.focus_next()

    @on(Button.Pressed, "#cancel")
    def _cancel(self) -> None:
        self.action_cancel()
