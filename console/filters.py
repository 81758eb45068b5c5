"""The filter language of tables. Terms are separated by spaces, and a row must match all of them:

- `text`: a column contains the text;
- `field:text`: the column `field` contains the text, and `!field:text`: the column does not contain the text;
- `field>100`, `field<=2.5k`, `field>350ms`: compare the value in the column, in the units that it shows;
- `>100`: the same for the column that the table is sorted by.

A field is the heading of a column, in upper or lower case and with `_` for spaces, or the name of the column
in the admin API.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Cell = str | float | int | None
_FIELD = r"[A-Za-z_][\w/]*"
_COMPARE = re.compile(rf"(?P<field>(?:{_FIELD})?)(?P<sign>>=|<=|>|<|=)(?P<value>[0-9.][0-9.A-Za-zµ°%]*)$")
_PART = re.compile(r"([0-9.]+)([A-Za-zµ°%]*)")
_CONTAINS = re.compile(rf"(?P<negation>!?)(?P<field>{_FIELD}):(?P<text>.*)$")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_UNITS: dict[str, dict[str, float]] = {
    "": {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    "s": {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "us": 1e-6, "µs": 1e-6, "min": 60.0},
    "bytes": {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40, "B": 1.0}
    | {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    "%": {"%": 0.01},
    "W": {"W": 1.0},
    "°C": {"°C": 1.0, "°": 1.0, "C": 1.0},
}
"""For each unit of a column's value: the units that can be entered, with their factors."""


class FilterField(NamedTuple):
    """A column by which rows can be filtered."""

    names: tuple[str, ...]
    """Names of the column in lower case. Messages show the first one."""
    value: Callable[[Any], Cell]
    text: Callable[[Any], str]
    """Returns the text that the column shows."""
    unit: str = ""
    """The unit of the value, as in `_UNITS`. A value in "%" is a fraction."""


class FilterError(ValueError):
    """Raised for a filter that names an unknown column or has an invalid number."""


def matcher(text: str, fields: Sequence[FilterField], sorted_by: str) -> Callable[[Any], bool]:
    """Return a function that decides whether a row matches a filter. `sorted_by` is a name of the column that
    the table is sorted by, or empty. Raises FilterError."""
    tests = [_term(term, fields, sorted_by) for term in text.split()]
    return lambda row: all(test(row) for test in tests)


def _term(term: str, fields: Sequence[FilterField], sorted_by: str) -> Callable[[Any], bool]:
    if found := _COMPARE.match(term):
        field = _field(found["field"] or sorted_by, fields)
        get, limit = field.value, _limit(found["value"], field)
        compare = _SIGNS[found["sign"]]
        return lambda row: isinstance(value := get(row), int | float) and compare(value, limit)
    if found := _CONTAINS.match(term):
        field, wanted, negated = (
            _field(found["field"], fields),
            found["text"].lower(),
            bool(found["negation"]),
        )

        def contains(row: Any) -> bool:
            return wanted in str(field.value(row)).lower() or wanted in field.text(row).lower()

        return lambda row: contains(row) is not negated
    wanted, every = term.lower(), [field.value for field in fields]
    return lambda row: any(isinstance(value := get(row), str) and wanted in value.lower() for get in every)


def _limit(text: str, field: FilterField) -> float:
    """Return a number with its unit, such as 350ms or 2m30s, in the unit of a column. Raises FilterError."""
    known = _UNITS[field.unit]
    parts = _PART.findall(text)
    try:
        # Only durations consist of several parts.
        if len(parts) == 1 or field.unit == "s":
            return sum(float(number) * (known[unit] if unit else 1.0) for number, unit in parts)
    except (ValueError, KeyError):
        pass
    name, example = field.names[0], next(iter(known))
    raise FilterError(
        f"{text!r} is not a value of {name}: use {', '.join(known)}, as in {name}>20{example}, or no unit"
    )


def _field(name: str, fields: Sequence[FilterField]) -> FilterField:
    found = next((field for field in fields if name.lower() in field.names), None)
    if found is None:
        raise FilterError(f"unknown column {name!r}: use one of {', '.join(one.names[0] for one in fields)}")
    return found


def sort_rows(rows: Sequence[Any], get: Callable[[Any], Cell], *, reverse: bool) -> list[Any]:
    """Return rows sorted by a column. Rows without a known value come last in both directions."""
    known = [row for row in rows if get(row) is not None]
    unknown = [row for row in rows if get(row) is None]
    # A column may contain both numbers and text. Numbers come first.
    known.sort(key=lambda row: (isinstance(value := get(row), str), value), reverse=reverse)
    return [*known, *unknown]
