"""The dialogs for viewing history: one asks which time to open, the other which slice to export."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, Static

from appliance.quantities import past_time
from console import units
from console.dialogs import Dialog, text

_CSS = """
    {0} {{ align: center middle; background: transparent; }}
    {0} #dialog {{ width: 72; max-width: 96%; height: auto; max-height: 94%; border: round $primary;
        padding: 0 1; background: $surface; }}
    {0} #title {{ text-style: bold; color: $primary; }}
    {0} #note, {0} #keys {{ color: $text-muted; height: auto; }}
    {0} .field {{ height: 1; }}
    {0} .field Label {{ width: 10; }}
    {0} Input {{ width: 1fr; background: $panel; }}
    {0} #error {{ color: $error; height: auto; }}
    {0} #buttons {{ height: 1; align-horizontal: right; margin-top: 1; }}
    {0} Button {{ min-width: 12; margin-left: 2; }}
    {0} Button:focus {{ text-style: bold reverse; }}
"""


class Slice(NamedTuple):
    """A period of recorded history to export, and the file to write."""

    since: float
    until: float
    path: Path


class TimeDialog(Dialog[float | None]):
    """Asks for a time in history. Its result is None if the operator cancels."""

    BINDINGS: ClassVar = [("escape", "cancel", "Cancel")]
    DEFAULT_CSS = _CSS.format("TimeDialog")

    def __init__(self, *, now: float, note: str) -> None:
        """Times are relative to `now` (unix seconds). `note` describes what has been recorded."""
        super().__init__()
        self._now = now
        self._note = note

    def compose(self) -> ComposeResult:
        """Build the dialog."""
        with Vertical(id="dialog"):
            yield Static(text("Go to a time in history"), id="title")
            yield Static(text("14:03 or 14:03:20 (most recent), -20m, or 2026-11-20T14:03"), id="note")
            yield Static(text(self._note), id="recorded")
            with Horizontal(classes="field"):
                yield Label("time")
                yield Input(id="time", placeholder="-20m", compact=True)
            yield Static("", id="error")
            yield Static(text("enter to open · esc to cancel"), id="keys")

    def on_mount(self) -> None:
        """Focus the field."""
        self.query_one(Input).cursor_blink = False
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _open(self) -> None:
        try:
            self.dismiss(past_time(self.query_one(Input).value, self._now))
        except ValueError as error:
            self.query_one("#error", Static).update(text(str(error)))

    def action_cancel(self) -> None:
        """Close the dialog."""
        self.dismiss(None)


class SliceDialog(Dialog[Slice | None]):
    """Asks for the slice to export. Its result is None if the operator cancels."""

    BINDINGS: ClassVar = [("escape", "cancel", "Cancel")]
    DEFAULT_CSS = _CSS.format("SliceDialog")

    def __init__(self, since: float, until: float, *, now: float) -> None:
        """`since` and `until` are the start and the end of the proposed slice. Times that the operator enters
        are relative to `now`. All of them are in unix seconds."""
        super().__init__()
        self._since, self._until, self._now = since, until, now

    def compose(self) -> ComposeResult:
        """Build the dialog."""
        name = time.strftime("incident-%Y%m%d-%H%M%S.db", time.localtime(self._since))
        with Vertical(id="dialog"):
            yield Static(text("Export an incident file"), id="title")
            yield Static(
                text(
                    "The file contains metrics, requests, alerts, operator actions and log lines, but no "
                    "prompts or responses. Open it on any machine: appliance console --replay FILE"
                ),
                id="note",
            )
            for label, value in (
                ("from", units.date(self._since)),
                ("to", units.date(self._until)),
                ("file", name),
            ):
                with Horizontal(classes="field"):
                    yield Label(label)
                    yield Input(value=value, id=label, compact=True)
            yield Static("", id="error")
            with Horizontal(id="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button("Export", id="export", variant="primary", compact=True)

    def on_mount(self) -> None:
        """Focus the field for the file name."""
        for one in self.query(Input):
            one.cursor_blink = False
        self.query_one("#file", Input).focus()

    @on(Button.Pressed, "#export")
    @on(Input.Submitted, "#file")
    def _export(self) -> None:
        try:
            since, until = (
                past_time(self.query_one(name, Input).value, self._now) for name in ("#from", "#to")
            )
        except ValueError as error:
            self.query_one("#error", Static).update(text(str(error)))
            return
        name = self.query_one("#file", Input).value.strip()
        if not name or since >= until:
            problem = "enter a file name" if not name else "the start (from) must be before the end (to)"
            self.query_one("#error", Static).update(text(problem))
            return
        try:
            path = Path(name).expanduser().absolute()
        except RuntimeError:
            self.query_one("#error", Static).update(text(f"{name}: there is no such user"))
            return
        self.dismiss(Slice(since, until, path))

    @on(Input.Submitted, "#from,#to")
    def _next_field(self) -> None:
        self.focus_next()

    @on(Button.Pressed, "#cancel")
    def action_cancel(self) -> None:
        """Close the dialog."""
        self.dismiss(None)
