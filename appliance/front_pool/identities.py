"""Derives the identity table from tenants, keys and settings. Fronts use it to authenticate callers. The
table is rebuilt only when policies or settings change. Fronts then receive only the differences. The core
always reads a caller's rights from its own table (`IdentityRegistry.of`), never from a front's message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec

from appliance.channel.core_messages import Identities
from appliance.channel.identity import Identity
from appliance.settings import UnixSettings
from store.policies import KeyRecord, Policies, TenantRecord
from store.tenants import LOCAL


class IdentityRegistry:
    """The identities defined by the current policies and settings."""

    def __init__(self, policies: Callable[[], Policies], unix: UnixSettings) -> None:
        self.unix = unix
        """Unix socket settings. May be reassigned at any time."""
        self._policies = policies
        self._made_of: tuple[Policies, UnixSettings] | None = None
        self._table = Identities()
        self._known: dict[str, tuple[KeyRecord, TenantRecord, Identity]] = {}
        """The identity of each key, by key id, with the records from which it was derived."""

    def current(self) -> Identities:
        """Return the full identity table. Returns the same object until a policy or setting changes."""
        policies = self._policies()
        if self._made_of is None or self._made_of[0] is not policies or self._made_of[1] is not self.unix:
            self._made_of = policies, self.unix
            self._table = self._make(policies, time.time())
        return self._table

    def of(self, identity: Identity) -> Identity:
        """Return the current rights of a caller identified by a front. If the caller's tenant or key has
        since been deleted, return the rights of a tenant without a policy."""
        policies = self._policies()
        if (tenant := policies.tenants.get(identity.tenant)) is not None:
            if not identity.key_id:
                return _of_peer(tenant)
            key = policies.keys.get(identity.key_id)
            if key is not None and key.tenant == tenant.name:
                return self._of_key(key, tenant)
        return Identity(tenant=identity.tenant, key_id=identity.key_id)

    def _make(self, policies: Policies, now: float) -> Identities:
        self._known = {name: known for name, known in self._known.items() if name in policies.keys}
        keys: dict[str, Identity | None] = {}
        for key in policies.keys.values():
            tenant = policies.tenants.get(key.tenant)
            if tenant is not None and key.valid_at(now):
                keys[key.sha256] = self._of_key(key, tenant)
        peers: dict[str, dict[int, Identity]] = {"uid": {}, "gid": {}}
        local = policies.tenants.get(LOCAL)
        if local is not None:
            peers["uid"] = dict.fromkeys(sorted(local_uids(self.unix)), _of_peer(local))
        for peer in policies.peers.values():
            if (tenant := policies.tenants.get(peer.tenant)) is not None:
                peers[peer.kind][peer.number] = _of_peer(tenant)
        return Identities(
            keys=keys,
            uids=peers["uid"],
            gids=peers["gid"],
            any_uid=_of_peer(local) if local is not None and self.unix.uids == "any" else None,
        )

    def _of_key(self, key: KeyRecord, tenant: TenantRecord) -> Identity:
        known = self._known.get(key.id)
        if known is not None and known[0] is key and known[1] is tenant:
            return known[2]
        highest = max(tenant.highest_class, key.highest_class or 0)
        lengths = (tenant.quota.context_tokens, key.quota.context_tokens)
        identity = msgspec.structs.replace(
            _of_peer(tenant),
            key_id=key.id,
            scopes=key.scopes,
            models=key.models,
            highest_class=highest,
            default_class=max(tenant.default_class, highest),
            context_tokens=min((length for length in lengths if length is not None), default=None),
            may_fall_back=key.fallback == "allowed",
            expires_at=key.expires_at,
        )
        self._known[key.id] = (key, tenant, identity)
        return identity


def local_uids(unix: UnixSettings) -> set[int]:
    """Return the uids of the users whose default tenant is "local": the owner, root, and the users named in
    the settings."""
    return {os.geteuid(), 0, *(unix.uids if isinstance(unix.uids, list) else ())}


def changes(before: Identities, after: Identities) -> Identities | None:
    """Return the message that updates a front's identity table from `before` to `after`, or None if they are
    equal."""
    keys = {name: known for name, known in after.keys.items() if before.keys.get(name) != known}
    keys |= dict.fromkeys(before.keys.keys() - after.keys.keys())
    same = (before.uids, before.gids, before.any_uid) == (after.uids, after.gids, after.any_uid)
    if not keys and same:
        return None
    return Identities(keys=keys, uids=after.uids, gids=after.gids, any_uid=after.any_uid, whole=False)


def _of_peer(tenant: TenantRecord) -> Identity:
    return Identity(
        tenant=tenant.name,
        highest_class=tenant.highest_class,
        default_class=max(tenant.default_class, tenant.highest_class),
        context_tokens=tenant.quota.context_tokens,
        default_max_tokens=tenant.default_max_tokens,
        log_policy=tenant.log_policy,
        suspended=tenant.suspended_at is not None,
    )
