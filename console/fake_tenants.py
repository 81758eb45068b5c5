"""The simulated service's tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from appliance.protocol import LimitUsage, Tenant
from appliance.snapshot import TenantUse
from console.simulated import WINDOW_S, SimTenant
from console.simulation import Simulation

_KEYS, _PEERS = 3, 0
"""Number of keys, and of mapped users and groups, per tenant."""


def tenant_record(one: SimTenant, created_at: float) -> Tenant:
    """Return the tenant fields that operators can change."""
    quota = {limit.name: limit.capacity for limit in one.limits} | {"concurrent_requests": one.concurrent}
    fields = {
        "name": one.name,
        "created_at": created_at,
        "weight": one.weight,
        "highest_class": one.highest_class,
        "suspended_at": one.suspended_at,
        "quota": quota,
        "built_in": False,
        "keys": _KEYS,
        "peers": _PEERS,
    }
    return msgspec.convert(fields, Tenant)


def tenants_of(sim: Simulation, tokens_per_s: Mapping[str, float | None]) -> list[TenantUse]:
    """Return all tenants' usage. `tokens_per_s` contains their current rates."""
    # Unfinished requests are counted at their maximum number of tokens.
    held: Counter[str] = Counter()
    for request in sim.unfinished():
        held[request.tenant] += request.max_tokens
    tenants = sim.tenants.values()
    service = {tenant.name: sum(cost for _, cost in tenant.recent) for tenant in tenants}
    total = sum(service.values())
    active = sum(tenant.weight for tenant in tenants if tenant.running + tenant.waiting)
    return [
        _tenant_use(one, held[one.name], service[one.name], total, active, tokens_per_s[one.name])
        for one in tenants
    ]


def _tenant_use(
    one: SimTenant, held: int, service: float, all_service: float, active: float, tokens_per_s: float | None
) -> TenantUse:
    """Return one tenant's usage. `service` is the tenant's weighted tokens in the last minute, `all_service`
    the weighted tokens of all tenants, and `active` the total weight of tenants that have requests."""
    usage = []
    left_s = []
    for limit in one.limits:
        used = int(min(limit.level + held, limit.capacity))
        usage.append(
            LimitUsage(
                limit=limit.name,
                capacity=int(limit.capacity),
                used=used,
                held=held,
                resets_in_s=used / limit.capacity * limit.period_s,
            )
        )
        burn = service / WINDOW_S - limit.capacity / limit.period_s
        if burn > 0:
            left_s.append((limit.capacity - limit.level) / burn)
    if one.concurrent is not None:
        usage.append(
            LimitUsage(
                limit="concurrent_requests",
                capacity=one.concurrent,
                used=one.running,
                held=one.running,
                resets_in_s=None,
            )
        )
    return TenantUse(
        name=one.name,
        suspended_at=one.suspended_at,
        weight=one.weight,
        highest_class=one.highest_class,
        keys=_KEYS,
        peers=_PEERS,
        running=one.running,
        waiting=one.waiting,
        tokens_per_s=tokens_per_s,
        service_tokens=one.service,
        share=service / all_service if all_service else None,
        fair_share=one.weight / active if one.running + one.waiting else None,
        requests=one.requests,
        refused=one.refused,
        prompt_tokens=one.prompt,
        cached_tokens=one.cached,
        billed_tokens=one.billed,
        usage=usage,
        exhausted_in_s=min(left_s, default=None),
    )
