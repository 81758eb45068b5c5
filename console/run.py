"""Starts the console for the CLI."""

from __future__ import annotations

from console.app import ConsoleApp
from console.keymap import read_keymap
from console.source import SnapshotSource
from console.themes import ThemeName


def run(
    source: SnapshotSource, *, write: bool, theme: ThemeName, keys: str | None, mouse: bool = True
) -> int:
    """Run the console until the operator quits or a signal ends it. `keys` is the path of a keymap file.
    If `mouse` is false, the mouse is left to the terminal, for example to select text. Return the exit
    code."""
    app = ConsoleApp(source, write=write, theme=theme, keymap=read_keymap(keys))
    code = app.run(mouse=mouse)
    return code if code is not None else app.return_code or 0
