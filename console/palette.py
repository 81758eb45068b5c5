"""The entries of the command palette: the key table and the registry of actions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from console.keys import KEYS, offered, shown_name

if TYPE_CHECKING:
    from console.app import ConsoleApp


class ConsoleCommands(Provider):
    """Finds commands by their titles."""

    @property
    def _console(self) -> ConsoleApp:
        return self.app  # type: ignore[return-value]

    def _entries(self) -> list[tuple[str, str, str]]:
        """Return title, help and command of each entry."""
        found = [
            (key.title, f"key {shown_name(key.keys[0])}", key.command)
            for key in KEYS
            if not key.command.startswith(("act ", "move", "palette"))
        ]
        if self._console.session.context.write:
            found += [(action.title, action.description, f"act {action.name}") for action in offered()]
        return found

    async def discover(self) -> Hits:
        """Return all entries, for an empty search."""
        for title, note, command in self._entries():
            yield DiscoveryHit(title, partial(self._console.action_run, command), help=note)

    async def search(self, query: str) -> Hits:
        """Return the entries that match."""
        matcher = self.matcher(query)
        for title, note, command in self._entries():
            if (score := matcher.match(title)) > 0:
                yield Hit(
                    score, matcher.highlight(title), partial(self._console.action_run, command), help=note
                )
