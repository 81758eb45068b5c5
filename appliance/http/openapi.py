"""Builds an OpenAPI document from a route table and the JSON schemas that msgspec derives from structs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec

_REFERENCE = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """The OpenAPI description of one route."""

    summary: str
    answer: Any
    """Type of a 200 response's JSON body, or None if the response is plain text."""
    description: str = ""
    answer_description: str = "OK"
    streams: bool = False
    """Whether the response can also be a stream of server-sent events."""
    tags: tuple[str, ...] = ()
    body: Any = None
    """Type of the request's JSON body."""
    errors: Mapping[int, Any] = {}
    """JSON body types of the other responses, keyed by status."""
    parameters: tuple[dict[str, Any], ...] = ()
    """OpenAPI parameter objects, except those of the path parameters."""
    security: tuple[dict[str, list[str]], ...] | None = None
    """OpenAPI security requirements, or None to omit them."""


class DescribedRoute(Protocol):
    """The attributes of a route from which the OpenAPI document is built."""

    operation: Operation | None
    methods: set[str] | None
    path_format: str
    param_convertors: dict[str, Any]


def openapi_document(
    title: str,
    routes: Iterable[DescribedRoute],
    *,
    description: str = "",
    schema_hook: Callable[[type], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return an OpenAPI document for all routes that have an `operation`. `schema_hook` returns the JSON
    schema of a type unknown to msgspec."""
    described = [(route, route.operation) for route in routes if route.operation is not None]
    types = {
        kind: None
        for _, operation in described
        for kind in (operation.answer, operation.body, *operation.errors.values())
        if kind is not None
    }
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=schema_hook, ref_template=_REFERENCE
    )
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        for method in route.methods or ():
            item = paths.setdefault(route.path_format, {})
            item[method.lower()] = _operation(operation, list(route.param_convertors), by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": description},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(operation: Operation, path_names: list[str], schemas: dict[Any, Any]) -> dict[str, Any]:
    content = _content(schemas, operation.answer)
    if operation.streams:
        content["text/event-stream"] = {}
    document: dict[str, Any] = {
        "summary": operation.summary,
        "description": operation.description,
        "tags": list(operation.tags),
        "responses": {"200": {"description": operation.answer_description, "content": content}}
        | {
            str(status): {"description": HTTPStatus(status).phrase, "content": _content(schemas, kind)}
            for status, kind in sorted(operation.errors.items())
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path_names
    ]
    if parameters or operation.parameters:
        document["parameters"] = [*parameters, *operation.parameters]
    if operation.body is not None:
        document["requestBody"] = {"required": True, "content": _content(schemas, operation.body)}
    if operation.security is not None:
        document["security"] = list(operation.security)
    return document


def _content(schemas: dict[Any, Any], kind: Any) -> dict[str, Any]:
    if kind is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": schemas[kind]}}
