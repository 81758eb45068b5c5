"""Lists, creates and changes tenants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from appliance.actions.parameters import CreateTenant, DeleteTenant, ResumeTenant, SetTenant, SuspendTenant
from appliance.admin.effects import Effect, committed, done
from appliance.channel.identity import Identity
from appliance.protocol import LimitUsage, PeerMapping, Tenant
from store.audit import Actor
from store.control import ControlStore
from store.fields import declared
from store.policies import Quota, QuotaScope, TenantRecord
from store.tenants import BUILT_IN

CancelRequests = Callable[[Callable[[Identity], bool], str], int]
"""Cancels the running and queued requests of all matching callers, sends their clients the given message, and
returns the number of cancelled requests."""
Usage = Callable[[QuotaScope, str], list[LimitUsage]]
"""Returns how much of each limit a tenant or key has used. The arguments are ("tenant", name) or ("key",
id)."""


@dataclass(kw_only=True)
class TenantAdmin:
    """Lists and changes tenants for operators. Changes reach the front processes before the operator receives
    the response."""

    control: ControlStore
    usage: Usage
    peers: Callable[[], Iterable[PeerMapping]]
    publish: Callable[[], None]
    """Makes changed tenants take effect in the queue and the front processes."""
    cancel: CancelRequests

    def list(self) -> list[Tenant]:
        """Return all tenants, oldest first."""
        policies, now = self.control.policies, time.time()
        keys = Counter(key.tenant for key in policies.keys.values() if key.valid_at(now))
        peers = Counter(peer.tenant for peer in self.peers())
        return [self._shown(tenant, keys, peers) for tenant in policies.tenants.values()]

    async def create(self, actor: Actor, asked: CreateTenant) -> Effect:
        """Create a tenant. Like all methods that change tenants, raises ValueError for an invalid change and
        StoreError if the database fails."""
        fields = changes(asked, TenantRecord)
        await committed(self.control.create_tenant(actor=actor, name=asked.name, changes=fields))
        return self._changed(asked.name)

    async def set(self, actor: Actor, asked: SetTenant) -> Effect:
        """Change the given fields of a tenant."""
        fields = changes(asked, TenantRecord)
        await committed(self.control.set_tenant(actor=actor, name=asked.name, changes=fields))
        return self._changed(asked.name)

    async def suspend(self, actor: Actor, asked: SuspendTenant) -> Effect:
        """Refuse new requests from a tenant."""
        await committed(self.control.suspend_tenant(actor=actor, name=asked.name))
        self.publish()
        cancelled = None
        if asked.cancel:
            cancelled = self.cancel(
                lambda identity: identity.tenant == asked.name,
                "the tenant that sent this request was suspended",
            )
        return done(f"tenant {asked.name} suspended; {requests_after(cancelled)}")

    async def resume(self, actor: Actor, asked: ResumeTenant) -> Effect:
        """Accept requests from a tenant again."""
        await committed(self.control.resume_tenant(actor=actor, name=asked.name))
        self.publish()
        return done(f"tenant {asked.name} resumed")

    async def delete(self, actor: Actor, asked: DeleteTenant) -> Effect:
        """Delete a tenant that has no keys and no mapped users."""
        await committed(self.control.delete_tenant(actor=actor, name=asked.name))
        self.publish()
        return done(f"tenant {asked.name} deleted")

    def _changed(self, name: str) -> Effect:
        self.publish()
        return Effect(next(tenant for tenant in self.list() if tenant.name == name))

    def _shown(self, tenant: TenantRecord, keys: Counter[str], peers: Counter[str]) -> Tenant:
        return Tenant(
            **msgspec.structs.asdict(tenant),
            built_in=tenant.name in BUILT_IN,
            usage=self.usage("tenant", tenant.name),
            keys=keys[tenant.name],
            peers=peers[tenant.name],
        )


def changes(asked: msgspec.Struct, record: type[msgspec.Struct]) -> dict[str, object]:
    """Return the fields of `record` that the caller has set. Quota fields are nested under "quota"."""
    given = _given(asked, record)
    limits = _given(asked, Quota)
    return given | ({"quota": limits} if limits else {})


def requests_after(cancelled: int | None) -> str:
    """Describe what happens to running requests. `cancelled` is the number of requests that are being
    cancelled, or None if running requests continue."""
    if cancelled is None:
        return "its running requests continue"
    return f"cancelling {cancelled} request{'' if cancelled == 1 else 's'}"


def _given(asked: msgspec.Struct, record: type[msgspec.Struct]) -> dict[str, object]:
    values = {name: getattr(asked, name) for name in declared(record)}
    return {name: value for name, value in values.items() if value is not msgspec.UNSET}
