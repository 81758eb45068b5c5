"""Output for terminals and scripts: tables that fit the width, human-readable quantities, colour and JSON.
All text that other users can influence (names, errors, answers) passes through `printable`, so that no escape
sequences reach the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
_GAP = "  "
_MIN_FLEXIBLE = 8
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False
    """Whether the column is right-aligned, as is usual for numbers."""
    drop: int = 0
    """Columns with higher numbers are dropped first on a narrow terminal. Columns with 0 are never
    dropped."""
    flexible: bool = False
    """Whether the column's cells may be shortened if no more columns can be dropped."""
    colours: Mapping[str, str] | None = None
    """Cell colours, keyed by the cell's text."""


class Layout:
    """A table's columns, with fixed widths that keep later lines aligned with earlier lines."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, indent: int = 0
    ) -> None:
        """Compute the column widths from `rows`. `width` is the terminal's width, or None if unlimited."""
        self._indent = " " * indent
        self._columns = columns
        self._widths = [
            max([cells(column.title), *(cells(row[index]) for row in rows)])
            for index, column in enumerate(columns)
        ]
        self._shown = list(range(len(columns)))
        self._bounded = width is not None
        if width is not None:
            self._fit(width - indent)

    def heading(self) -> str:
        """Format the column headings as a line of text."""
        return self.line([column.title for column in self._columns])

    def line(self, row: Sequence[str]) -> str:
        """Format a row as a line of text."""
        parts = []
        for index in self._shown:
            wanted, column = self._widths[index], self._columns[index]
            last = index == self._shown[-1] and not column.right
            text = shorten(row[index], wanted) if column.flexible and self._bounded else row[index]
            space = 0 if last else max(0, wanted - cells(text))
            if column.colours and text in column.colours:
                text = paint(text, column.colours[text])
            parts.append(" " * space + text if column.right else text + " " * space)
        return (self._indent + _GAP.join(parts)).rstrip()

    def _fit(self, width: int) -> None:
        for index in sorted(self._shown, key=lambda index: -self._columns[index].drop):
            if self._excess(width) <= 0 or not self._columns[index].drop:
                break
            self._shown.remove(index)
        flexible = [index for index in self._shown if self._columns[index].flexible]
        while flexible and self._excess(width) > 0:
            widest = max(flexible, key=lambda index: self._widths[index])
            if self._widths[widest] <= _MIN_FLEXIBLE:
                break
            self._widths[widest] -= 1

    def _excess(self, width: int) -> int:
        return sum(self._widths[index] for index in self._shown) + len(_GAP) * (len(self._shown) - 1) - width


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int | None, indent: int = 0
) -> list[str]:
    """Return the lines of a table, starting with the column headings."""
    layout = Layout(columns, rows, width, indent)
    return [layout.heading(), *(layout.line(row) for row in rows)]


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the terminal, with dimmed column headings."""
    heading, *lines = table(columns, rows, width=terminal_width())
    print(paint(heading, "dim"))
    for line in lines:
        print(line)


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if `stream` is a terminal. `stream` is None if it was closed before this process
    started."""
    return stream is not None and stream.isatty()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the terminal width of `stream` (default: standard output). None means that the stream is not a
    terminal, so lines are not shortened."""
    return shutil.get_terminal_size().columns if is_terminal(stream or sys.stdout) else None


def cells(text: str) -> int:
    """Return the number of terminal columns that `text` occupies."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def shorten(text: str, width: int) -> str:
    """Return `text` shortened to `width` columns. Paths are cut off at the beginning, other text at the
    end."""
    if cells(text) <= width:
        return text
    from_end = text.startswith("/")
    while text and cells(text) > width - 1:
        text = text[1:] if from_end else text[:-1]
    return "…" + text if from_end else text + "…"


def printable(text: str) -> str:
    """Return `text` as one line, without control characters and bidirectional overrides."""
    return _CONTROLS.sub(" ", text)


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return `text` in a colour ("red", "green", "yellow", "dim", "bold") if `stream` is a terminal and
    colours are not disabled (https://no-color.org)."""
    stream = stream or sys.stdout
    if not text or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(stream):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def print_json(value: Any, *, line: bool = False) -> None:
    """Print structs, lists and dicts as JSON: indented, or on one line."""
    import msgspec

    encoded = msgspec.json.encode(value)
    print((encoded if line else msgspec.json.format(encoded, indent=2)).decode(), flush=line)


def of_seconds(seconds: float) -> str:
    """Format a duration in seconds as text with at most two units, such as "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, small, name, rest in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            return f"{whole // large} {name} {whole % large // small} {rest}"
    raise AssertionError("unreachable")


def of_ms(value: float | None) -> str:
    """Format a time in milliseconds. Returns an empty string for None."""
    if value is None:
        return ""
    if value >= 100_000:
        return f"{value / 1000:.0f}s"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def of_count(count: int) -> str:
    """Format a number with thousands separators."""
    return f"{count:,}"
