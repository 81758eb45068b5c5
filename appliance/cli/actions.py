"""Doing an operator's action: what to ask before comes from the registry, the doing from the service."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from appliance.actions import Action, action_of
from appliance.cli.failure import Failure
from appliance.cli.output import is_terminal, print_json, printable
from appliance.cli.service import admin_client
from appliance.protocol import Done


def perform(
    run_dir: str | None,
    parameters: msgspec.Struct,
    *,
    yes: bool,
    as_json: bool,
    show: Callable[[Any], None] | None = None,
) -> None:
    """Do the action that `parameters` belong to and say what came of it; `show` prints another result than
    `Done`."""
    action = action_of(parameters)
    if not yes:
        confirm(action, _object_of(parameters))
    with admin_client(run_dir) as client:
        result = client.act(parameters)
    if as_json:
        print_json(result)
    elif show is not None:
        show(result)
    else:
        print(printable(result.message) if isinstance(result, Done) else result)


def confirm(action: Action, what: str) -> None:
    """Ask before an action that the registry calls dangerous. Raises Failure unless the person agrees.

    Only where a person sits: a script that calls the command has decided already.
    """
    if action.danger == "none" or not is_terminal(sys.stdin):
        return
    print(f"{action.title} {what}? ", end="", flush=True, file=sys.stderr)
    print("Type its name: " if action.danger == "typed" else "[y/N] ", end="", flush=True, file=sys.stderr)
    answer = sys.stdin.readline().strip()
    agreed = answer == what if action.danger == "typed" else answer.lower() in ("y", "yes")
    if not agreed:
        raise Failure("nothing was done")


def _object_of(parameters: msgspec.Struct) -> str:
    """What the action is about: its first parameter that has no default."""
    required = (field.name for field in msgspec.structs.fields(parameters) if field.required)
    name = next(required, None)
    return "" if name is None else printable(str(getattr(parameters, name)))
