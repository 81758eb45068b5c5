"""Creates options, values and table columns for the fields declared in `store.policies`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import typer

from appliance.actions import flag
from appliance.quantities import not_valid
from store.fields import Declared, declared
from store.policies import Quota

_METAVARS = {
    "number": "N",
    "count": "N",
    "class": "P0…P3",
    "span": "SPAN",
    "time": "TIME",
    "text": "TEXT",
    "list": "LIST",
}


def field_option(field: Declared) -> inspect.Parameter:
    """Return the option for a declared field, as a parameter of a command's function. The option's type is
    str, because "none" is also a valid value."""
    known = field.default not in (None, msgspec.NODEFAULT)
    default = f" (default {shown(field, field.default)})" if known else ""
    info = typer.Option(
        flag(field.name),
        metavar="|".join(field.choices) if field.kind == "choice" else _METAVARS[field.kind],
        help=f"{field.description}{default}.",
        show_default=False,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[str | None, info],
    )


def given_fields(options: Mapping[str, Any], fields: Iterable[Declared]) -> dict[str, Any]:
    """Return the values of the fields whose options were given. Raises CommandLineError for an invalid
    value."""
    return {
        field.name: _value(field, text) for field in fields if (text := options.get(field.name)) is not None
    }


def _value(field: Declared, text: str) -> Any:
    from appliance.cli.failure import CommandLineError
    from appliance.cli.times import moment, span_s

    name = flag(field.name)
    if field.optional and text == "none":
        return None
    if field.kind == "span":
        return span_s(text, name, field.field.high)
    if field.kind == "time":
        return moment(text, name, ahead=True)
    value = _parsed(field, text)
    # Leave text and list fields to the service, which reports invalid values just as clearly.
    if value is None or (field.kind not in ("text", "list") and not field.allows(value)):
        expected = "P0, P1, P2 or P3" if field.kind == "class" else field.expected
        lifted = ", or none" if field.optional else ""
        raise CommandLineError(f"{name} {not_valid(text, expected + lifted)}")
    return value


def _parsed(field: Declared, text: str) -> Any:
    """Parse the value of a declared field. Return None if the text has the wrong format."""
    from appliance.cli.options import is_decimal

    plain = text.replace("_", "")
    match field.kind:
        case "number":
            return float(plain) if is_decimal(plain) else None
        case "count":
            return int(plain) if plain.isascii() and plain.isdigit() and len(plain) < 20 else None
        case "class":
            digit = text.upper().removeprefix("P")
            return int(digit) if digit.isascii() and digit.isdigit() and len(digit) == 1 else None
        case "list":
            return tuple(word.strip() for word in text.split(","))
        case _:
            return text


def shown(field: Declared, value: Any) -> str:
    """Format a declared field's value as human-readable text. None is shown as text that depends on the
    field, such as "no limit"."""
    from appliance.cli.times import local
    from appliance.quantities import span_text

    if value is None:
        return field.field.none
    match field.kind:
        case "number" | "count":
            return f"{value:,.15g}"
        case "class":
            return f"P{value}"
        case "span":
            return span_text(value)
        case "time":
            return local(value)
        case "list":
            return ",".join(value)
        case _:
            return str(value)


def limits(quota: Quota) -> Iterable[str]:
    """Yield a description of each limit in a quota."""
    for field in declared(Quota).values():
        value = getattr(quota, field.name)
        if value is not None and field.optional:
            yield f"{shown(field, value)} {field.field.unit if '/' in field.field.unit else field.label}"
