"""Validates a decoded JSON object against a request struct.

msgspec's own error messages are written for developers, so this module reads the structs' declarations
(`msgspec.inspect`) and checks each value itself. Error messages contain the field, the value and the allowed
values. Validation stops at the first invalid value, so that refusing a hostile list of 250,000 items takes
little time. Supported types are those used in request structs: booleans, numbers, strings, literals, lists,
objects, other structs, and classes that parse their own values (`ParsedType`). Each of these may be optional.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import inspect as types

FieldErrorCode = Literal["invalid_value", "missing_required_parameter", "unsupported_parameter"]
INVALID: Final = "invalid_value"
MISSING: Final = "missing_required_parameter"
UNSUPPORTED: Final = "unsupported_parameter"

_MAX_SHOWN_CHARS = 40

Parser = Callable[[Any], Any]
"""A function that validates a value and returns it. Raises FieldError if the value is not allowed."""


class FieldError(ValueError):
    """Raised for a value that a field does not allow. `path` holds the field names and list indexes leading
    from the body to the value."""

    def __init__(
        self, message: str, code: FieldErrorCode = INVALID, path: tuple[str | int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.path = path

    def inside(self, part: str | int) -> FieldError:
        """Return this error for an enclosing value, with `part` (a field name or list index) prepended to the
        path."""
        return FieldError(self.message, self.code, (part, *self.path))

    @property
    def param(self) -> str:
        """The path in OpenAI's notation: `messages[0].content`."""
        param = ""
        for part in self.path:
            param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
        return param


class ParsedType(Protocol):
    """A field type whose values can have more than one JSON form."""

    json_schema: ClassVar[dict[str, Any]]

    @classmethod
    def parse(cls, value: Any) -> Any:
        """Return the value in the service's internal form. Raises FieldError if the value is not allowed."""


class RefusedName(Protocol):
    """A field name that is accepted only with certain values."""

    @property
    def json_schema(self) -> dict[str, Any]:
        """JSON schema of the accepted values."""

    def check(self, value: Any) -> None:
        """Raise FieldError unless the value is accepted."""


class RequestStruct(msgspec.Struct, kw_only=True):
    """Base class for structs that describe request bodies and the objects within them. Unknown fields are
    ignored."""

    refused: ClassVar[Mapping[str, RefusedName]] = {}
    """Additional field names that are accepted only with certain values."""


Body = TypeVar("Body", bound=RequestStruct)


def parse_struct(kind: type[Body], value: Any) -> Body:
    """Convert the decoded JSON object to a struct. Raises FieldError if a value is not allowed."""
    if not isinstance(value, dict):
        raise FieldError(f"must be an object, not {_shown_kind(value)}")
    parsers, required = _parsers(kind)
    values = {}
    for name, item in value.items():
        try:
            if name in parsers:
                values[name] = parsers[name](item)
            elif name in kind.refused:
                kind.refused[name].check(item)
        except FieldError as error:
            raise error.inside(name) from None
    for name in required:
        if name not in values:
            raise FieldError("is required", MISSING, (name,))
    return kind(**values)


def shown(value: Any) -> str:
    """Return the value as text for an error message, shortening long values."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        return repr(value[:_MAX_SHOWN_CHARS] + "…")
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a very large number"
    return "null" if value is None else repr(value)


def _shown_kind(value: Any) -> str:
    """Return the value as text for an error message. For a string, return only its type: error messages are
    logged, and the log must not contain conversation text that was sent in the wrong field."""
    return "a string" if isinstance(value, str) else shown(value)


def as_integer(value: Any) -> int | None:
    """Return the integer represented by a JSON number, or None. In JSON Schema, 5.0 is also an integer."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


@functools.cache
def _parsers(kind: type[RequestStruct]) -> tuple[dict[str, Parser], list[str]]:
    """Return a parser for each of the struct's fields, and the names of the required fields."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    parsers = {field.name: _parser(field.type) for field in info.fields}
    return parsers, [field.name for field in info.fields if field.required]


def _parser(info: types.Type) -> Parser:
    if isinstance(info, types.Metadata):
        return _parser(info.type)
    if isinstance(info, types.UnionType):
        (one,) = (kind for kind in info.types if not isinstance(kind, types.NoneType))
        parse = _parser(one)
        return lambda value: None if value is None else parse(value)
    if isinstance(info, types.CustomType):
        parsed: type[ParsedType] = info.cls
        return parsed.parse
    if isinstance(info, types.StructType):
        assert issubclass(info.cls, RequestStruct)
        return functools.partial(parse_struct, info.cls)
    return functools.partial(_CHECKS[type(info)], info)


def _boolean(info: types.BoolType, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(f"must be true or false, not {shown(value)}")
    return value


def _integer(info: types.IntType, value: Any) -> int:
    number = as_integer(value)
    if number is None or not _is_within(info, number):
        raise FieldError(f"must be an integer{_bounds(info)}, not {shown(value)}")
    return number


def _number(info: types.FloatType, value: Any) -> float:
    if type(value) not in (int, float) or not _is_within(info, value):
        raise FieldError(f"must be a number{_bounds(info)}, not {shown(value)}")
    return float(value)


def _is_within(info: types.IntType | types.FloatType, value: float) -> bool:
    return (
        (info.ge is None or value >= info.ge)
        and (info.le is None or value <= info.le)
        and (info.gt is None or value > info.gt)
    )


def _bounds(info: types.IntType | types.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    parts = ((" of at least", info.ge), (" above", info.gt), (" of at most", info.le))
    return " and".join(f"{words} {bound}" for words, bound in parts if bound is not None)


def _string(info: types.StrType, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(f"must be a string, not {shown(value)}")
    return _check_length(info, value, "characters")


def _literal(info: types.LiteralType, value: Any) -> Any:
    if not isinstance(value, str) or value not in info.values:
        raise FieldError(f"must be {' or '.join(map(repr, info.values))}, not {shown(value)}")
    return value


def _list(info: types.ListType, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(f"must be a list, not {_shown_kind(value)}")
    _check_length(info, value, "items")
    parse, items = _parser(info.item_type), []
    for index, item in enumerate(value):
        try:
            items.append(parse(item))
        except FieldError as error:
            raise error.inside(index) from None
    return items


Sized = TypeVar("Sized", str, list[Any])


def _check_length(info: types.StrType | types.ListType, value: Sized, unit: str) -> Sized:
    if info.min_length is not None and len(value) < info.min_length:
        raise FieldError("must not be empty")
    if info.max_length is not None and len(value) > info.max_length:
        raise FieldError(f"has {len(value)} {unit}; at most {info.max_length} are allowed")
    return value


_CHECKS: dict[type[types.Type], Callable[[Any, Any], Any]] = {
    types.BoolType: _boolean,
    types.IntType: _integer,
    types.FloatType: _number,
    types.StrType: _string,
    types.LiteralType: _literal,
    types.ListType: _list,
}
