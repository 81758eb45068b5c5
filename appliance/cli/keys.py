"""Implements `appliance keys list`, and prints keys."""

from __future__ import annotations

import sys
import time

from appliance.cli.fields import limits
from appliance.cli.output import Column, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.cli.tables import field_cells, field_columns
from appliance.cli.times import local
from appliance.protocol import Key, NewKey
from store.fields import declared
from store.policies import KeyFields

_FIELDS = tuple(field for name, field in declared(KeyFields).items() if name not in ("name", "expires_at"))
_COLUMNS = (
    Column("ID"),
    Column("NAME", flexible=True),
    Column("TENANT", flexible=True, drop=1),
    Column("KEY", drop=4),
    *field_columns(_FIELDS, first_drop=5),
    Column("LIMITS", flexible=True, drop=3),
    Column("CREATED", drop=2),
    Column("STATE"),
)


def list_keys(run_dir: str | None, tenant: str | None, *, as_json: bool) -> None:
    """Print all keys or one tenant's keys, oldest first."""
    with admin_client(run_dir) as client:
        every = client.keys()
    found = [key for key in every if tenant in (None, key.tenant)]
    if as_json:
        print_json(found)
    elif found:
        print_keys(found)
    else:
        owner = "" if tenant is None else f" of tenant {printable(tenant)}"
        print(f"No keys{owner}. Create one with: appliance keys create --name NAME", file=sys.stderr)


def print_keys(keys: list[Key]) -> None:
    """Print a table of keys."""
    rows = [
        (
            key.id,
            printable(key.name),
            printable(key.tenant),
            f"{key.prefix}…",
            *field_cells(_FIELDS, key),
            ", ".join(limits(key.quota)),
            local(key.created_at),
            _state(key),
        )
        for key in keys
    ]
    print_table(_COLUMNS, rows)


def print_new_key(made: NewKey) -> None:
    """Print a new key. Only the key itself is written to standard output, so that scripts can read it."""
    until = f", valid until {local(made.expires_at)}" if made.expires_at is not None else ""
    print(made.key)
    print(
        f"This is key {made.id} ({printable(made.name)}) of tenant {printable(made.tenant)}{until}. The "
        "key is shown only once: save it now.",
        file=sys.stderr,
    )
    if made.replaces is not None:
        print(f"Key {made.replaces} stays valid until {local(made.replaced_until)}.", file=sys.stderr)


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return f"revoked {local(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    return f"{'expired' if key.expires_at <= time.time() else 'valid until'} {local(key.expires_at)}"
