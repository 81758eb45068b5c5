"""The widget that shows a frame's lines. It sends only the changed part of each changed line to the terminal,
so that the console needs little bandwidth over SSH."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from console.keys import ALL_COMMANDS, NO_KEY
from console.lines import Line, Span, cells
from console.themes import ThemeName, style


class FrameWidget(Widget, can_focus=True):
    """Shows lines and translates keys and mouse clicks into commands."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "FrameWidget { height: 1fr; width: 1fr; }"
    BINDINGS: ClassVar = [
        Binding(
            ",".join(key.keys) or NO_KEY,
            f"app.run({key.command!r})",
            key.title,
            show=False,
            id=key.command,
        )
        for key in ALL_COMMANDS
    ]

    class Clicked(Message):
        """Sent when a line, or a span with a command, is clicked."""

        def __init__(self, command: str, y: int) -> None:
            super().__init__()
            self.command = command
            self.y = y

    class Scrolled(Message):
        """Sent when the mouse wheel is turned."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

    def __init__(self) -> None:
        super().__init__()
        self.auto_links = False
        self._lines: list[Line] = []
        self._theme: ThemeName = "dark"

    def show(self, lines: list[Line], theme: ThemeName) -> None:
        """Show lines, drawing only what differs from the lines shown before."""
        before, self._lines = self._lines, lines
        if theme != self._theme or len(before) != len(lines):
            self._theme = theme
            self.refresh()
            return
        width = self.size.width
        changed = []
        for y, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old != new:
                changed.append(Region(0, y, min(width, changed_until(old, new)), 1))
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        """Return line `y` for Textual."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        return Strip(
            [
                Segment(one.text, style(self._theme, one.role, selected=one.selected))
                for one in merged(self._lines[y])
            ]
        )

    def on_click(self, event: events.Click) -> None:
        """Run the clicked span's command."""
        if event.y >= len(self._lines):
            return
        x = event.x
        for one in self._lines[event.y]:
            x -= cells(one.text)
            if x < 0:
                self.post_message(self.Clicked(one.action, event.y))
                return

    def on_mouse_scroll_down(self) -> None:
        """Move the cursor down."""
        self.post_message(self.Scrolled(3))

    def on_mouse_scroll_up(self) -> None:
        """Move the cursor up."""
        self.post_message(self.Scrolled(-3))


def merged(line: Line) -> Line:
    """Merge adjacent spans that look the same. Spaces get the role of the preceding span, unless that role
    has a background or the row is under the cursor."""
    result: Line = []
    for one in line:
        if not one.text:
            continue
        if result:
            last = result[-1]
            blank = one.text.isspace() and one.role == "text" and last.role in _PLAIN and not one.selected
            if one.selected == last.selected and (one.role == last.role or blank):
                result[-1] = Span(last.text + one.text, last.role, selected=last.selected)
                continue
        result.append(one)
    return result


_PLAIN = frozenset(
    (
        *(
            "text",
            "label",
            "dim",
            "bold",
            "title",
            "rule",
            "track",
            "accent",
            "key",
            "good",
            "bad",
            "info",
            "mark",
        ),
        *("input", "output", "p0", "p1", "p2", "p3", "prefill", "decode"),
    )
)
"""Roles whose spaces look the same in every theme. "warn" is not among them, because the mono theme
underlines it."""


def changed_until(old: Line, new: Line) -> int:
    """Return the column after the last difference between two lines of equal width."""
    end = sum(cells(one.text) for one in new)
    for one, other in zip(reversed(old), reversed(new), strict=False):
        same = one.role == other.role and one.selected == other.selected
        if same and one.text == other.text:
            end -= cells(other.text)
            continue
        if same and one.text.isascii() and other.text.isascii():
            shared = 0
            for a, b in zip(reversed(one.text), reversed(other.text), strict=False):
                if a != b:
                    break
                shared += 1
            end -= shared
        break
    return end
