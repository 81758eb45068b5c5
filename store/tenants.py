"""Creates, changes and deletes tenants, and maps users and groups to them, in the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import msgspec

from store import records
from store.errors import ConflictError, UnknownPeerError, UnknownTenantError
from store.fields import declared
from store.policies import Change, KeyRecord, PeerKind, PeerRecord, Quota, TenantRecord
from store.rules import check_peer, check_tenant, check_tenant_name

LOCAL = "local"
"""The tenant of local users without a mapping."""
DEFAULT = "default"
"""The tenant of keys created without a tenant."""
BUILT_IN = (LOCAL, DEFAULT)


def create(connection: sqlite3.Connection, tenant: TenantRecord) -> Change:
    """Add a tenant. Raises ValueError for an invalid field, and ConflictError if the name is taken."""
    check_tenant_name(tenant.name)
    check_tenant(tenant)
    if records.find(connection, TenantRecord, tenant.name) is not None:
        raise ConflictError(f"tenant {tenant.name!r} already exists", "change it, or choose another name")
    records.insert(connection, tenant)
    return Change(None, tenant)


def alter(connection: sqlite3.Connection, name: str, changes: Mapping[str, object]) -> Change:
    """Set tenant fields. Raises ValueError if a value is invalid, and UnknownTenantError if there is no such
    tenant."""
    before = find(connection, name)
    after = replaced(before, changes)
    check_tenant(after)
    records.update(connection, after)
    return Change(before, after)


def suspend(connection: sqlite3.Connection, name: str, now: float | None) -> Change:
    """Refuse a tenant's requests from unix time `now` on, or accept them again if `now` is None. Does nothing
    if the tenant is already in that state. Raises UnknownTenantError if there is no such tenant."""
    before = find(connection, name)
    if (before.suspended_at is None) == (now is None):
        return Change(before, before)
    after = msgspec.structs.replace(before, suspended_at=now)
    records.update(connection, after)
    return Change(before, after)


def delete(connection: sqlite3.Connection, name: str, now: float) -> Change:
    """Delete a tenant. Raises UnknownTenantError if there is no such tenant, and ConflictError if the tenant
    is built in, has a peer, or has a key that is valid at unix time `now`."""
    tenant = find(connection, name)
    if name in BUILT_IN:
        raise ConflictError(
            f"tenant {name!r} is built in and cannot be deleted",
            "to refuse requests from it, suspend the tenant",
        )
    keys = [key for key in records.select(connection, KeyRecord, "tenant = ?", name) if key.valid_at(now)]
    peers = records.select(connection, PeerRecord, "tenant = ?", name)
    if keys or peers:
        in_use = [f"key {key.id}" for key in keys] + [f"{peer.kind} {peer.number}" for peer in peers]
        shown = ", ".join(in_use[:5]) + (f" and {len(in_use) - 5} more" if len(in_use) > 5 else "")
        raise ConflictError(
            f"tenant {name!r} is in use by {shown}", "revoke its keys and unmap its peers first"
        )
    records.delete(connection, tenant)
    return Change(tenant, None)


def map_peer(connection: sqlite3.Connection, peer: PeerRecord) -> Change:
    """Map a user or group to a tenant, replacing any earlier mapping. Raises ValueError for an invalid kind
    or number, and UnknownTenantError if there is no such tenant."""
    check_peer(peer)
    find(connection, peer.tenant)
    before = records.find(connection, PeerRecord, peer.kind, peer.number)
    if before is None:
        records.insert(connection, peer)
    else:
        records.update(connection, peer)
    return Change(before, peer)


def unmap_peer(connection: sqlite3.Connection, kind: PeerKind, number: int) -> Change:
    """Remove a user or group mapping. Raises UnknownPeerError if there is no such mapping."""
    before = records.find(connection, PeerRecord, kind, number)
    if before is None:
        raise UnknownPeerError(
            f"{kind} {number} is not mapped to a tenant",
            "list the mapped users and groups with: appliance peers list",
        )
    records.delete(connection, before)
    return Change(before, None)


def find(connection: sqlite3.Connection, name: str) -> TenantRecord:
    """Return the tenant with this name. Raises UnknownTenantError if there is no such tenant."""
    tenant = records.find(connection, TenantRecord, name)
    if tenant is None:
        raise UnknownTenantError(
            f"there is no tenant {name!r}",
            "create it first, or list the tenants with: appliance tenants list",
        )
    return tenant


def replaced(before: records.R, changes: Mapping[str, object]) -> records.R:
    """Return a copy of the record with the declared fields in `changes` replaced. `changes["quota"]` contains
    only the quota fields to change. Raises ValueError for a field that cannot be set."""
    settable = {*declared(type(before)), "quota"}
    if unknown := changes.keys() - settable:
        raise ValueError(
            f"{sorted(unknown)[0]} cannot be set: available fields are {', '.join(sorted(settable))}"
        )
    fields = dict(changes)
    if isinstance(quota := fields.get("quota"), Mapping):
        known = getattr(before, "quota", Quota())
        fields["quota"] = msgspec.structs.replace(known, **quota)
    return msgspec.structs.replace(before, **fields)
