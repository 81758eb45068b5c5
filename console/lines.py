"""Lines of styled text, as produced by all screens. A style is a role, such as "bad", to which themes assign
a colour. Text from clients and operators must pass through `span`, which removes control characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from console.roles import Role


class Span(NamedTuple):
    """Part of a line, in a single style."""

    text: str
    role: Role = "text"
    action: str = ""
    """Command to run when the span is clicked, such as "screen 4", or an empty string."""
    selected: bool = False
    """Whether the span is in the row under the cursor."""


Line = list[Span]
BLANK: Line = []
_TWO_COLUMNS = 76
_NAME_WIDTH = 18
"""Width of the name column in `fact_lines`."""
_HEADING = Span("─ ", "rule")
"""The span that starts every heading."""


def span(text: object, role: Role = "text", action: str = "") -> Span:
    """Return a span with only printable characters, so that escape sequences from clients never reach the
    terminal."""
    value = str(text)
    if not value.isprintable():
        value = "".join(character if character.isprintable() else " " for character in value)
    return Span(value, role, action)


def line(*parts: str | Span) -> Line:
    """Build a line from spans and plain text."""
    return [part if isinstance(part, Span) else span(part) for part in parts]


def width_of(spans: Iterable[Span]) -> int:
    """Return a line's width in terminal columns."""
    return sum(cells(one.text) for one in spans)


def cells(text: str) -> int:
    """Return the width of `text` in terminal columns."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Pad `text` to `width` columns, or truncate it with an ellipsis."""
    have = cells(text)
    if have == width:
        return text
    if have < width:
        return " " * (width - have) + text if right else text + " " * (width - have)
    if width <= 1:
        return "…"[:width]
    cut = set_cell_size(text, width - 1).rstrip() + "…"
    return cut + " " * (width - cells(cut))


def clip(spans: Sequence[Span], width: int) -> Line:
    """Pad a line with spaces to `width` columns, or truncate it with an ellipsis."""
    left, result = width, []
    for one in spans:
        size = cells(one.text)
        if size > left:
            if left > 0:
                result.append(one._replace(text=fit(one.text, left)))
            return result
        result.append(one)
        left -= size
    if left > 0:
        result.append(Span(" " * left))
    return result


def spread(left: Sequence[Span], right: Sequence[Span], width: int) -> Line:
    """Return a line with one part at the left edge and one at the right. If both do not fit, the left part is
    truncated."""
    space = width - width_of(right)
    if space <= 0:
        return clip(right, width)
    return [*clip(left, space), *right]


def heading(title: str, width: int, note: str = "") -> Line:
    """Return a panel's title line. `note` names the unit or window of the panel's values."""
    start = [_HEADING, span(title, "title"), Span(" ", "rule")]
    end = [Span(" ", "rule"), span(note, "dim"), Span(" ─", "rule")] if note else []
    space = width - width_of(start) - width_of(end)
    if space < 0 and end:
        # If space is short, the note is truncated first, then the title.
        have = width - width_of(start) - 3
        return heading(title, width, fit(note, have).rstrip() if have > 4 else "")
    return clip([*start, Span("─" * max(0, space), "rule"), *end], width)


def is_heading(row: Sequence[Span]) -> bool:
    """Return whether a line is a heading."""
    return row[:1] == [_HEADING]


def beside(
    left: Sequence[Line], right: Sequence[Line], left_width: int, right_width: int, gap: int
) -> list[Line]:
    """Join two columns of lines side by side."""
    height = max(len(left), len(right))
    rows = []
    for number in range(height):
        one = clip(left[number] if number < len(left) else BLANK, left_width)
        other = clip(right[number] if number < len(right) else BLANK, right_width)
        rows.append([*one, Span(" " * gap), *other])
    return rows


def wrap(text: str, width: int, role: Role = "text", indent: str = "") -> list[Line]:
    """Wrap text at words into lines of at most `width` columns. Longer words, such as paths, are split."""
    rows: list[str] = []
    current = ""
    space = width - len(indent)
    for word in (piece for whole in text.split() for piece in _pieces(whole, space)):
        if current and cells(current) + 1 + cells(word) > space:
            rows.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    if current:
        rows.append(current)
    return [[span(indent + row, role)] for row in rows]


def _pieces(word: str, width: int) -> Iterator[str]:
    """Split a word into pieces of at most `width` columns."""
    while cells(word) > max(1, width):
        size = max(1, len(set_cell_size(word, max(1, width)).rstrip()))
        yield word[:size]
        word = word[size:]
    if word:
        yield word


def fact_lines(facts: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Format facts as lines, with the names in a column. Long values span several lines. Wide terminals show
    two facts side by side."""
    if width >= _TWO_COLUMNS and len(facts) > 3:
        middle, size = (len(facts) + 1) // 2, (width - 2) // 2
        left, right = fact_column(facts[:middle], size), fact_column(facts[middle:], size)
        return beside(left, right, size, size, 2)
    return fact_column(facts, width)


def fact_column(facts: Iterable[tuple[str, str]], width: int, name_width: int = _NAME_WIDTH) -> list[Line]:
    """Format facts as lines, with the facts one below the other even in wide terminals."""
    lines = []
    for name, value in facts:
        first, *others = wrap(value, width - name_width) or [BLANK]
        lines.append([span(f"{name:<{name_width}}", "label"), *first])
        lines += [[span(" " * name_width), *rest] for rest in others]
    return lines


def titles(*columns: tuple[str, int]) -> Line:
    """Return a table's title line from each column's title and width. A negative width aligns the title to
    the left."""
    return [
        span(f"{title:<{-width}}" if width < 0 else f"{title:>{width}}", "label") for title, width in columns
    ]


def plain(spans: Iterable[Span]) -> str:
    """Return a line's text without styles."""
    return "".join(one.text for one in spans).rstrip()
