#!/usr/bin/env python
"""Writes the request field tables in docs/api.md.

Usage: scripts/api_page.py [--check]

A field is declared in `appliance/front/schemas.py` or `appliance/front/refused_fields.py`. The tables show
each field's type, bounds and description. With --check, nothing is written, and the exit code is 1 if the
page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.front.refused_fields import (  # noqa: E402
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
    RefusedField,
)
from appliance.front.schemas import (  # noqa: E402
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from appliance.front.validation import RequestStruct  # noqa: E402
from scripts.field_tables import row, write_or_check  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- fields: made by scripts/api_page.py -->", "<!-- end of fields -->"


def page(former: str) -> str:
    """Return the page with regenerated tables between the markers."""
    before, _, rest = former.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(_tables()) + "\n" + END + after


def _tables() -> Iterator[str]:
    refused = {
        field.name for field in (*REFUSED, *REFUSED_IN_CHATS, *REFUSED_IN_COMPLETIONS, *REFUSED_IN_MESSAGES)
    }
    shared = set(GenerationRequest.__struct_fields__)
    yield from _table("Both routes", GenerationRequest, refused)
    yield from _table("`POST /v1/chat/completions`", ChatRequest, refused | shared)
    yield from _table("Each of `messages`", ChatMessage, refused)
    # `best_of` and `echo` are refused only in chat completions.
    yield from _table(
        "`POST /v1/completions`", CompletionRequest, shared | {f.name for f in REFUSED_IN_COMPLETIONS}
    )
    yield from _table("`stream_options`", StreamOptions, set())
    yield "### Refused\n"
    yield "A request that sets one of these fields is refused with 400 `unsupported_parameter`, unless the"
    yield "value is null, false, empty, or listed as tolerated.\n"
    yield "| field | where | tolerated | instead |"
    yield "| --- | --- | --- | --- |"
    for where, fields in (
        ("both", REFUSED),
        ("chats", REFUSED_IN_CHATS),
        ("completions", REFUSED_IN_COMPLETIONS),
        ("messages", REFUSED_IN_MESSAGES),
    ):
        yield from (_refused(field, where) for field in fields)
    yield ""


def _refused(field: RefusedField, where: str) -> str:
    tolerated = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return row((f"`{field.name}`", where, tolerated, field.remedy))


def _table(title: str, model: type[RequestStruct], without: set[str]) -> Iterator[str]:
    _, schemas = msgspec.json.schema_components([model], schema_hook=lambda kind: kind.json_schema)  # type: ignore[attr-defined]
    schema = schemas[model.__name__]
    yield f"### {title}\n"
    yield "| field | value | meaning |"
    yield "| --- | --- | --- |"
    for name, field in schema["properties"].items():
        if name not in without:
            needed = " (required)" if name in schema.get("required", ()) else ""
            yield row((f"`{name}`", _type(field) + needed, field.get("description", "")))
    yield ""


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


if __name__ == "__main__":
    sys.exit(write_or_check([PAGE], page, __doc__ or ""))
