"""A table with sorting, filtering, marks and a detail view. Only visible rows are formatted, so the cost of a
frame hardly depends on the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from console import units
from console.context import Context
from console.filters import Cell, FilterError, FilterField, ValueUnit, matcher, sort_rows
from console.keys import key_of
from console.lines import BLANK, Line, Span, clip, fit, heading, is_heading, span, wrap
from console.roles import Role
from console.screens.base import JUMP_LETTERS, Fact, Table, View

R = TypeVar("R")
_MIN_PREVIEW = 6
"""Details are shown below a table only if at least this many lines are free there."""
_CONTENTS = {"callers": "keys and local users", "models": "versions", "finished": "finished requests"}
"""Descriptions of lists whose names do not say what they contain."""


class TableColumn(NamedTuple):
    """A column. Its name identifies it in exports and filters. A column that shows an admin API field
    unchanged has that field's name."""

    name: str
    title: str
    width: int
    value: Callable[[Any], Cell]
    """Returns a row's value for filters and exports, and for sorting unless `rank` is given."""
    text: Callable[[Any], str] | None = None
    """Formats a row's cell. By default, the cell shows the value as text."""
    right: bool = True
    drop: int = 0
    """Order in which narrow terminals drop columns: the highest number first. A column with 0 is never
    dropped."""
    role: Callable[[Any], Role] | None = None
    flexible: bool = False
    """Whether the column takes up the remaining width."""
    unit: ValueUnit = ""
    """The value's unit in filters."""
    rank: Callable[[Any], Cell] | None = None
    """Returns the value to sort a row by, if it differs from `value`."""
    fact: str = ""
    """The value's name in small terminals; by default, the column's heading."""

    @property
    def names(self) -> tuple[str, str]:
        """The column's names in filters and in the `sort` command: its heading and its name."""
        return self.title.lower().replace(" ", "_"), self.name

    @property
    def fact_name(self) -> str:
        """The value's name in small terminals. To save space, text values are shown without a name."""
        return (self.fact or self.title.lower()) if self.right else ""

    def shown(self, row: Any) -> str:
        """Return a cell's text."""
        if self.text is not None:
            return self.text(row)
        value = self.value(row)
        return "--" if value is None else str(value)


