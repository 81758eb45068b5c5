"""Changes of tenants, and of the users and groups of the box that stand for them: each inside the caller's
transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import msgspec

from store import records
from store.errors import ConflictError, UnknownPeerError, UnknownTenantError
from store.policies import Change, KeyRecord, PeerRecord, Quota, TenantRecord
from store.rules import check_peer, check_tenant, check_tenant_name

LOCAL = "local"
"""Who users of the box are billed to that are not mapped to another tenant."""
DEFAULT = "default"
"""Who keys are billed to that name no tenant."""
BUILT_IN = (LOCAL, DEFAULT)

SETTABLE = frozenset(TenantRecord.__struct_fields__) - {"name", "created_at", "suspended_at"}


def create(connection: sqlite3.Connection, tenant: TenantRecord) -> Change:
    """Add a tenant. Raises ValueError, ConflictError."""
    check_tenant_name(tenant.name)
    check_tenant(tenant)
    if records.find(connection, TenantRecord, tenant.name) is not None:
        raise ConflictError(f"there is a tenant {tenant.name!r} already: change it, or give another name")
    records.insert(connection, tenant)
    return Change(None, tenant)


def alter(connection: sqlite3.Connection, name: str, changes: Mapping[str, object]) -> Change:
    """Set fields of a tenant. Raises ValueError, UnknownTenantError."""
    before = find(connection, name)
    after = replaced(before, changes, SETTABLE)
    check_tenant(after)
    records.update(connection, after)
    return Change(before, after)


def suspend(connection: sqlite3.Connection, name: str, now: float | None) -> Change:
    """Serve nothing of a tenant from unix time `now` on; None: serve it again. What is so stays as it is.
    Raises UnknownTenantError."""
    before = find(connection, name)
    if (before.suspended_at is None) == (now is None):
        return Change(before, before)
    after = msgspec.structs.replace(before, suspended_at=now)
    records.update(connection, after)
    return Change(before, after)


def delete(connection: sqlite3.Connection, name: str, now: float) -> Change:
    """Remove a tenant that nobody can use at unix time `now`. Raises UnknownTenantError, ConflictError."""
    tenant = find(connection, name)
    if name in BUILT_IN:
        raise ConflictError(f"tenant {name!r} is built in and cannot be deleted: suspend it to stop it")
    keys = [key for key in records.select(connection, KeyRecord, "tenant = ?", name) if key.valid_at(now)]
    peers = records.select(connection, PeerRecord, "tenant = ?", name)
    if keys or peers:
        in_use = [f"key {key.id}" for key in keys] + [f"{peer.kind} {peer.number}" for peer in peers]
        shown = ", ".join(in_use[:5]) + (f" and {len(in_use) - 5} more" if len(in_use) > 5 else "")
        raise ConflictError(
            f"tenant {name!r} is in use by {shown}: revoke its keys and unmap its peers first"
        )
    records.delete(connection, tenant)
    return Change(tenant, None)


def map_peer(connection: sqlite3.Connection, peer: PeerRecord) -> Change:
    """Let a user or group stand for a tenant, instead of the one that it stood for. Raises ValueError,
    UnknownTenantError."""
    check_peer(peer)
    find(connection, peer.tenant)
    before = records.find(connection, PeerRecord, peer.kind, peer.number)
    if before is None:
        records.insert(connection, peer)
    else:
        records.update(connection, peer)
    return Change(before, peer)


def unmap_peer(connection: sqlite3.Connection, kind: str, number: int) -> Change:
    """Forget whom a user or group stands for. Raises UnknownPeerError."""
    before = records.find(connection, PeerRecord, kind, number)
    if before is None:
        raise UnknownPeerError(f"{kind} {number} is not mapped to a tenant: list the peers to see which are")
    records.delete(connection, before)
    return Change(before, None)


def find(connection: sqlite3.Connection, name: str) -> TenantRecord:
    """The tenant of this name. Raises UnknownTenantError."""
    tenant = records.find(connection, TenantRecord, name)
    if tenant is None:
        raise UnknownTenantError(f"there is no tenant {name!r}: list the tenants, or create it first")
    return tenant


def replaced(before: records.R, changes: Mapping[str, object], settable: frozenset[str]) -> records.R:
    """The record with these fields set; of a quota, those of its fields that `changes["quota"]` names. Raises
    ValueError for a field that cannot be set."""
    if unknown := changes.keys() - settable:
        raise ValueError(f"{sorted(unknown)[0]} cannot be set: it can be {', '.join(sorted(settable))}")
    fields = dict(changes)
    if isinstance(quota := fields.get("quota"), Mapping):
        known = getattr(before, "quota", Quota())
        fields["quota"] = msgspec.structs.replace(known, **quota)
    return msgspec.structs.replace(before, **fields)
