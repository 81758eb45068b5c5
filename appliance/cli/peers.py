"""Implements `appliance peers list`, and converts local user and group names to numbers."""

from __future__ import annotations

import grp
import pwd

from appliance.cli.failure import CommandLineError
from appliance.cli.output import Column, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.cli.times import local
from appliance.protocol import PeerMapping

_COLUMNS = (
    Column("PEER"),
    Column("NAME", flexible=True),
    Column("TENANT", flexible=True),
    Column("SOURCE", drop=2),
    Column("SINCE", drop=1),
)


def list_peers(run_dir: str | None, *, as_json: bool) -> None:
    """Print the users and groups that need no key."""
    with admin_client(run_dir) as client:
        found = client.peers()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            "any" if peer.kind == "any" else f"{peer.kind}:{peer.number}",
            printable(_called(peer)),
            printable(peer.tenant),
            "settings" if peer.source == "settings" else "operator",
            local(peer.created_at),
        )
        for peer in found
    ]
    print_table(_COLUMNS, rows)


def by_number(peer: str) -> str:
    """Convert `user:alice` to `uid:1000` and `group:staff` to `gid:50`. Return any other text unchanged.
    Raises CommandLineError for an unknown name."""
    kind, _, name = peer.partition(":")
    try:
        if kind == "user":
            return f"uid:{pwd.getpwnam(name).pw_uid}"
        if kind == "group":
            return f"gid:{grp.getgrnam(name).gr_gid}"
    except (KeyError, ValueError):
        raise CommandLineError(
            f"this machine has no {kind} {name!r}: use a numeric id, such as uid:1000 or gid:100"
        ) from None
    return peer


def _called(peer: PeerMapping) -> str:
    if peer.kind == "any":
        return "all other users"
    try:
        if peer.kind == "uid":
            return pwd.getpwuid(peer.number).pw_name
        return grp.getgrgid(peer.number).gr_name
    except (KeyError, OverflowError):
        return "?"
