"""Parses the admin API's query parameters into typed structs. Error messages name the parameter."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

Query = TypeVar("Query", bound=msgspec.Struct)

_AT = re.compile(r" - at `\$\.([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_SHOWN_CHARS = 100


class QueryError(Exception):
    """Raised if a query parameter is invalid. The message contains the parameter, its value and the
    remedy."""


def parse_query(request: Request, kind: type[Query]) -> Query:
    """Return the request's query parameters as a struct. Raises QueryError if they are invalid."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name in given:
            raise QueryError(f"query parameter {_shown(name)} is given more than once: give it once")
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        if unknown := _UNKNOWN.search(text):
            names = ", ".join(kind.__struct_encode_fields__)
            raise QueryError(
                f"{_shown(unknown[1])} is not a query parameter of {request.url.path}; available parameters: "
                f"{names}"
            ) from error
        place = _AT.search(text)
        if place is None:
            raise QueryError(f"the query parameters are not valid: {text}") from error
        name = place[1]
        expected = text[: place.start()].replace("`", "")
        raise QueryError(f"{name}={_shown(given.get(name, ''))} is not valid: {expected}") from error


def query_parameters(kind: type[msgspec.Struct]) -> tuple[dict[str, Any], ...]:
    """Return OpenAPI parameter objects for a query struct's fields."""
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    return tuple(
        {
            "name": name,
            "in": "query",
            "required": name in schema["$defs"][kind.__name__].get("required", ()),
            "schema": properties[name],
        }
        for name in properties
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
