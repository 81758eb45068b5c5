"""The command palette. Its entries come from the key table and the action registry."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider, SearchIcon
from textual.widgets import Input

from console.commands import ALTERNATES, WORDS
from console.keys import KeyTable, key_of, offered

if TYPE_CHECKING:
    from console.app import ConsoleApp


class ConsolePalette(CommandPalette):
    """Textual's palette without symbols that some terminals lack, and without the blinking cursor, which
    would waste bandwidth over SSH."""

    DEFAULT_CSS = "ConsolePalette SearchIcon { color: $primary; }"

    def on_mount(self) -> None:
        """Turn off cursor blinking and set the input line's placeholder and icon."""
        line = self.query_one(Input)
        line.cursor_blink, line.placeholder = False, "type to search  ↑↓ move  enter run  esc close"
        self.query_one(SearchIcon).icon = ">"


class ConsoleCommands(Provider):
    """Finds commands by title."""

    @property
    def _console(self) -> ConsoleApp:
        return self.app  # type: ignore[return-value]

    def _entries(self) -> list[tuple[str, str, str]]:
        """Return each entry's title, help and command."""
        context = self._console.session.context
        found = [
            (key.title, _key_note(context.keys, key.command), key.command)
            for key in context.keys
            if not key.command.startswith(("act ", "move", "palette"))
        ]
        found += [
            (WORDS[name].partition(": ")[2].capitalize(), f"command :{name}", f"screen {name}")
            for name in ALTERNATES
        ]
        if context.write:
            for action in offered():
                command = f"act {action.name}"
                notes = (action.description, _key_note(context.keys, command))
                found.append((action.title, " · ".join(filter(None, notes)), command))
        return found

    async def discover(self) -> Hits:
        """Yield all entries, which are shown while the search field is empty."""
        for title, note, command in self._entries():
            yield DiscoveryHit(title, partial(self._console.action_run, command), help=note)

    async def search(self, query: str) -> Hits:
        """Yield the matching entries."""
        matcher = self.matcher(query)
        for title, note, command in self._entries():
            if (score := matcher.match(title)) > 0:
                yield Hit(
                    score, matcher.highlight(title), partial(self._console.action_run, command), help=note
                )


def _key_note(keys: KeyTable, command: str) -> str:
    return f"key {name}" if (name := key_of(keys, command)) else ""
