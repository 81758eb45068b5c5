"""Checks the values of tenants, keys and peers. Each check raises a `ValueError` that names the field, the
value and the remedy."""

from __future__ import annotations

import re

import msgspec

from store.fields import declared, either
from store.policies import PEER_KINDS, KeyRecord, PeerRecord, Quota, TenantRecord

MAX_PEER_NUMBER = 2**32 - 2
"""Highest valid uid and gid on Linux. The next number means "no id"."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_tenant(tenant: TenantRecord) -> None:
    """Check all of a tenant's fields except the name, which is checked only when the tenant is created."""
    _check_fields(tenant)
    _check_fields(tenant.quota)


def check_key(key: KeyRecord, now: float) -> None:
    """Check a key's fields at unix time `now`."""
    _check_fields(key)
    _check_fields(key.quota)
    if key.expires_at is not None and key.expires_at <= now:
        raise ValueError(
            f"expires_at is {key.expires_at}, which is in the past (now: {now:.0f}): use a later unix time"
        )


def check_peer(peer: PeerRecord) -> None:
    """Check a user or group mapping."""
    if peer.kind not in PEER_KINDS:
        raise wrong("kind", peer.kind, f"use {either(PEER_KINDS)}")
    if not 0 <= peer.number <= MAX_PEER_NUMBER:
        raise wrong("number", peer.number, f"use a Linux {peer.kind} from 0 to {MAX_PEER_NUMBER}")


def check_tenant_name(name: str) -> None:
    """Check the name of a new tenant, which appears in URLs, metric labels and file names."""
    if not _TENANT_NAME.fullmatch(name):
        raise wrong("name", name, "use 1 to 64 letters, digits and ._- and begin with a letter or digit")


def wrong(name: str, value: object, remedy: str) -> ValueError:
    """Return the error for a field with an invalid value."""
    shown = list(value[:3]) if isinstance(value, tuple) else value
    return ValueError(f"{name} is {shown!r}: {remedy}")


def _check_fields(record: msgspec.Struct) -> None:
    for field in declared(type(record)).values():
        value = getattr(record, field.name)
        if (value is None and field.optional) or (value is not None and field.allows(value)):
            continue
        lifted = f", or none for {field.field.none}" if field.optional else ""
        stop = (
            "; to refuse all requests, suspend the tenant or revoke the key"
            if isinstance(record, Quota) and lifted
            else ""
        )
        raise wrong(field.name, value, f"use {field.expected}{lifted}{stop}")
