"""`appliance keys`."""

from __future__ import annotations

import sys
import time

from appliance.actions import CreateKey, RevokeKey
from appliance.cli.actions import perform
from appliance.cli.output import Column, paint, print_json, printable, table, terminal_width
from appliance.cli.service import admin_client
from appliance.cli.times import local, moment
from appliance.protocol import Key, NewKey

_COLUMNS = (
    Column("ID"),
    Column("NAME", flexible=True),
    Column("TENANT", flexible=True, drop=1),
    Column("KEY", drop=3),
    Column("CREATED", drop=2),
    Column("STATE"),
)


def create_key(run_dir: str | None, name: str, tenant: str, expires: str | None, *, as_json: bool) -> None:
    """Make a key and show it."""
    expires_at = None if expires is None else moment(expires, "--expires", ahead=True)
    with admin_client(run_dir) as client:
        made = client.act(CreateKey(name=name, tenant=tenant, expires_at=expires_at))
    assert isinstance(made, NewKey)
    if as_json:
        print_json(made)
        return
    until = f", good until {local(made.expires_at)}" if made.expires_at is not None else ""
    print(made.key)
    print(
        f"This is key {made.id} ({printable(made.name)}) of tenant {printable(made.tenant)}{until}. "
        f"It is shown this once: keep it now.",
        file=sys.stderr,
    )


def list_keys(run_dir: str | None, *, as_json: bool) -> None:
    """All keys, oldest first."""
    with admin_client(run_dir) as client:
        found = client.keys()
    if as_json:
        print_json(found)
        return
    if not found:
        print("There are no keys; make one with: appliance keys create --name NAME", file=sys.stderr)
        return
    rows = [
        (
            key.id,
            printable(key.name),
            printable(key.tenant),
            f"{key.prefix}…",
            local(key.created_at),
            _state(key),
        )
        for key in found
    ]
    for line in _dimmed(table(_COLUMNS, rows, width=terminal_width())):
        print(line)


def revoke_key(run_dir: str | None, key_id: str, *, yes: bool, as_json: bool) -> None:
    """Make a key worthless."""
    perform(run_dir, RevokeKey(id=key_id), yes=yes, as_json=as_json)


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return f"revoked {local(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'expired' if key.expires_at <= time.time() else 'valid until'} {local(key.expires_at)}"


def _dimmed(lines: list[str]) -> list[str]:
    return [paint(lines[0], "dim"), *lines[1:]]
