"""Builds the tables of request fields in docs/api.md. A field is declared in `appliance/front/schemas.py` or
`appliance/front/refused_fields.py`. The tables show each field's type, bounds and description."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from appliance.front.refused_fields import (
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
)
from appliance.front.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from appliance.front.validation import RequestStruct
from scripts.field_tables import table


def request_tables() -> str:
    """Return the tables of the fields of requests."""
    refused = {
        field.name for field in (*REFUSED, *REFUSED_IN_CHATS, *REFUSED_IN_COMPLETIONS, *REFUSED_IN_MESSAGES)
    }
    shared = set(GenerationRequest.__struct_fields__)
    # `best_of` and `echo` are refused only in chat completions.
    completions = shared | {field.name for field in REFUSED_IN_COMPLETIONS}
    parts = [
        _section("Both routes", GenerationRequest, refused),
        _section("`POST /v1/chat/completions`", ChatRequest, refused | shared),
        _section("Each of `messages`", ChatMessage, refused),
        _section("`POST /v1/completions`", CompletionRequest, completions),
        _section("`stream_options`", StreamOptions, set()),
        "### Refused\n\n"
        "A request that sets one of these fields is refused with 400 `unsupported_parameter`, unless the\n"
        "value is null, false, empty, or listed as tolerated.\n\n",
        _refused_table(),
    ]
    return "\n" + "".join(parts) + "\n"


def _refused_table() -> str:
    groups = {
        "both": REFUSED,
        "chats": REFUSED_IN_CHATS,
        "completions": REFUSED_IN_COMPLETIONS,
        "messages": REFUSED_IN_MESSAGES,
    }
    return table(
        ("field", "where", "tolerated", "instead"),
        (
            (
                f"`{field.name}`",
                where,
                ", ".join(f"`{json.dumps(value)}`" for value in field.neutral),
                field.remedy,
            )
            for where, fields in groups.items()
            for field in fields
        ),
    )


def _section(title: str, model: type[RequestStruct], without: set[str]) -> str:
    _, schemas = msgspec.json.schema_components([model], schema_hook=lambda kind: kind.json_schema)  # type: ignore[attr-defined]
    schema = schemas[model.__name__]
    rows = []
    for name, field in schema["properties"].items():
        if name not in without:
            needed = " (required)" if name in schema.get("required", ()) else ""
            rows.append((f"`{name}`", _type(field) + needed, field.get("description", "")))
    return f"### {title}\n\n{table(('field', 'value', 'meaning'), rows)}\n"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "$ref" in schema:
        return "object (see below)"
    kind = schema["type"]
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type(schema['items'])}{most}"
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return f"text of at most {schema['maxLength']} characters" if "maxLength" in schema else "text"
    if kind in ("integer", "number"):
        bounds = (("≥", "minimum"), (">", "exclusiveMinimum"), ("≤", "maximum"))
        shown = " and ".join(f"{sign} {schema[bound]}" for sign, bound in bounds if bound in schema)
        return f"{kind} {shown}".strip()
    return "object" + (f" of at most {schema['maxProperties']} fields" if "maxProperties" in schema else "")
