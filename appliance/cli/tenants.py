"""Implements `appliance tenants list` and `show`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from appliance.cli.failure import Failure
from appliance.cli.fields import limits, shown
from appliance.cli.output import Column, of_count, paint, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.cli.tables import field_cells, field_columns
from appliance.cli.times import local
from appliance.protocol import Key, LimitUsage, Tenant
from appliance.quantities import duration
from store.fields import declared
from store.policies import Quota, TenantRecord

_FIELDS = tuple(declared(TenantRecord).values())
_COLUMNS = (
    Column("NAME", flexible=True),
    Column("STATE", colours={"suspended": "red"}),
    *field_columns(_FIELDS, first_drop=3),
    Column("KEYS", right=True),
    Column("PEERS", right=True, drop=2),
    Column("LIMITS", flexible=True, drop=1),
)
_USAGE_COLUMNS = (
    Column("SCOPE", flexible=True),
    Column("LIMIT"),
    Column("USED", right=True),
    Column("OF", right=True),
    Column("HELD", right=True, drop=2),
    Column("RESETS IN", drop=1),
)


def list_tenants(run_dir: str | None, *, as_json: bool) -> None:
    """Print all tenants."""
    with admin_client(run_dir) as client:
        found = client.tenants()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            printable(tenant.name),
            _state(tenant),
            *field_cells(_FIELDS, tenant),
            of_count(tenant.keys),
            of_count(tenant.peers),
            ", ".join(limits(tenant.quota)) or "none",
        )
        for tenant in found
    ]
    print_table(_COLUMNS, rows)


def show_tenant(run_dir: str | None, name: str, *, as_json: bool) -> None:
    """Print a tenant. Raises Failure if there is no tenant with this name."""
    with admin_client(run_dir) as client:
        found = [tenant for tenant in client.tenants() if tenant.name == name]
        keys = [] if as_json else client.keys()
    if not found:
        raise Failure(f"there is no tenant {name!r}; list the tenants with: appliance tenants list")
    if as_json:
        print_json(found[0])
        return
    print_tenant(found[0])
    rows = [_used("tenant", usage) for usage in found[0].usage]
    rows += [
        _used(f"key {key.name}", usage)
        for key in keys
        if key.tenant == name and _valid(key)
        for usage in key.usage
    ]
    if rows:
        print()
        print_table(_USAGE_COLUMNS, rows)


def _used(scope: str, usage: LimitUsage) -> tuple[str, ...]:
    if usage.resets_in_s is None:
        reset = "when requests end" if usage.used else "-"
    else:
        reset = duration(usage.resets_in_s) if usage.used else "-"
    return (
        printable(scope),
        _limit(usage.limit),
        of_count(usage.used),
        of_count(usage.capacity),
        of_count(usage.held),
        reset,
    )


def _valid(key: Key) -> bool:
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > time.time())


def print_tenant(tenant: Tenant) -> None:
    """Print all fields of a tenant."""
    for name, value in _fields(tenant):
        print(f"{paint(f'{name:22}', 'dim')}  {printable(value)}")


def _fields(tenant: Tenant) -> Iterable[tuple[str, str]]:
    yield "name", tenant.name + (" (built in)" if tenant.built_in else "")
    since = "" if tenant.suspended_at is None else f" since {local(tenant.suspended_at)}"
    yield "state", _state(tenant) + since
    yield "created", local(tenant.created_at)
    yield "keys", f"{of_count(tenant.keys)} valid"
    yield "peers", of_count(tenant.peers)
    for holder in (tenant, tenant.quota):
        for field in declared(type(holder)).values():
            yield field.label, shown(field, getattr(holder, field.name))


def _limit(name: str) -> str:
    field = declared(Quota).get(name)
    return name if field is None else field.label


def _state(tenant: Tenant) -> str:
    return "active" if tenant.suspended_at is None else "suspended"
