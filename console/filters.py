"""The filter language of tables. Terms are separated by spaces, and a row must match all of them:

- `text`: a column contains the text;
- `field:text`: the column `field` contains the text, and `!field:text`: the column does not contain the text;
- `field>100`, `field<=2.5k`: compare the number in the column; k, M and G multiply, % divides by 100;
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
_COMPARE = re.compile(rf"(?P<field>(?:{_FIELD})?)(?P<sign>>=|<=|>|<|=)(?P<number>[0-9.]+)(?P<unit>[kMG%]?)$")
_CONTAINS = re.compile(rf"(?P<negation>!?)(?P<field>{_FIELD}):(?P<text>.*)$")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "%": 0.01}


class FilterField(NamedTuple):
    """A column by which rows can be filtered."""

    names: tuple[str, ...]
    """Names of the column in lower case. Messages show the first one."""
    value: Callable[[Any], Cell]
    text: Callable[[Any], str]
    """Returns the text that the column shows."""


class FilterError(ValueError):
    """Raised for a filter that names an unknown column or has an invalid number."""


def matcher(text: str, fields: Sequence[FilterField], sorted_by: str) -> Callable[[Any], bool]:
    """Return a function that decides whether a row matches a filter. `sorted_by` is a name of the column that
    the table is sorted by, or empty. Raises FilterError."""
    tests = [_term(term, fields, sorted_by) for term in text.split()]
    return lambda row: all(test(row) for test in tests)


def _term(term: str, fields: Sequence[FilterField], sorted_by: str) -> Callable[[Any], bool]:
    if found := _COMPARE.match(term):
        get = _field(found["field"] or sorted_by, fields).value
        try:
            limit = float(found["number"]) * _UNITS[found["unit"]]
        except ValueError as error:
            raise FilterError(
                f"{found['number']!r} is not a number: enter, for example, >100 or >2.5k"
            ) from error
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
