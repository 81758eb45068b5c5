"""The base class of all screens."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.actions import Action, TargetKind
from console.context import Context
from console.filters import Cell
from console.lines import Line, clip, span
from console.roles import Role
from console.source import ListName

MIN_WIDTH, MIN_HEIGHT = 60, 18
"""Minimum size for panels and tables. In smaller terminals, screens show one fact per line instead."""


PAGE, FAR = 10, 1_000_000
"""Numbers of rows by which the cursor moves: one page, or enough to reach the first or last row."""


JUMP_LETTERS = "asdfghjklqwertyuiopzxcvbnmASDFGHJKLQWERTYUIOPZXCVBNM"
"""Letters for rows and panels in jump mode, from top to bottom."""


Table = tuple[list[str], list[list[Cell]]]
"""A table's column names and rows."""
Fact = tuple[str, str, Role]
"""A value's name, its displayed text and the text's style role."""


def table(rows: Iterable[object], *names: str) -> Table:
    """Return a table with the given fields of the rows as columns."""
    return list(names), [[getattr(row, name) for name in names] for row in rows]


class View:
    """One screen. A view stores only the operator's choices for the screen, such as the cursor and sort
    order, and no data from the service."""

    name = ""
    key = ""
    title = ""
    short = ""
    """Title for narrow terminals."""
    target: TargetKind = "service"
    """The kind of object shown in the screen's rows. It determines which actions the screen offers."""
    variants: tuple[str, ...] = ()
    """Names of the screen's variants. The key `v` cycles through them."""
    alternate = ""
    """Name of the screen that shares this screen's key. `v` switches to it."""
    can_zoom = False
    """Whether a single panel of the screen can be maximized."""
    can_jump = False
    """Whether the screen has rows or panels to jump to."""
    reads_blocks = False
    """Whether the screen shows individual KV blocks, or the blocks of each request."""
    help_text = ""
    """Short description of the screen."""
    explanations: tuple[str, ...] = ()
    """Names of the screen's values in `console.explanations`, for the help."""

    def __init__(self) -> None:
        self.variant = self.variants[0] if self.variants else ""
        self.scroll = 0
        self.zoomed = False
        """Whether only the selected panel is shown."""

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        """Commands from the key table to show in this screen's footer, each with a short label."""
        return ()

    def lists(self) -> tuple[ListName, ...]:
        """Return the names of the lists that the screen shows."""
        return ()

    def required_lists(self) -> tuple[ListName, ...]:
        """Return the names of the lists that the screen cannot do without."""
        return self.lists()

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        """Return the screen's contents in up to `height` lines."""
        raise NotImplementedError

    def facts(self, context: Context) -> list[Fact]:
        """Return the screen's most important values, for small terminals."""
        raise NotImplementedError

    def small(self, context: Context, width: int, height: int) -> list[Line]:
        """Return the screen's lines for small terminals: one line per fact."""
        facts = self.facts(context)
        self.scroll = max(0, min(self.scroll, len(facts) - height))
        name_width = min(max((len(name) for name, _, _ in facts), default=0), width // 2)
        return [
            clip([span(f"{name:<{name_width}}  ", "dim"), span(value, role)], width)
            for name, value, role in facts[self.scroll : self.scroll + height]
        ]

    def export(self, context: Context) -> Table:
        """Return the screen's table: its column names, and all rows that match the filter."""
        raise NotImplementedError

    def move(self, rows: int) -> None:
        """Move the cursor, or scroll, by `rows` rows. A large number moves to the first or last row."""
        self.scroll = max(0, self.scroll + rows)

    def sideways(self, columns: int) -> None:
        """Move the cursor to another column."""

    def next_variant(self) -> None:
        """Show the next variant."""
        if self.variants:
            self.variant = self.variants[(self.variants.index(self.variant) + 1) % len(self.variants)]
            self.scroll = 0

    def zoom(self) -> bool:
        """Show only the selected panel, or all panels again. Return False if the screen has only one
        panel."""
        self.zoomed = self.can_zoom and not self.zoomed
        return self.can_zoom

    def open(self) -> bool:
        """Open the details of the row under the cursor. Return whether the view has details."""
        return False

    def jump(self, number: int) -> bool:
        """Move the cursor to a visible row or panel, counting from 0. Return False if it does not exist."""
        return False

    def request(self, context: Context) -> str:
        """Return the id of the request that the row under the cursor refers to, or an empty string if the
        rows are requests themselves."""
        return ""

    def back(self) -> bool:
        """Close the details, or show all panels again. Return False if there was nothing to do."""
        was_zoomed, self.zoomed = self.zoomed, False
        return was_zoomed

    def selected(self, context: Context) -> list[str]:
        """Return the names of the marked objects, or of the object under the cursor."""
        return []

    def accepts(self, action: Action) -> bool:
        """Return whether an action applies to the screen's rows."""
        return action.target == self.target

    def targets(self, action: Action, context: Context) -> list[str]:
        """Return the names of the selected objects in the form that `action` requires. The screen must accept
        the action."""
        return self.selected(context)

    def has_target(self, name: str, context: Context) -> bool:
        """Return whether this object is still among the screen's rows."""
        return True
