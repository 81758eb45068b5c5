"""Compare: values at two times, side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from appliance.events.values import SnapshotValue, named_values
from appliance.snapshot import Snapshot
from console import units
from console.context import Context
from console.keys import key_of
from console.lines import BLANK, Line, heading, span, wrap
from console.screens.table import TableColumn, TableView

_TIMESTAMP = re.compile(r"(^|\.)at$")
"""Matches the names of timestamps, which say when other values were read."""
_TIME = re.compile(r"(^|[._])(at|since|until)$")
"""Matches the names of values in unix seconds."""
_FRACTION, _BYTES = "fraction", "bytes"
_UNITS = (
    (re.compile(r"_bytes_per_s$"), "bytes/s"),
    (re.compile(r"_per_s$"), "/s"),
    (re.compile(r"_us(_per_token)?$"), " µs"),
    (re.compile(r"_ms$"), " ms"),
    (re.compile(r"_(s|seconds)$"), " s"),
    (re.compile(r"_bytes$"), _BYTES),
    (re.compile(r"_percent$"), "%"),
    (re.compile(r"_w$"), " W"),
    (re.compile(r"_c$"), " °C"),
    (re.compile(r"_mhz$"), " MHz"),
    (re.compile(r"(^|_)(share|hit_rate|busy|fraction)$"), _FRACTION),
)
"""Units of metrics, by the suffix of the metric's name. All other metrics are counts."""


class Difference(NamedTuple):
    """A value at two times. None means that it was unknown or that its entry did not exist."""

    name: str
    first: SnapshotValue
    second: SnapshotValue

    @property
    def difference(self) -> float | None:
        """The second value minus the first, or None if the values are not numbers."""
        first, second = self.first, self.second
        if not isinstance(first, int | float) or not isinstance(second, int | float):
            return None
        return None if isinstance(first, bool) else second - first

    @property
    def is_time(self) -> bool:
        """Whether the values are times, in unix seconds."""
        return _TIME.search(self.name) is not None

    @property
    def unit(self) -> str:
        """The values' unit, or an empty string for counts and texts."""
        name = self.name.rpartition(".")[2].partition("[")[0]
        return next((unit for pattern, unit in _UNITS if pattern.search(name)), "")

    @property
    def change(self) -> float | None:
        """The difference as a fraction of the first value. None for times, which have no meaningful zero."""
        difference = self.difference
        if difference is None or self.is_time or not isinstance(self.first, int | float) or not self.first:
            return None
        return difference / abs(self.first)


def differences(first: Snapshot, second: Snapshot, *, every: bool) -> list[Difference]:
    """Return the metrics' values at two times, without timestamps. If `every` is false, return only values
    that differ."""
    one, other = named_values(first), named_values(second)
    names = [*one, *(name for name in other if name not in one)]
    rows = [Difference(name, one.get(name), other.get(name)) for name in names if not _TIMESTAMP.search(name)]
    return rows if every else [row for row in rows if row.first != row.second]


class CompareView(TableView[Difference]):
    """The screen that compares two times."""

    name = "compare"
    key = "c"
    title = "Compare"
    short = "Compare"
    help_text = (
        "The metrics at two times: the one chosen with {compare}, and the displayed one. Metrics are "
        "named as in the admin API. Press {variant} to switch between changed metrics and all metrics."
    )
    variants = ("changed", "all")
    sorted_by = ""
    empty = "no metric changed between the two times"
    columns = (
        TableColumn(
            "metric", "METRIC", 28, lambda r: r.name, right=False, flexible=True, role=lambda r: "bold"
        ),
        TableColumn("first", "FIRST", 14, lambda r: r.first, lambda r: _text(r, r.first)),
        TableColumn("second", "SECOND", 14, lambda r: r.second, lambda r: _text(r, r.second)),
        TableColumn(
            "difference",
            "DIFFERENCE",
            12,
            lambda r: r.difference,
            lambda r: _difference(r),
            drop=1,
            role=lambda r: "accent",
        ),
        TableColumn(
            "change",
            "CHANGE",
            8,
            lambda r: r.change,
            lambda r: _change(r.change),
            drop=2,
            unit="%",
        ),
    )
    explanations = tuple(column.name for column in columns)

    def __init__(self) -> None:
        super().__init__()
        self._compared: tuple[Snapshot, Snapshot, str] | None = None
        """The two snapshots and the variant from which the rows were computed."""
        self._rows: list[Difference] = []

    def rows(self, context: Context) -> Sequence[Difference]:
        first, second = context.compared, context.snapshot
        if first is None or second is None:
            return []
        wanted, known = (first.snapshot, second, self.variant), self._compared
        if known is None or any(one is not other for one, other in zip(wanted, known, strict=True)):
            self._rows = differences(first.snapshot, second, every=self.variant == "all")
            self._compared = wanted
        return self._rows

    def id_of(self, row: Difference) -> str:
        return row.name

    def note(self, context: Context) -> str:
        if context.compared is None or context.snapshot is None:
            return ""
        return f"first {units.date(context.compared.at)} · second {units.date(context.snapshot.at)}"

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        if context.compared is None:
            key = key_of(context.keys, "compare")
            text = f"Go to a time and press {key}, then go to another time and press {key} again."
            return [heading(self.title, width), BLANK, *wrap(text, width, "dim")]
        return super().render(context, width, height)

    def describe(self, row: Difference, context: Context, width: int) -> list[Line]:
        facts = (
            ("first", _text(row, row.first, units.date)),
            ("second", _text(row, row.second, units.date)),
            ("difference", _difference(row)),
            ("change", _change(row.change)),
        )
        return [BLANK, *([span(f"{name:<16}", "dim"), span(text)] for name, text in facts)]


def _text(row: Difference, value: SnapshotValue, date: Callable[[float], str] = units.short_date) -> str:
    """Format one of a row's values. `date` formats values that are times."""
    if value is None:
        return units.UNKNOWN
    if isinstance(value, bool | str):
        return str(value)
    if row.is_time:
        return date(value)
    return f"{'-' if value < 0 else ''}{_measure(value, row.unit)}"


def _difference(row: Difference) -> str:
    value = row.difference
    if value is None:
        return units.UNKNOWN
    sign = "-" if value < 0 else "+"
    if row.is_time:
        return f"{sign}{units.seconds(abs(value))}"
    if row.unit == _FRACTION:
        return f"{sign}{100 * abs(value):.1f} points"
    return f"{sign}{_measure(value, row.unit)}"


def _change(value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    return f"{'-' if value < 0 else '+'}{units.percent(abs(value), 1 if abs(value) < 0.1 else 0)}"


def _measure(value: float, unit: str) -> str:
    """Format a value with its unit but without its sign."""
    size = abs(value)
    if unit == _FRACTION:
        return units.percent(size, 1)
    if unit.startswith(_BYTES):
        return units.size(size) + unit.removeprefix(_BYTES)
    if isinstance(value, int):
        return f"{size:,}{unit}"
    # Large numbers get fewer decimals, and numbers near zero get more.
    form = ".0f" if not size else ".1f" if size >= 100 else ".2f" if size >= 1 else ".4f"
    return f"{size:,{form if not 0 < size < 0.001 else '.3g'}}{unit}"
