"""Converts the text of action parameters, as entered in forms and on the command line, to values and to the
equivalent CLI command."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from appliance.actions import Action, Danger, flag
from appliance.quantities import future_time, not_valid, span_seconds, span_text
from console import units

Values = dict[str, Any]
"""An action's parameters: text, or booleans for switches."""
ParameterKind = Literal[
    "switch", "table", "list", "number", "count", "class", "choice", "share", "span", "time", "text"
]
_INVALID = re.compile(r"\$\.(\w+)")
"""Matches the parameter name in a validation error."""
_NUMBER = re.compile(r"[0-9][0-9,_]*(\.[0-9]+)?")
"""Matches a number with thousands separators."""
_EXPECTED: dict[ParameterKind, str] = {
    "switch": "true or false",
    "table": "TARGET=WEIGHT for each target, such as 1=90,2=10",
    "list": "names separated by commas",
    "class": "P0, P1, P2 or P3",
    "share": "a percentage above 0% and at most 100%, such as 5%",
    "span": "a time span such as 90s, 30m or 12h",
    "time": "a time span such as 90d, or a date such as 2026-11-20 or 2026-11-20T14:30",
}


class CommandError(ValueError):
    """Raised for an invalid command. The message says what to do."""


class Parameter:
    """One parameter of an action."""

    def __init__(self, action: Action, field: msgspec.structs.FieldInfo) -> None:
        self.name = field.name
        self.default = field.default
        self.required = field.required
        self.declared = None if field.required else action.declared_fields.get(field.name)
        """The declaration of the tenant or key field that the parameter sets."""
        kind = msgspec.inspect.type_info(field.type)
        self.description, extra = "", dict[str, Any]()
        if isinstance(kind, msgspec.inspect.Metadata):
            extra = kind.extra or {}
            self.description = (kind.extra_json_schema or {}).get("description", "")
            # The schema describes the JSON value, where null means none.
            self.description = self.description.replace("Null ", "The value none ")
        self.flag: str = extra.get("option") or flag(field.name)
        """The parameter's CLI option."""
        self.none_option: str = extra.get("none_option", "")
        """The CLI option that sets the value to none; empty if `none` is written as the parameter's value."""
        self.after: str = extra.get("after", "")
        """The text between the target and this parameter; empty if the parameter is not positional in the
        CLI."""
        types = _alternatives(kind)
        self.optional = any(isinstance(one, msgspec.inspect.NoneType) for one in types)
        """Whether "none" is a valid value."""
        self.type = next(one for one in types if not isinstance(one, msgspec.inspect.NoneType))
        self.kind: ParameterKind = self._kind()

    @property
    def label(self) -> str:
        """The parameter's label in forms."""
        return self.flag.removeprefix("--").replace("-", " ")

    @property
    def preset(self) -> Any:
        """The value used if the parameter is omitted. When a tenant or key is changed, omitted parameters
        leave their fields unchanged."""
        return self.default if self.declared is None else self.declared.default

    def shown(self, value: Any) -> str:
        """Format a value, with its unit."""
        if value is None:
            absent = "never" if self.kind == "time" else "none"
            return absent if self.declared is None else self.declared.field.none
        match self.kind:
            case "number" | "count":
                unit = "" if self.declared is None else self.declared.field.unit
                return f"{value:,.15g} {unit}".rstrip()
            case "class":
                return f"P{value}"
            case "span":
                return span_text(value)
            case "time":
                return units.date(value)
            case "share":
                return f"{100 * value:g}%"
            case "list":
                return ",".join(value)
            case "table":
                return ",".join(f"{name}={weight:g}" for name, weight in value.items())
        return str(value)

    def _kind(self) -> ParameterKind:
        if self.declared is not None:
            return self.declared.kind
        match self.type:
            case msgspec.inspect.BoolType():
                return "switch"
            case msgspec.inspect.DictType():
                return "table"
            case msgspec.inspect.FloatType() if self.name.endswith("_s"):
                return "span"
            case msgspec.inspect.FloatType() if self.name.endswith("_at"):
                return "time"
            case msgspec.inspect.FloatType():
                return "share"
        return "text"

    def value(self, text: Any) -> Any:
        """Convert text to a value. Text that cannot be converted is returned unchanged, except that an
        invalid time raises CommandError."""
        if not isinstance(text, str):
            return text
        if text == "none" and self.optional:
            return None
        match self.kind:
            case "table":
                pairs = [part.rpartition("=") for part in text.split(",")]
                table = {name.strip(): weight.removesuffix("%") for name, _, weight in pairs}
                return text if "" in table or len(table) < len(pairs) else table
            case "list":
                return [part.strip() for part in text.split(",") if part.strip()]
            case "class":
                return text.upper().removeprefix("P")
            case "number" | "count":
                return _plain(text)
            case "share" if text.endswith("%"):
                with contextlib.suppress(ValueError):
                    return float(text.removesuffix("%")) / 100
            case "span":
                seconds = span_seconds(text)
                return text if seconds is None else seconds
            case "time":
                return self._time(text)
        return text

    def _time(self, text: str) -> float:
        """Parse a future time, given as a time span from now, a date or unix seconds."""
        with contextlib.suppress(ValueError):
            return float(text)
        try:
            return future_time(text, time.time())
        except ValueError as error:
            raise CommandError(f"{self.flag} {error}") from None

    def cli_text(self, text: Any) -> str:
        """Format a value for the CLI."""
        text = str(text)
        match self.kind:
            case "number" | "count":
                return _plain(text)
            case "share" if not text.endswith("%"):
                with contextlib.suppress(ValueError):
                    return f"{100 * float(text):g}%"
            case "span" if text[-1:].isdigit():
                return f"{text}s"
            case "time" if text.replace(".", "", 1).isdecimal():
                return units.date(float(text))
        return text

    def words(self, text: Any) -> list[str]:
        """Format a value as arguments of a CLI command. Each entry of a table is one argument."""
        shown = self.cli_text(text)
        return [one.strip() for one in shown.split(",")] if self.kind == "table" else [shown]

    def invalid(self, text: object) -> CommandError:
        """Return the error for an invalid value."""
        expected = _EXPECTED.get(self.kind, "")
        low, high = (getattr(self.type, name, None) for name in ("min_length", "max_length"))
        if self.declared is not None and (self.kind not in _EXPECTED or self.declared.choices):
            expected = self.declared.expected
        elif self.kind == "span" and (longest := getattr(self.type, "le", None)) is not None:
            expected += f", at most {span_text(longest)}"
        elif self.kind == "text":
            expected = f"{low or 0} to {high} characters" if high else "another value"
        if self.optional:
            expected += ", or none"
        return CommandError(f"{self.flag} {not_valid(str(text), expected)}")


