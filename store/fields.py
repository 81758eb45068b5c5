"""Field declarations for tenants, keys and quotas. Each field is declared once, in its record in
`store.policies`. The annotation gives its name, type and default; `Field` gives the rest. Everything else is
derived from the declaration: checks (`store.rules`), columns (`store.schemas`), action parameters
(`appliance.actions`), command-line options and tables, and the tables in the documentation
(`scripts/generated_tables.py`).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

Unit = Literal[
    "", "requests/min", "tokens/min", "tokens/day", "s", "requests", "tokens", "days", "class", "unix time"
]
FieldKind = Literal["number", "count", "class", "span", "time", "text", "choice", "list"]

MAX_COUNT = 10**12
MAX_TIME = 1e11
"""Latest allowed unix time, in the year 5138. Some systems cannot show later times as dates."""
MAX_TEXT_CHARS = 200
MAX_NAMES = 256
"""Maximum number of items in a field's list."""
ClassName = Literal["P0", "P1", "P2", "P3"]
"""A service class: real-time (P0), interactive (P1), batch (P2) or background (P3)."""
CLASS_NAMES: tuple[ClassName, ...] = get_args(ClassName)
CLASSES = len(CLASS_NAMES)


class Field(NamedTuple):
    """A field's declaration, apart from its name, type and default. Operators can set only fields that are
    annotated with a `Field`."""

    help: str
    """One sentence that describes the field, without the final full stop."""
    unit: Unit = ""
    low: float = 1
    high: float = MAX_COUNT
    """Highest allowed number. Both `low` and `high` are inclusive."""
    none: str = ""
    """What None means, if the field is optional."""


class Declared(NamedTuple):
    """A declared field of a record."""

    name: str
    type: Any
    """The field's type, without its `Field` annotation."""
    default: Any
    """`msgspec.NODEFAULT` for a field that every record must set."""
    field: Field

    @property
    def optional(self) -> bool:
        """Whether the field can be None."""
        return is_optional(self.type)

    @property
    def description(self) -> str:
        """One-line description of the field, including what None means if the field is optional."""
        return self.field.help + (f" (none: {self.field.none})" if self.optional else "")

    @property
    def label(self) -> str:
        """Display name, such as "tokens per minute" or "burst"."""
        words = self.name.removesuffix("_s").removesuffix("_at").replace("_", " ")
        return words.replace("kv ", "KV ")

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values of the field, or of each list item; empty if any text is allowed."""
        inner = without_none(self.type)
        if get_origin(inner) is tuple:
            inner = get_args(inner)[0]
        return get_args(inner) if get_origin(inner) is Literal else ()

    @property
    def kind(self) -> FieldKind:
        """The field's kind, which determines how values are parsed and displayed."""
        inner = without_none(self.type)
        if get_origin(inner) is tuple:
            return "list"
        if get_origin(inner) is Literal:
            return "choice"
        by_unit: dict[str, FieldKind] = {"class": "class", "s": "span", "unix time": "time"}
        by_type: dict[Any, FieldKind] = {int: "count", float: "number", str: "text"}
        return by_unit.get(self.field.unit) or by_type[inner]

    @property
    def expected(self) -> str:
        """Description of the allowed values."""
        low, high = self.field.low, self.field.high
        match self.kind:
            case "number" | "span":
                return f"a number from {low:g} to {high:g}"
            case "count":
                return f"a whole number from {low:,.15g} to {high:,.15g}"
            case "class":
                return "0 (real-time), 1 (interactive), 2 (batch) or 3 (background)"
            case "choice":
                return either(self.choices)
            case "list" if self.choices:
                return f"one or more of {', '.join(self.choices)}, each at most once"
            case "list":
                return f"1 to {MAX_NAMES} printable names"
            case "time":
                return f"a unix time in the future, in seconds, at most {MAX_TIME:,.0f}"
            case "text":
                return f"1 to {MAX_TEXT_CHARS} printable characters"

    def allows(self, value: Any) -> bool:
        """Return True if the value, which must not be None, is allowed."""
        match self.kind:
            case "number" | "span" | "count" | "class":
                return self.field.low <= value <= self.field.high
            case "time":
                return -MAX_TIME <= value <= MAX_TIME
            case "choice":
                return value in self.choices
            case "text":
                return _is_text(value)
            case "list":
                if self.choices and (len(set(value)) < len(value) or not set(value) <= set(self.choices)):
                    return False
                return 1 <= len(value) <= MAX_NAMES and all(map(_is_text, value))


def _is_text(value: str) -> bool:
    return 0 < len(value) <= MAX_TEXT_CHARS and value.isprintable()


def declared(record: type[msgspec.Struct]) -> Mapping[str, Declared]:
    """Return the fields of a record that are annotated with a `Field`, keyed by name, in declaration
    order."""
    return _declared(record)


@cache
def _declared(record: Any) -> Mapping[str, Declared]:
    found = {}
    hints = get_type_hints(record, include_extras=True)
    for known in msgspec.structs.fields(record):
        hint = hints[known.name]
        if get_origin(hint) is Annotated:
            inner, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Field):
                    found[known.name] = Declared(known.name, inner, known.default, extra)
    return found


def is_optional(hint: Any) -> bool:
    """Return True if a field of this type can be None."""
    return type(None) in get_args(hint)


def without_none(hint: Any) -> Any:
    """Return the type without None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (inner,) = (each for each in get_args(hint) if each is not type(None))
    return inner


def either(words: tuple[str, ...]) -> str:
    """Join alternatives into a phrase such as "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
