"""The commands for tenants, keys, and local users and groups. The `list` commands are implemented in
neighbouring modules, which are loaded on demand. The commands for actions come from the registry."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.action_commands import add_commands
from appliance.cli.options import Json, RunDir

commands = typer.Typer()
tenants = typer.Typer(
    help="Manage tenants, to which requests are billed, and their limits.", no_args_is_help=True
)
keys = typer.Typer(help="Manage bearer keys, which TCP clients need.", no_args_is_help=True)
peers = typer.Typer(help="Manage local users and groups, which need no key.", no_args_is_help=True)
for _name, _group in (("tenants", tenants), ("keys", keys), ("peers", peers)):
    commands.add_typer(_group, name=_name)


@tenants.command("list")
def tenants_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List all tenants."""
    from appliance.cli.tenants import list_tenants

    list_tenants(run_dir, as_json=json)


@tenants.command("show")
def tenants_show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="The tenant's name, as shown by `tenants list`.", show_default=False
        ),
    ],
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Show a tenant with all its limits."""
    from appliance.cli.tenants import show_tenant

    show_tenant(run_dir, name, as_json=json)


add_commands(tenants, "tenants.create", "tenants.set", "tenants.suspend", "tenants.resume", "tenants.delete")


@keys.command("list")
def keys_list(
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="List only this tenant's keys.")] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """List all keys, including revoked keys, without their secrets."""
    from appliance.cli.keys import list_keys

    list_keys(run_dir, tenant, as_json=json)


add_commands(keys, "keys.create", "keys.set", "keys.rotate", "keys.revoke")


@peers.command("list")
def peers_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List the users and groups that need no key on api.sock."""
    from appliance.cli.peers import list_peers

    list_peers(run_dir, as_json=json)


add_commands(peers, "peers.map", "peers.unmap")
