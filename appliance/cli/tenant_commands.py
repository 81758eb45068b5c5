"""The commands for tenants, keys, and local users and groups. They are implemented in neighbouring modules,
which are loaded on demand. The options for fields come from `store.policies`, and the descriptions come from
`appliance.actions`."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.actions import action_named
from appliance.cli.fields import with_fields
from appliance.cli.options import Json, RunDir, Yes
from store.fields import declared
from store.policies import KeyFields, TenantRecord

tenants = typer.Typer(
    help="Manage tenants, which are billed for requests, and their limits.", no_args_is_help=True
)
keys = typer.Typer(help="Manage bearer keys, which TCP clients need.", no_args_is_help=True)
peers = typer.Typer(help="Manage local users and groups, which need no key.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The tenant's name, as shown by `tenants list`.", show_default=False),
]
KeyId = Annotated[
    str, typer.Argument(metavar="ID", help="The key's id, as shown by `keys list`.", show_default=False)
]
PeerName = Annotated[
    str,
    typer.Argument(
        metavar="PEER",
        help="A user or group, such as uid:1000, user:alice, gid:100 or group:staff.",
        show_default=False,
    ),
]


WhatIf = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Change nothing. Replay the requests of the last 15 minutes with these limits, and show which "
        "would have been refused.",
    ),
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="Also cancel the running and queued requests of this tenant or key.")
]


def about(action: str) -> str:
    """Return an action's help text for its command."""
    return action_named(action).description


@tenants.command("list")
def tenants_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List all tenants."""
    from appliance.cli.tenants import list_tenants

    list_tenants(run_dir, as_json=json)


@tenants.command("show")
def tenants_show(name: Name, run_dir: RunDir = None, json: Json = False) -> None:
    """Show a tenant with all its limits."""
    from appliance.cli.tenants import show_tenant

    show_tenant(run_dir, name, as_json=json)


@tenants.command("create", help=about("tenants.create"))
@with_fields(TenantRecord)
def tenants_create(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The tenant's name, which cannot change.", show_default=False),
    ],
    run_dir: RunDir = None,
    json: Json = False,
    **fields: str | None,
) -> None:
    from appliance.cli.tenants import create_tenant

    create_tenant(run_dir, name, fields, as_json=json)


@tenants.command("set", help=about("tenants.set") + ' The value "none" removes a limit.')
@with_fields(TenantRecord)
def tenants_set(
    name: Name, what_if: WhatIf = False, run_dir: RunDir = None, json: Json = False, **fields: str | None
) -> None:
    from appliance.cli.tenants import set_tenant

    set_tenant(run_dir, name, fields, what_if=what_if, as_json=json)


@tenants.command("suspend", help=about("tenants.suspend"))
def tenants_suspend(
    name: Name, cancel: Cancel = False, yes: Yes = False, run_dir: RunDir = None, json: Json = False
) -> None:
    from appliance.actions import SuspendTenant
    from appliance.cli.actions import perform

    perform(run_dir, SuspendTenant(name=name, cancel=cancel), yes=yes, as_json=json)


@tenants.command("resume", help=about("tenants.resume"))
def tenants_resume(name: Name, run_dir: RunDir = None, json: Json = False) -> None:
    from appliance.actions import ResumeTenant
    from appliance.cli.actions import perform

    perform(run_dir, ResumeTenant(name=name), as_json=json)


@tenants.command("delete", help=about("tenants.delete"))
def tenants_delete(name: Name, yes: Yes = False, run_dir: RunDir = None, json: Json = False) -> None:
    from appliance.actions import DeleteTenant
    from appliance.cli.actions import perform

    perform(run_dir, DeleteTenant(name=name), yes=yes, as_json=json)


@keys.command("list")
def keys_list(
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="List only keys of this tenant.")] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """List all keys, including revoked keys, without their secrets."""
    from appliance.cli.keys import list_keys

    list_keys(run_dir, tenant, as_json=json)


@keys.command("create", help=about("keys.create"))
@with_fields(KeyFields, but=("name",))
def keys_create(
    name: Annotated[
        # The flag is given explicitly, because typer 0.27 would otherwise use a metavar with the same name as
        # the flag.
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            help=f"{declared(KeyFields)['name'].description}.",
            show_default=False,
        ),
    ],
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="The tenant that is billed for the key's requests.")
    ] = "default",
    run_dir: RunDir = None,
    json: Json = False,
    **fields: str | None,
) -> None:
    from appliance.cli.keys import create_key

    create_key(run_dir, name, tenant, fields, as_json=json)


@keys.command("set", help=about("keys.set") + ' The value "none" removes a limit.')
@with_fields(KeyFields)
def keys_set(
    key_id: KeyId, what_if: WhatIf = False, run_dir: RunDir = None, json: Json = False, **fields: str | None
) -> None:
    from appliance.cli.keys import set_key

    set_key(run_dir, key_id, fields, what_if=what_if, as_json=json)


@keys.command("rotate", help=about("keys.rotate"))
def keys_rotate(
    key_id: KeyId,
    overlap_s: Annotated[
        str, typer.Option("--overlap", metavar="SPAN", help="Time for which the old key stays valid.")
    ] = "24h",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Expiry of the new key, as a date or as a time span from now. By default, the new key gets "
            "the old key's lifetime.",
        ),
    ] = None,
    yes: Yes = False,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    from appliance.cli.keys import rotate_key

    rotate_key(run_dir, key_id, overlap_s, expires, yes=yes, as_json=json)


@keys.command("revoke", help=about("keys.revoke"))
def keys_revoke(
    key_id: KeyId, cancel: Cancel = False, yes: Yes = False, run_dir: RunDir = None, json: Json = False
) -> None:
    from appliance.actions import RevokeKey
    from appliance.cli.actions import perform

    perform(run_dir, RevokeKey(id=key_id, cancel=cancel), yes=yes, as_json=json)


@peers.command("list")
def peers_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List the users and groups that need no key on api.sock."""
    from appliance.cli.peers import list_peers

    list_peers(run_dir, as_json=json)


@peers.command("map", help=about("peers.map"))
def peers_map(
    peer: PeerName,
    tenant: Annotated[
        str,
        typer.Option(
            "--tenant", metavar="NAME", help="The tenant that is billed for the requests.", show_default=False
        ),
    ],
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    from appliance.cli.peers import map_peer

    map_peer(run_dir, peer, tenant, as_json=json)


@peers.command("unmap", help=about("peers.unmap"))
def peers_unmap(peer: PeerName, yes: Yes = False, run_dir: RunDir = None, json: Json = False) -> None:
    from appliance.cli.peers import unmap_peer

    unmap_peer(run_dir, peer, yes=yes, as_json=json)
