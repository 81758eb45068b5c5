"""Derives commands from registered actions: arguments, options, confirmation and help. A parameter that names
the target and has no default becomes an argument; all others become options. On the command line, durations
and times are text (90s, 30m, 2026-11-20). Tenant and key fields are text too, because "none" is a valid
value.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import typer

from appliance.actions import Action, action_named, flag
from appliance.cli.fields import field_option
from appliance.cli.options import Json, RunDir, Yes
from appliance.quantities import MAX_SPAN_S, span_text
from store.fields import Declared

WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Change nothing. Replay the last 15 minutes of requests with these limits, and show which would "
        "have been refused.",
    ),
]


class _Parameter:
    """Maps an action parameter to an argument or option of the command."""

    def __init__(self, action: Action, field: msgspec.structs.FieldInfo) -> None:
        self.name = field.name
        self.default = field.default
        self.is_argument = field.required and field.name == action.named_by
        kind = msgspec.inspect.type_info(field.type)
        self.declared: Declared | None = None
        if not field.required:
            self.declared = action.declared_fields.get(field.name)
        self.description, extra = "", dict[str, Any]()
        if isinstance(kind, msgspec.inspect.Metadata):
            self.description = (kind.extra_json_schema or {}).get("description", "")
            extra, kind = kind.extra or {}, kind.type
        self.metavar: str | None = extra.get("metavar")
        self.short: str | None = extra.get("short")
        self.is_switch = isinstance(kind, msgspec.inspect.BoolType)
        self.is_span = isinstance(kind, msgspec.inspect.FloatType) and field.name.endswith("_s")
        self.is_time = field.name.endswith("_at")
        self.max = getattr(kind, "le", None)

    def signature(self) -> inspect.Parameter:
        """Return the corresponding parameter of the command's function."""
        if self.declared is not None:
            return field_option(self.declared)
        kind: Any = str | None
        default = self.default
        if self.is_switch:
            kind = bool
        elif self.is_span:
            kind, default = str, span_text(default)
        elif default is msgspec.NODEFAULT:
            kind, default = str, inspect.Parameter.empty
        elif default is not None:
            kind = str
        info: Any
        if self.is_argument:
            info = typer.Argument(metavar=self.metavar, help=self.description, show_default=False)
        else:
            info = typer.Option(
                *(name for name in (flag(self.name), self.short) if name),
                metavar="SPAN" if self.is_span else "TIME" if self.is_time else self.metavar,
                help=self.description,
                show_default=bool(self.default) and self.default is not msgspec.NODEFAULT,
            )
        return _keyword(self.name, Annotated[kind, info], default)

    def value(self, text: Any) -> Any:
        """Convert an option's or argument's text to the parameter's value. Raises CommandLineError if it is
        invalid."""
        from appliance.cli.peers import by_number
        from appliance.cli.times import moment, span_s

        if self.is_span:
            return span_s(text, flag(self.name), self.max or MAX_SPAN_S)
        if self.is_time:
            return None if text is None else moment(text, flag(self.name), ahead=True)
        return by_number(text) if self.name == "peer" else text


def add_commands(group: typer.Typer, *names: str) -> None:
    """Add each action's command to the group."""
    for name in names:
        add_command(group, action_named(name), name.rpartition(".")[2])


def add_command(group: typer.Typer, action: Action, name: str) -> None:
    """Add an action's command to a group."""
    parameters = [_Parameter(action, field) for field in msgspec.structs.fields(action.parameters)]
    own = [one.signature() for one in parameters if one.declared is None]
    if action.changes_fields:
        own.append(_keyword("what_if", WhatIf, False))
    if action.danger != "none":
        own.append(_keyword("yes", Yes, False))
    declared = [one.signature() for one in parameters if one.declared is not None]
    common = [_keyword("run_dir", RunDir, None), _keyword("json", Json, False)]
    # In Python, parameters without a default must come before the others.
    own.sort(key=lambda one: one.default is not inspect.Parameter.empty)

    def run(**given: Any) -> None:
        _run(action, parameters, given)

    run.__signature__ = inspect.Signature([*own, *declared, *common])  # type: ignore[attr-defined]
    note = ' The value "none" removes a limit.' if action.changes_fields else ""
    group.command(name, help=action.description + note)(run)


def _run(action: Action, parameters: list[_Parameter], given: Mapping[str, Any]) -> None:
    from appliance.cli.actions import perform
    from appliance.cli.failure import CommandLineError
    from appliance.cli.fields import given_fields

    fields = given_fields(given, [one.declared for one in parameters if one.declared is not None])
    if action.changes_fields and not fields:
        raise CommandLineError(f"no changes were given: see appliance {action.name.replace('.', ' ')} --help")
    values = {one.name: one.value(given[one.name]) for one in parameters if one.declared is None}
    asked = action.parameters(**values, **fields)
    if given.get("what_if"):
        from appliance.cli.what_if import print_forecast

        print_forecast(given["run_dir"], asked, as_json=given["json"])
    else:
        perform(given["run_dir"], asked, yes=given.get("yes", False), as_json=given["json"])


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )
