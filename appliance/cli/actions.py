"""Performs an operator's action: the registry says what to ask first, the service does it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from appliance.actions import Action, action_of
from appliance.cli.failure import CommandLineError, Failure
from appliance.cli.output import is_terminal, print_json, printable
from appliance.cli.service import admin_client
from appliance.protocol import Done


def perform(
    run_dir: str | None,
    parameters: msgspec.Struct,
    *,
    as_json: bool,
    yes: bool = False,
    show: Callable[[Any], None] | None = None,
) -> None:
    """Perform the action that `parameters` belong to and print its result. `show` prints results other than
    `Done`; `yes`: do not ask before a dangerous action."""
    action = action_of(parameters)
    confirm(action, _object_of(parameters), yes=yes)
    with admin_client(run_dir) as client:
        result = client.act(parameters)
    if as_json:
        print_json(result)
    elif show is not None:
        show(result)
    else:
        print(printable(result.message) if isinstance(result, Done) else result)


def confirm(action: Action, what: str, *, yes: bool) -> None:
    """Ask before an action that the registry calls dangerous, unless `yes`. Raises Failure if the person does
    not agree, and CommandLineError where there is no terminal to ask on."""
    if action.danger == "none" or yes:
        return
    if not is_terminal(sys.stdin):
        raise CommandLineError(
            f"'{action.title} {what}' needs --yes: standard input is not a terminal, so the command "
            "cannot ask for confirmation"
        )
    print(f"{action.title} {what}? ", end="", flush=True, file=sys.stderr)
    print("Type its name: " if action.danger == "typed" else "[y/N] ", end="", flush=True, file=sys.stderr)
    answer = sys.stdin.readline().strip()
    agreed = answer == what if action.danger == "typed" else answer.lower() in ("y", "yes")
    if not agreed:
        raise Failure("nothing was changed")


def _object_of(parameters: msgspec.Struct) -> str:
    """Return what the action is about: its first parameter that has no default."""
    required = (field.name for field in msgspec.structs.fields(parameters) if field.required)
    name = next(required, None)
    return "" if name is None else printable(str(getattr(parameters, name)))
