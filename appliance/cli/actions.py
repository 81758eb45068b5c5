"""Performs operators' actions: asks for confirmation if the action registry requires it, then calls the
service."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import msgspec

from appliance.actions import Action, action_of
from appliance.cli.failure import CommandLineError, Failure
from appliance.cli.output import is_terminal, print_json, printable
from appliance.cli.results import print_result
from appliance.cli.service import admin_client
from appliance.cli.status_line import loads_shown
from appliance.protocol import ReplicaStatus
from appliance.protocol.registry import VersionStatus


def perform(run_dir: str | None, parameters: msgspec.Struct, *, as_json: bool, yes: bool = False) -> None:
    """Perform the action with these parameters and print the result. If `yes` is set, dangerous actions need
    no confirmation."""
    action = action_of(parameters)
    confirm(action, printable(action.target_name(parameters)), yes=yes)
    with _progress(run_dir, action, parameters), admin_client(run_dir) as client:
        result = client.act(parameters)
    if as_json:
        print_json(result)
    else:
        print_result(result)


def _progress(
    run_dir: str | None, action: Action, parameters: msgspec.Struct
) -> AbstractContextManager[None]:
    """Return a context manager that shows the progress of a load. Nothing is shown if standard error is not a
    terminal or if the action does not return a version's state."""
    if action.result is not VersionStatus:
        return nullcontext()
    name = getattr(parameters, action.named_by).partition("@")[0]

    def replicas() -> list[ReplicaStatus]:
        with admin_client(run_dir) as client:
            models = client.status().models
        return [one for model in models if model.name.partition("@")[0] == name for one in model.replicas]

    return loads_shown(replicas)


def check_terminal(action: Action, target: str, *, yes: bool) -> None:
    """Raise CommandLineError if the action needs confirmation but standard input is not a terminal."""
    if action.danger != "none" and not yes and not is_terminal(sys.stdin):
        raise CommandLineError(
            f"'{action.title} {target}' needs confirmation, but standard input is not a terminal: add --yes"
        )


def confirm(action: Action, target: str, *, yes: bool) -> None:
    """Ask for confirmation of a dangerous action, unless `yes` is set. Raises Failure if the user declines,
    and CommandLineError if standard input is not a terminal."""
    check_terminal(action, target, yes=yes)
    if action.danger == "none" or yes:
        return
    typed, question = "", "[y/N]"
    if action.danger == "typed":
        typed = action.typed_text(target)
        kind = "the id" if action.named_by == "id" else "the name"
        question = f"Type {kind if action.named_by else typed} to confirm:"
    print(f"{action.title} {target}? {question} ", end="", flush=True, file=sys.stderr)
    answer = sys.stdin.readline().strip()
    agreed = answer == typed if typed else answer.lower() in ("y", "yes")
    if not agreed:
        raise Failure("cancelled: nothing was changed")
