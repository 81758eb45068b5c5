"""The bottom line, where operators type commands (`:`) and filters (`/`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple

from textual import events
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input

from console.commands import Targets, completions, described, shared_beginning

_KEYS = ("escape", "enter", "tab", "up", "down")
"""Keys that the input line handles itself. Textual's bindings handle all other non-character keys."""


PromptKind = Literal[":", "/"]
"""":" for commands or "/" for filters."""


class Closed(NamedTuple):
    """The result of an input line that the operator has submitted or cancelled."""

    kind: PromptKind
    text: str | None
    """The entered text, or None if the operator cancelled."""
    before: str
    """The text in the input line when the line was opened."""


class PromptLine(Input):
    """An input line that is visible only while in use."""

    DEFAULT_CSS = """
    PromptLine { display: none; dock: bottom; border: none; height: 1; padding: 0 1; background: $panel; }
    PromptLine:focus { border: none; }
    """

    class Choices(Message):
        """Sent when several completions are possible. `texts` describes each of them."""

        def __init__(self, texts: list[str]) -> None:
            super().__init__()
            self.texts = texts

    def __init__(self) -> None:
        super().__init__(suggester=None, select_on_focus=False)
        self.cursor_blink = False
        self.kind: PromptKind = ":"
        self._before = ""
        self._result: Closed | None = None
        self._past: list[str] = []
        self._at = 0
        self._targets: Callable[[], Targets] = dict

    def open(self, kind: PromptKind, text: str, targets: Callable[[], Targets]) -> None:
        """Show the input line. `targets` returns the names offered for completion."""
        self.kind, self._before, self._targets = kind, text, targets
        self._at = len(self._past)
        self.placeholder = (
            "type a command (tab completes, esc cancels)"
            if kind == ":"
            else "filter: text, field:text, field>100"
        )
        self.suggester = _CommandSuggester(targets) if kind == ":" else None
        self.value = text
        self.cursor_position = len(text)
        self.display = True
        # focus() would take effect only after the queued keys have been handled.
        self.screen.set_focus(self)

    @staticmethod
    def is_bound(event: events.Key) -> bool:
        """Return whether a key is handled only by a binding, as `backspace` is."""
        return not event.is_printable and event.key not in _KEYS

    async def result(self) -> Closed | None:
        """Wait until the input line has handled all keys sent to it. Return the result if a key closed the
        line, otherwise None."""
        handled = asyncio.Event()
        if self.call_later(handled.set):
            await handled.wait()
        result, self._result = self._result, None
        return result

    def on_hide(self, event: events.Hide) -> None:
        """Keep the focus if the line was reopened after being hidden. Textual reports hidden widgets only
        after the next layout."""
        if self.display:
            event.prevent_default()

    async def on_key(self, event: events.Key) -> None:
        """Submit, cancel or complete the line, or recall an earlier one, depending on the key."""
        if event.key == "escape":
            self._close(None)
        elif event.key == "enter":
            if self.kind == ":" and self.value.strip():
                self._past.append(self.value)
            self._close(self.value)
        elif event.key == "tab":
            self._complete()
        elif event.key in ("up", "down") and self.kind == ":":
            self._recall(-1 if event.key == "up" else 1)
        else:
            return
        event.stop()
        event.prevent_default()

    def _close(self, text: str | None) -> None:
        self.display = False
        self._result = Closed(self.kind, text, self._before)

    def _complete(self) -> None:
        targets = self._targets()
        found = completions(self.value, targets) if self.kind == ":" else []
        if len(found) == 1:
            self.value = found[0] + " "
        elif found:
            self.value = shared_beginning(found)
            self.post_message(self.Choices(described(found, targets)))
        self.cursor_position = len(self.value)

    def _recall(self, step: int) -> None:
        self._at = max(0, min(len(self._past), self._at + step))
        self.value = self._past[self._at] if self._at < len(self._past) else ""
        self.cursor_position = len(self.value)


class _CommandSuggester(Suggester):
    """Suggests the first command line that starts with the typed text."""

    def __init__(self, targets: Callable[[], Targets]) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._targets = targets

    async def get_suggestion(self, value: str) -> str | None:
        """Return the suggested command line, or None."""
        return next(iter(completions(value, self._targets())), None) if value else None
