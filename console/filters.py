"""The filter language for tables. Terms are separated by spaces, and a row must match all of them: - `text`:
a column contains the text; - `field:text`: the column `field` contains the text; `!field:text`: it does not;
- `field=text`: the column equals the text or number; `!field=text`: it does not. `field="two words"` compares
  with a text that contains spaces;
- `field>100`, `field<=2.5k`, `field>350ms`: compare the column's value, in the units shown. The number may
  contain thousands separators, and a space before its unit. Times are times of day or dates;
- `>100`: compare the value of the column that the table is sorted by.

A field is a column's heading, in upper or lower case and with `_` for spaces, or the column's name in
exports.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from appliance.quantities import past_time

Cell = str | float | int | None
ValueUnit = Literal["", "s", "bytes", "%", "W", "°C", "time"]
"""The unit of a column's values; empty for numbers without a unit. Values in "%" are fractions, and times are
in unix seconds."""
_FIELD = r"[A-Za-z_][\w/]*"
_COMPARE = re.compile(
    rf"(?:(?P<field>{_FIELD})(?P<sign>>=|<=|>|<)(?P<value>.*)"
    r"|(?P<bare_sign>>=|<=|>|<|=)(?P<bare_value>-?[0-9.].*))$"
)
"""Matches a comparison. Without a field, a term is a comparison only if a number follows the operator."""
_PART = re.compile(r"([0-9.]+)([A-Za-zµ°%]*)")
_VALUE = re.compile(r"-?[0-9.][0-9.A-Za-zµ°%]*")
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")
_DAY = re.compile(r"\d{2}-\d{2}(T.*)?")
"""Matches a date without the year."""
_CONTAINS = re.compile(rf"(?P<negation>!?)(?P<field>{_FIELD}):(?P<text>.*)$")
_EQUALS = re.compile(rf"(?P<negation>!?)(?P<field>{_FIELD})=(?P<text>.*)$")
_WORD = re.compile(rf'!?{_FIELD}="[^"]*"(?!\S)|\S+')
"""Matches a word in a filter. Only the text to compare with may be quoted."""
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_UNITS: dict[ValueUnit, dict[str, float]] = {
    "": {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    "s": {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "us": 1e-6, "µs": 1e-6, "min": 60.0},
    "bytes": {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40, "B": 1.0}
    | {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
    "%": {"%": 0.01},
    "W": {"W": 1.0},
    "°C": {"°C": 1.0, "°": 1.0, "C": 1.0},
}
"""Maps each column's unit, except "time", to the units that can be entered for it, with their factors."""


class FilterField(NamedTuple):
    """A column by which rows can be filtered."""

    names: tuple[str, ...]
    """The column's names in lower case. Messages show the first one."""
    value: Callable[[Any], Cell]
    text: Callable[[Any], str]
    """Returns the text that the column shows for a row."""
    unit: ValueUnit = ""


class FilterError(ValueError):
    """Raised if a filter names an unknown column or contains an invalid number."""


class _Comparison(NamedTuple):
    field: FilterField
    sign: str
    value: str


def matcher(
    text: str, fields: Sequence[FilterField], sorted_by: str, now: float = 0.0
) -> Callable[[Any], bool]:
    """Return a function that tests whether a row matches a filter. `sorted_by` names the column that the
    table is sorted by, or is empty. A time of day means its latest occurrence before `now` (unix seconds).
    Raises FilterError if the filter is invalid."""
    terms: list[str] = []
    for word in _WORD.findall(text):
        if terms and (found := _comparison(terms[-1], fields, sorted_by)) and _continues(found, word):
            terms[-1] += f"T{word}" if found.field.unit == "time" else word
        else:
            terms.append(word)
    tests = [_term(term, fields, sorted_by, now) for term in terms]
    return lambda row: all(test(row) for test in tests)


def _comparison(term: str, fields: Sequence[FilterField], sorted_by: str) -> _Comparison | None:
    """Parse a filter term as a comparison. Return None if the term is not a comparison."""
    if found := _EQUALS.match(term):
        return None if found["negation"] else _Comparison(_field(found["field"], fields), "=", found["text"])
    found = _COMPARE.match(term)
    if found is None:
        return None
    if found["field"]:
        return _Comparison(_field(found["field"], fields), found["sign"], found["value"])
    return _Comparison(_field(sorted_by, fields), found["bare_sign"], found["bare_value"])


