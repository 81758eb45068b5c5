"""Derives commands from registered actions: arguments, options, confirmation and help. A parameter that names
the target and has no default becomes an argument; most others become options. On the command line, durations
and times are text (90s, 30m, 2026-11-20). Tenant and key fields are text too, because "none" is a valid
value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import typer

from appliance.actions import Action, action_named, flag
from appliance.cli.fields import field_option
from appliance.cli.options import Json, RunDir, Yes
from appliance.quantities import MAX_SPAN_S, span_text
from store.fields import Declared

_WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Change nothing. Replay the last 15 minutes of requests with these limits and show which would "
        "have been refused.",
    ),
]


class _Parameter:
    """Maps an action parameter to an argument or option of the command."""

    def __init__(self, action: Action, field: msgspec.structs.FieldInfo) -> None:
        self.name = field.name
        self.default = field.default
        kind = msgspec.inspect.type_info(field.type)
        self.declared: Declared | None = None
        if not field.required:
            self.declared = action.declared_fields.get(field.name)
        self.description, extra = "", dict[str, Any]()
        if isinstance(kind, msgspec.inspect.Metadata):
            # The schema's description also explains null, which the command line replaces with an option.
            self.description = (kind.extra_json_schema or {}).get("description", "").partition(" Null ")[0]
            extra, kind = kind.extra or {}, kind.type
        self.is_argument = "after" in extra or (field.required and field.name == action.named_by)
        self.option: str = extra.get("option") or flag(field.name)
        self.none_option: str = extra.get("none_option", "")
        self.none_help: str = extra.get("none_help", "")
        self.metavar: str | None = extra.get("metavar")
        self.short: str | None = extra.get("short")
        self.is_switch = isinstance(kind, msgspec.inspect.BoolType)
        self.is_table = extra.get("form") == "weights"
        self.is_span = isinstance(kind, msgspec.inspect.FloatType) and field.name.endswith("_s")
        self.is_share = extra.get("form") == "percentage"
        self.is_time = field.name.endswith("_at")
        self.max = getattr(kind, "le", None)

    def signature(self) -> Iterator[inspect.Parameter]:
        """Yield the parameters of the command's function that stand for this action parameter."""
        if self.declared is not None:
            yield field_option(self.declared)
            return
        kind: Any = str
        default = self.default
        if self.is_switch:
            kind = bool
        elif self.is_span:
            default = span_text(default)
        elif self.is_share:
            default = f"{default:.0%}"
        elif self.none_option:
            kind, default = (list[str] if self.is_table else str) | None, None
        elif default is msgspec.NODEFAULT:
            default = inspect.Parameter.empty
        elif default is None:
            kind = str | None
        info: Any
        if self.is_argument:
            info = typer.Argument(metavar=self.metavar, help=self.description, show_default=False)
        else:
            info = typer.Option(
                *(name for name in (self.option, self.short) if name),
                metavar="SPAN" if self.is_span else "TIME" if self.is_time else self.metavar,
                help=self.description,
                show_default=bool(self.default) and self.default is not msgspec.NODEFAULT,
            )
        yield keyword(self.name, Annotated[kind, info], default)
        if self.none_option:
            yield keyword(
                self.none_option.removeprefix("--"),
                Annotated[bool, typer.Option(self.none_option, help=self.none_help)],
                False,
            )

    def value(self, given: Mapping[str, Any]) -> Any:
        """Convert the given option or argument to the parameter's value. Raises CommandLineError if it is
        invalid."""
        from appliance.cli.failure import CommandLineError
        from appliance.cli.model_splits import percentage, weights
        from appliance.cli.peers import by_number
        from appliance.cli.times import moment, span_s

        text = given[self.name]
        if self.none_option:
            is_none = given[self.none_option.removeprefix("--")]
            option = "" if self.is_argument else f"{self.option} "
            if is_none and text:
                shown = option + (" ".join(text) if self.is_table else text)
                raise CommandLineError(f"{shown} and {self.none_option} were both given: give only one")
            if is_none:
                return None
            if not text:
                raise CommandLineError(
                    f"no {self.name} given: add {option}{self.metavar}, or {self.none_option} "
                    f"({self.none_help})"
                )
        if self.is_table:
            return weights(text)
        if self.is_share:
            return percentage(text, self.option)
        if self.is_span:
            return span_s(text, self.option, self.max or MAX_SPAN_S)
        if self.is_time:
            return None if text is None else moment(text, self.option, ahead=True)
        return by_number(text) if self.name == "peer" else text


Perform = Callable[[Any, Mapping[str, Any]], None]
"""Performs an action, given its parameters and the values of the command's options."""


def add_commands(group: typer.Typer, *names: str) -> None:
    """Add each action's command to the group."""
    for name in names:
        add_command(group, name)


def add_command(
    group: typer.Typer,
    name: str,
    *extra: inspect.Parameter,
    perform: Perform | None = None,
    details: str = "",
) -> None:
    """Add the command of the action `name` to a group. `extra` are options that only the command has,
    `perform` replaces the usual way of performing the action, and `details` is appended to the help."""
    action = action_named(name)
    parameters = [_Parameter(action, field) for field in msgspec.structs.fields(action.parameters)]
    own = [option for one in parameters if one.declared is None for option in one.signature()]
    own += extra
    if action.changes_fields:
        own.append(keyword("what_if", _WhatIf, False))
    if action.danger != "none":
        own.append(keyword("yes", Yes, False))
    declared = [option for one in parameters if one.declared is not None for option in one.signature()]
    common = [keyword("run_dir", RunDir, None), keyword("json", Json, False)]
    # In Python, parameters without a default must come before the others.
    own.sort(key=lambda one: one.default is not inspect.Parameter.empty)

    def run(**given: Any) -> None:
        (perform or _perform)(_asked(action, parameters, given), given)

    run.__signature__ = inspect.Signature([*own, *declared, *common])  # type: ignore[attr-defined]
    note = ' The value "none" removes a limit.' if action.changes_fields else ""
    group.command(name.rpartition(".")[2], help=action.description + note + details)(run)


def _asked(action: Action, parameters: list[_Parameter], given: Mapping[str, Any]) -> msgspec.Struct:
    """Return the action's parameters. Raises CommandLineError for an invalid value."""
    from appliance.cli.failure import CommandLineError
    from appliance.cli.fields import given_fields

    fields = given_fields(given, [one.declared for one in parameters if one.declared is not None])
    if action.changes_fields and not fields:
        raise CommandLineError(f"no changes were given: see appliance {action.name.replace('.', ' ')} --help")
    values = {one.name: one.value(given) for one in parameters if one.declared is None}
    return action.parameters(**values, **fields)


def _perform(asked: Any, given: Mapping[str, Any]) -> None:
    from appliance.cli.actions import perform

    if given.get("what_if"):
        from appliance.cli.what_if import print_forecast

        print_forecast(given["run_dir"], asked, as_json=given["json"])
    else:
        perform(given["run_dir"], asked, yes=given.get("yes", False), as_json=given["json"])


def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a parameter of a command's function that can be passed by keyword."""
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )
