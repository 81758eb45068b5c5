"""Prints action results as text."""

from __future__ import annotations

import sys
from typing import Any

from appliance.cli.output import paint, printable
from appliance.protocol import Contents, Done, Key, NewKey, Reloaded, Tenant
from appliance.protocol.registry import AddedVersion, VersionStatus
from appliance.snapshot import Alert
from store.structs import Silence


def print_result(result: Any) -> None:
    """Print an action's result."""
    match result:
        case Done():
            print(printable(result.message))
        case VersionStatus():
            detail = f": {printable(result.detail)}" if result.detail else ""
            print(f"{printable(result.name)} version {result.version} is {result.state}{detail}")
        case AddedVersion():
            print_added(result)
        case Reloaded():
            _print_reloaded(result)
        case Alert():
            print(printable(f"acknowledged: {result.description}"))
        case Silence():
            from appliance.cli.alerts import silence_line

            print(silence_line(result))
        case Tenant():
            from appliance.cli.tenants import print_tenant

            print_tenant(result)
        case Key():
            from appliance.cli.keys import print_keys

            print_keys([result])
        case NewKey():
            from appliance.cli.keys import print_new_key

            print_new_key(result)
        case Contents():
            from appliance.cli.contents import print_contents

            print_contents(result)
        case _:
            print(result)


def print_added(added: AddedVersion) -> None:
    """Print the added version and the command that loads it."""
    for warning in added.warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    name = printable(added.name)
    print(f"added {name} version {added.version}; load it with: appliance models load {name}@{added.version}")


def _print_reloaded(reloaded: Reloaded) -> None:
    lines = [*reloaded.changed, *reloaded.models]
    for text in lines:
        print(printable(text))
    for text in reloaded.at_restart:
        print(paint(f"{printable(text)} (takes effect only after a restart)", "yellow"))
    if not lines and not reloaded.at_restart:
        print("the settings have not changed")