def _continues(comparison: _Comparison, word: str) -> bool:
    """Return whether a word continues the preceding comparison: a unit after a number, or a time of day after
    a date."""
    if not comparison.value[-1:].isdigit():
        return False
    if comparison.field.unit == "time":
        return _CLOCK.fullmatch(word) is not None
    return word in _UNITS[comparison.field.unit]


def _term(term: str, fields: Sequence[FilterField], sorted_by: str, now: float) -> Callable[[Any], bool]:
    if found := _EQUALS.match(term):
        equals = _equal(_Comparison(_field(found["field"], fields), "=", found["text"]), now)
        negated = bool(found["negation"])
        return lambda row: equals(row) is not negated
    if comparison := _comparison(term, fields, sorted_by):
        get, limit = comparison.field.value, _limit(comparison, now)
        compare = _SIGNS[comparison.sign]
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


def _equal(comparison: _Comparison, now: float) -> Callable[[Any], bool]:
    """Return a function that tests whether a row matches an equality term. A row matches if its value equals
    the term's number, or if its value or displayed text equals the term's text, ignoring case."""
    field, wanted = comparison.field, comparison.value.removeprefix('"').removesuffix('"').strip().lower()
    try:
        limit = _limit(comparison, now)
    except FilterError:
        limit = math.nan

    def equals(row: Any) -> bool:
        value = field.value(row)
        if isinstance(value, int | float) and (int(value) if field.unit == "time" else value) == limit:
            return True
        return wanted in ("" if value is None else str(value).lower(), field.text(row).strip().lower())

    return equals


def _limit(comparison: _Comparison, now: float) -> float:
    """Convert a comparison's value, such as 12,345, 350ms, 2m30s or 2026-11-20T14:03, to the column's unit.
    Raises FilterError if the value is invalid."""
    field, name, text = comparison.field, comparison.field.names[0], comparison.value
    as_text = f"; to compare text, use {name}=TEXT or {name}:TEXT"
    if field.unit == "time":
        try:
            return _time(text, now)
        except ValueError:
            raise FilterError(
                f"{text!r} is not a time: use a time such as 14:03, -20m or 2026-11-20T14:03, as in "
                f"{name}>14:03{as_text}"
            ) from None
    known, number = _UNITS[field.unit], _SEPARATOR.sub("", text)
    parts = _PART.findall(number) if _VALUE.fullmatch(number) else []
    try:
        # Only durations may have several parts, such as 2m30s.
        if len(parts) == 1 or (parts and field.unit == "s"):
            total = sum(float(digits) * (known[unit] if unit else 1.0) for digits, unit in parts)
            return -total if number.startswith("-") else total
    except (ValueError, KeyError):
        pass
    example = next(iter(known))
    raise FilterError(
        f"{text!r} is not a value of {name}: use {', '.join(known)}, as in {name}>20{example}, or no unit"
        f"{as_text}"
    )


def _time(text: str, now: float) -> float:
    """Return a time in unix seconds. A date without a year means the most recent one. Raises ValueError if
    the text is not a time."""
    if _VALUE.fullmatch(text) and text[-1:].isdigit():
        return float(text)
    if not _DAY.fullmatch(text):
        return past_time(text, now)
    year = datetime.fromtimestamp(now).year
    at = past_time(f"{year}-{text}", now)
    return at if at <= now else past_time(f"{year - 1}-{text}", now)


def _field(name: str, fields: Sequence[FilterField]) -> FilterField:
    found = next((field for field in fields if name.lower() in field.names), None)
    if found is None:
        raise FilterError(f"unknown column {name!r}: use one of {', '.join(one.names[0] for one in fields)}")
    return found


def sort_rows(rows: Sequence[Any], get: Callable[[Any], Cell], *, reverse: bool) -> list[Any]:
    """Return rows sorted by a column. Unknown values come last in both directions."""
    known = [row for row in rows if get(row) is not None]
    unknown = [row for row in rows if get(row) is None]
    # A column may contain both numbers and text. Numbers come first.
    known.sort(key=lambda row: (isinstance(value := get(row), str), value), reverse=reverse)
    return [*known, *unknown]