@cache
def parameters_of(action: Action) -> Mapping[str, Parameter]:
    """Return an action's parameters, by name."""
    return {field.name: Parameter(action, field) for field in msgspec.structs.fields(action.parameters)}


def positional(action: Action) -> tuple[str, ...]:
    """Return the parameters that are positional in the CLI."""
    target = (action.named_by,) if action.is_target_required else ()
    return (*target, *(one.name for one in parameters_of(action).values() if one.after))


def separator(action: Action) -> str:
    """Return the text between the arguments of the action's CLI command."""
    return next((one.after for one in parameters_of(action).values() if one.after), " ")


def entered(action: Action) -> list[Parameter]:
    """Return the parameters that can be entered in the console. Tables can be entered only if they are
    positional in the CLI."""
    return [
        one for one in parameters_of(action).values() if one.kind != "table" or one.name in positional(action)
    ]


def build(action: Action, values: Values) -> msgspec.Struct:
    """Convert text values to an action's parameters. Raises a CommandError that names the invalid parameter,
    its value and the remedy."""
    known = parameters_of(action)
    for one in known.values():
        if one.required and values.get(one.name) in (None, ""):
            raise CommandError(f"{one.flag} is missing: enter a value")
    if action.changes_fields and not values.keys() - {action.named_by}:
        raise CommandError("nothing to change: enter a new value in at least one field")
    converted = {name: known[name].value(value) for name, value in values.items()}
    try:
        parameters = msgspec.convert(converted, action.parameters, strict=False)
    except msgspec.ValidationError as error:
        found = _INVALID.search(str(error))
        if found is None:
            raise CommandError(f"{action.name}: {error}") from error
        raise known[found[1]].invalid(values[found[1]]) from error
    for name, text in values.items():
        value, declared = getattr(parameters, name), known[name].declared
        # JSON cannot represent infinity: the service would receive null, which removes a limit.
        infinite = isinstance(value, float) and not math.isfinite(value)
        if infinite or (declared is not None and value is not None and not declared.allows(value)):
            raise known[name].invalid(text)
    return parameters


def equivalent(action: Action, values: Values) -> str:
    """Return the CLI command that performs the same action."""
    known = parameters_of(action)
    given = {name: value for name, value in values.items() if value not in (None, "", False)}
    cleared = [name for name, value in given.items() if value == "none" and known[name].none_option]
    for name in cleared:
        del given[name]
    named = [
        word for name in positional(action) if name in given for word in known[name].words(given.pop(name))
    ]
    if (between := separator(action)) != " ":
        named = [between.join(named)]
    words = ["appliance", *action.name.split("."), *named, *(known[name].none_option for name in cleared)]
    for name, value in given.items():
        one = known[name]
        if value is True:
            words.append(one.flag)
        elif value != "none" or one.declared is not None or not one.optional:
            words += [one.flag, one.cli_text(value)]
    return shlex.join(words) + ("" if danger_of(action, values) == "none" else " --yes")


def danger_of(action: Action, values: Values) -> Danger:
    """Return how the action must be confirmed. A dry run changes nothing, so it needs no confirmation."""
    return "none" if values.get("dry_run") else action.danger


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """Return the types that a value can have, without annotations and UNSET."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return [one for part in kind.types for one in _alternatives(part)]
    return [kind]


def _plain(text: str) -> str:
    """Remove thousands separators from a number. Other text is returned unchanged."""
    return re.sub("[,_]", "", text) if _NUMBER.fullmatch(text) else text