class TableView(View, Generic[R]):
    """A screen that consists of one table."""

    can_jump = True
    columns: tuple[TableColumn, ...] = ()
    sorted_by = ""
    """Name of the initial sort column."""
    reverse = False
    empty = "no rows"
    max_rows = 0
    """Maximum number of rows if the source delivers only the newest ones; 0 if it delivers all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = ""
        self.error = ""
        """Why the filter is invalid, or an empty string."""
        self.marks: set[str] = set()
        self.ended_marks = 0
        """Number of marked rows that have disappeared since the operator last changed the marks."""
        self.cursor = ""
        """Id of the row under the cursor. The cursor stays on its row when the order changes."""
        self.detail = ""
        """Id of the row whose detail view is open."""
        self._index = 0
        self._order: list[str] = []
        self.scroll_detail = 0
        self._visible = range(0)
        """Indices of the visible rows."""
        self._jumping = False

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        """Commands shown in the footer."""
        if self.detail:
            return (("back", "close"), ("copy", "copy"))
        return (("open", "open"), ("filter", "filter"), ("sort next", "sort"), ("mark", "mark"))

    # ── what subclasses define ───────────────────────────────────────────────────────────────

    def rows(self, context: Context) -> Sequence[R]:
        """Return the rows."""
        raise NotImplementedError

    def id_of(self, row: R) -> str:
        """Return a row's id."""
        raise NotImplementedError

    def title_of(self, row: R) -> str:
        """Return the heading of a row's detail view."""
        return self.id_of(row)

    def describe(self, row: R, context: Context, width: int) -> list[Line]:
        """Return the lines of a row's detail view."""
        raise NotImplementedError

    def note(self, context: Context) -> str:
        """Return a short text for the table's heading, such as a total."""
        return ""

    # ── rendering ────────────────────────────────────────────────────────────────────────────

    def ordered(self, context: Context) -> list[R]:
        """Return the rows that match the filter, in the chosen order."""
        found: Sequence[R] = self.rows(context)
        self.error = ""
        if self.filter:
            fields = [
                FilterField(column.names, column.value, column.shown, column.unit) for column in self.columns
            ]
            try:
                now = context.snapshot.at if context.snapshot else 0.0
                matches = matcher(self.filter, fields, self.sorted_by, now)
                found = [row for row in found if matches(row)]
            except FilterError as error:
                self.error = str(error)
        if self.sorted_by:
            chosen = next(column for column in self.columns if column.name == self.sorted_by)
            found = sort_rows(found, chosen.rank or chosen.value, reverse=self.reverse)
        return list(found)

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        if missing := self._missing(context):
            return [heading(self.title, width), BLANK, *wrap(missing[0], width, missing[1])]
        self._jumping, self._visible = context.jumping, range(0)
        self._drop_ended_marks(context)
        rows = self.ordered(context)
        self._order = [self.id_of(row) for row in rows]
        outdated = self._outdated(context, width)
        if self.detail:
            return [*outdated, *self._detail(rows, context, width, height - len(outdated))]
        total = len(self.rows(context)) if self.filter else len(rows)
        is_cut = 0 < self.max_rows <= total
        if self.filter:
            counted = f" {len(rows)} of {'the newest ' if is_cut else ''}{total}"
        else:
            counted = f", newest {total}" if is_cut else f" {total}"
        title = " · ".join([f"{self.title}{counted}", *self._marked()])
        lines = [heading(title, width, self.note(context)), *outdated]
        if self.filter:
            lines.append(self._filter_line(context))
        lines += self.above(context, width)
        shown = self._fitting(width)
        lines.append(self._titles(shown, width))
        lines += self._body(rows, shown, context, width, height - len(lines))
        return [*lines, *self.below(rows, context, width, height - len(lines))]

    def _drop_ended_marks(self, context: Context) -> None:
        """Remove marks from rows that are no longer in the list. While viewing history, keep all marks."""
        if self.marks and not context.is_past:
            ended = self.marks - {self.id_of(row) for row in self.rows(context)}
            self.marks -= ended
            self.ended_marks += len(ended)

    def _marked(self) -> list[str]:
        """Describe how many rows are marked, and how many marked rows have disappeared."""
        texts = []
        if self.marks:
            hidden = len(self.marks.difference(self._order))
            texts.append(f"{len(self.marks)} marked" + (f" ({hidden} not shown)" if hidden else ""))
        if self.ended_marks:
            texts.append(f"{units.counted(self.ended_marks, 'marked row')} no longer listed")
        return texts

    def _clear_marks(self) -> None:
        self.marks, self.ended_marks = set(), 0

    def _filter_line(self, context: Context) -> Line:
        return [
            span(key_of(context.keys, "filter"), "key"),
            span(self.filter, "bold"),
            span(f"  {self.error or self._hint(context, '({} to clear)')}", "bad" if self.error else "dim"),
        ]

    def above(self, context: Context, width: int) -> list[Line]:
        """Return lines to show between the heading and the table."""
        return []

    def below(self, rows: list[R], context: Context, width: int, height: int) -> list[Line]:
        """Fill the space below a short table with the details of the row under the cursor."""
        row = next((row for row in rows if self.id_of(row) == self.cursor), None)
        if row is None or height < _MIN_PREVIEW:
            return []
        body = self.describe(row, context, width)
        body = body[next((number for number, one in enumerate(body) if one), 0) :]
        top = heading(self.title_of(row), width, self._hint(context, "{} to open", "open"))
        lines = [BLANK, top, *body][:height]
        while lines and is_heading(lines[-1]):  # Drop a heading whose contents did not fit.
            lines.pop()
        return lines

    @staticmethod
    def _hint(context: Context, text: str, command: str = "back") -> str:
        """Insert the name of a command's key into `text`. Return an empty string if the command has no
        key."""
        key = key_of(context.keys, command)
        return text.format(key) if key else ""

    def _missing(self, context: Context) -> tuple[str, Role] | None:
        """Return the text and role to show while a required list has not been read, or None if all have been
        read."""
        for name in self.required_lists():
            if name not in context.rows:
                error = context.row_errors.get(name, "")
                return (error, "warn") if error else ("loading…", "dim")
        return None

    def _outdated(self, context: Context, width: int) -> list[Line]:
        """Return a line for each list whose rows are out of date because the last read failed."""
        return [
            clip(
                [span(f"! {_CONTENTS.get(name, name)} not updated: {context.row_errors[name]}", "warn")],
                width,
            )
            for name in self.lists()
            if name in context.rows and name in context.row_errors
        ]

    def facts(self, context: Context) -> list[Fact]:
        if missing := self._missing(context):
            return [(self.title.lower(), *missing)]
        facts: list[Fact] = []
        for row in self.ordered(context):
            cells = [
                f"{column.fact_name} {column.shown(row).strip()}".strip()
                for column in self.columns[1:]
                if not column.drop
            ]
            facts.append((self.columns[0].shown(row).strip(), " ".join(cells), "text"))
        return facts or [(self.title.lower(), self._empty_text(context), "dim")]

    def small(self, context: Context, width: int, height: int) -> list[Line]:
        """Return one line per row, with the cursor, filter and marks, or one row's details."""
        if self._missing(context):
            return super().small(context, width, height)
        self._drop_ended_marks(context)
        rows = self.ordered(context)
        self._order = [self.id_of(row) for row in rows]
        outdated = self._outdated(context, width)
        if self.detail:
            return [*outdated, *self._detail(rows, context, width, height - len(outdated))]
        facts = self.facts(context)
        above = facts[: len(facts) - len(rows)]
        lines = [clip([span(f"{name}  ", "dim"), span(value, role)], width) for name, value, role in above]
        lines += outdated
        if self.ended_marks:
            lines.append(clip([span(" · ".join(self._marked()), "dim")], width))
        if self.filter:
            lines.append(clip(self._filter_line(context), width))
        self._follow_cursor(height - len(lines))
        letters = JUMP_LETTERS if context.jumping else ""
        for place, index in enumerate(self._visible):
            name, value, role = facts[len(above) + index]
            selected = index == self._index
            mark = "*" if self._order[index] in self.marks else "▸" if selected else " "
            first = Span(letters[place], "tab") if place < len(letters) else Span(mark, "accent")
            row = clip([first, span(f"{name}  ", "dim"), span(value, role)], width)
            lines.append([one._replace(selected=True) for one in row] if selected else row)
        return lines

    def export(self, context: Context) -> Table:
        names = [column.name for column in self.columns]
        return names, [[column.value(row) for column in self.columns] for row in self.ordered(context)]

    def _body(
        self, rows: list[R], shown: list[tuple[TableColumn, int]], context: Context, width: int, height: int
    ) -> list[Line]:
        if not rows:
            return wrap(self._empty_text(context), width, "dim")
        self._follow_cursor(height)
        lines = [
            self._row(rows[index], shown, width, selected=index == self._index) for index in self._visible
        ]
        if self._jumping:
            lines = [
                [Span(letter, "tab"), *row[1:]] for letter, row in zip(JUMP_LETTERS, lines, strict=False)
            ] + lines[len(JUMP_LETTERS) :]
        return lines

    def _empty_text(self, context: Context) -> str:
        return "no rows match the filter" if self.filter else self.empty_text(context)

    def empty_text(self, context: Context) -> str:
        """Return the text to show in a table without rows."""
        return self.empty

    def _follow_cursor(self, height: int) -> None:
        """Scroll to keep the row under the cursor visible in a table of this height."""
        if self.cursor in self._order:
            self._index = self._order.index(self.cursor)
        self._index = max(0, min(self._index, len(self._order) - 1))
        if self._order:
            self.cursor = self._order[self._index]
        if self._index < self.scroll:
            self.scroll = self._index
        elif self._index >= self.scroll + height:
            self.scroll = self._index - height + 1
        self.scroll = max(0, min(self.scroll, len(self._order) - height))
        self._visible = range(self.scroll, min(len(self._order), self.scroll + height))

    def _row(self, row: R, shown: list[tuple[TableColumn, int]], width: int, *, selected: bool) -> Line:
        mark = self.id_of(row) in self.marks
        spans: Line = [Span("*" if mark else "▸" if selected else " ", "mark" if mark else "accent")]
        for column, size in shown:
            role: Role = column.role(row) if column.role else "text"
            text = span(column.shown(row)).text
            spans.append(Span(fit(text, size, right=column.right), role))
            spans.append(Span(" "))
        spans = clip(spans, width)
        return [one._replace(selected=True) for one in spans] if selected else spans

    def _titles(self, shown: list[tuple[TableColumn, int]], width: int) -> Line:
        spans: Line = [Span(" ")]
        for column, size in shown:
            mine = column.name == self.sorted_by
            arrow = ("▼" if self.reverse else "▲") if mine else ""
            text = fit(column.title + arrow, size, right=column.right)
            spans.append(Span(text, "accent" if mine else "dim", f"sort {column.name}"))
            spans.append(Span(" "))
        return clip(spans, width)

    def _fitting(self, width: int) -> list[tuple[TableColumn, int]]:
        """Return the columns that fit in this width, with their widths."""
        shown = list(self.columns)

        def excess() -> int:
            return 1 + sum(self._width(column) + 1 for column in shown) - width

        for column in sorted(self.columns, key=lambda column: -column.drop):
            if excess() <= 0 or not column.drop:
                break
            shown.remove(column)
        flexible = [column for column in shown if column.flexible]
        # If the remaining width is negative, the column shrinks.
        share = -excess() // max(1, len(flexible))

        def size(column: TableColumn) -> int:
            width = self._width(column)
            return max(len(column.title) + 1, width + share) if column.flexible else width

        return [(column, size(column)) for column in shown]

    def _width(self, column: TableColumn) -> int:
        """Return a column's width. The sort column needs extra space for an arrow."""
        return max(column.width, len(column.title) + (column.name == self.sorted_by))

    def _detail(self, rows: list[R], context: Context, width: int, height: int) -> list[Line]:
        row = next((row for row in rows if self.id_of(row) == self.detail), None)
        top = heading(f"{self.title} ▸ {self.detail}", width, self._hint(context, "{} to close"))
        if row is None:
            return [top, BLANK, [span("this row is no longer in the list", "dim")]]
        body = self.describe(row, context, width)
        self.scroll_detail = max(0, min(self.scroll_detail, len(body) - height + 1))
        return [top, *body[self.scroll_detail : self.scroll_detail + height - 1]]

    # ── keys ─────────────────────────────────────────────────────────────────────────────────

    def move(self, rows: int) -> None:
        if self.detail:
            self.scroll_detail += rows
        elif self._order:
            self._index = max(0, min(len(self._order) - 1, self._index + rows))
            self.cursor = self._order[self._index]
        else:
            super().move(rows)

    def jump(self, number: int) -> bool:
        if number >= len(self._visible):
            return False
        self._index = self._visible[number]
        self.cursor = self._order[self._index]
        return True

    def open(self) -> bool:
        if self.cursor in self._order:
            self.detail, self.scroll_detail = self.cursor, 0
        return True

    def zoom(self) -> bool:
        """Open the details of the row under the cursor, or close them if they are already open."""
        if self.detail:
            self.detail = ""
            return True
        return self.cursor in self._order and self.open()

    def back(self) -> bool:
        if self.detail:
            self.detail = ""
        elif self.filter:
            self.filter = ""
        elif self.marks or self.ended_marks:
            self._clear_marks()
        else:
            return False
        return True

    def toggle_mark(self) -> None:
        """Mark or unmark the row under the cursor and move to the next row."""
        if self.cursor in self._order:
            self.marks ^= {self.cursor}
            self.ended_marks = 0
            self.move(1)

    def sort(self, name: str) -> None:
        """Sort by a column, or reverse the order if the table is already sorted by it."""
        if name == self.sorted_by:
            self.reverse = not self.reverse
        else:
            self.sorted_by, self.reverse = name, next(c.right for c in self.columns if c.name == name)

    def next_sort(self, step: int) -> None:
        """Sort by the next column, or by the previous one if `step` is negative."""
        names = [column.name for column in self.columns]
        at = names.index(self.sorted_by) if self.sorted_by in names else -step
        self.sort(names[(at + step) % len(names)])

    def selected(self, context: Context) -> list[str]:
        if self.detail:
            return [self.detail]
        if self.marks:
            return [name for name in self._order if name in self.marks]
        return [self.cursor] if self.cursor in self._order else []

    def has_target(self, name: str, context: Context) -> bool:
        return any(self.id_of(row) == name for row in self.rows(context))
