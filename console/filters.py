"""The filter language of tables. Terms are separated by spaces, and a row must match all of them:

- `text`: a column contains the text;
- `field:text`: the column `field` contains the text, and `!field:text`: the column does not contain the text;
- `field>100`, `field<=2.5k`: compare the number in the column; k, M and G multiply, % divides by 100;
- `>100`: the same for the column that the table is sorted by.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cell = str | float | int | None
Getters = Mapping[str, Callable[[Any], Cell]]
_COMPARE = re.compile(r"(?P<field>[a-z_]*)(?P<sign>>=|<=|>|<|=)(?P<number>[0-9.]+)(?P<unit>[kMG%]?)$")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "%": 0.01}


class FilterError(ValueError):
    """Raised for a filter that names an unknown column or has an invalid number."""


def matcher(text: str, getters: Getters, sorted_by: str) -> Callable[[Any], bool]:
    """Return a function that decides whether a row matches a filter. Raises FilterError."""
    tests = [_term(term, getters, sorted_by) for term in text.split()]
    return lambda row: all(test(row) for test in tests)


def _term(term: str, getters: Getters, sorted_by: str) -> Callable[[Any], bool]:
    if found := _COMPARE.match(term):
        get = _getter(found["field"] or sorted_by, getters)
        try:
            limit = float(found["number"]) * _UNITS[found["unit"]]
        except ValueError as error:
            raise FilterError(
                f"{found['number']!r} is not a number: enter, for example, >100 or >2.5k"
            ) from error
        compare = _SIGNS[found["sign"]]
        return lambda row: isinstance(value := get(row), int | float) and compare(value, limit)
    name, colon, wanted = term.partition(":")
    if colon and name.lstrip("!").isidentifier():
        get, wanted = _getter(name.lstrip("!"), getters), wanted.lower()
        if name.startswith("!"):
            return lambda row: wanted not in str(get(row)).lower()
        return lambda row: wanted in str(get(row)).lower()
    wanted, every = term.lower(), list(getters.values())
    return lambda row: any(isinstance(value := get(row), str) and wanted in value.lower() for get in every)


def _getter(name: str, getters: Getters) -> Callable[[Any], Cell]:
    if name not in getters:
        raise FilterError(f"unknown column {name!r}: use one of {', '.join(getters)}")
    return getters[name]


def sort_rows(rows: Sequence[Any], get: Callable[[Any], Cell], *, reverse: bool) -> list[Any]:
    """Return rows sorted by a column. Rows without a known value come last in both directions."""
    known = [row for row in rows if get(row) is not None]
    unknown = [row for row in rows if get(row) is None]
    # A column may contain both numbers and text. Numbers come first.
    known.sort(key=lambda row: (isinstance(value := get(row), str), value), reverse=reverse)
    return [*known, *unknown]
