"""Tests that a change to policies updates only the tenants that it affects."""

from __future__ import annotations

from appliance.traffic.tenants import Tenants
from store.policies import KeyRecord, Policies, Quota, TenantRecord


def tenant(name: str, weight: float = 1.0) -> TenantRecord:
    return TenantRecord(
        name=name, created_at=0.0, weight=weight, quota=Quota(concurrent_requests=int(weight))
    )


def key(tenant: str, most: int) -> KeyRecord:
    quota = Quota(concurrent_requests=most)
    return KeyRecord(id="k", name="k", tenant=tenant, prefix="", sha256="k", created_at=0.0, quota=quota)


def test_a_policy_change_updates_only_the_tenants_that_it_affects() -> None:
    tenants = Tenants()
    a, b, c = (tenants.of(name) for name in "abc")
    told = [
        tenants.set_policies(Policies(*records))
        for records in (
            ([tenant("a"), tenant("b"), tenant("c"), tenant("never seen")], []),
            ([tenant("a", 2.0), tenant("b"), tenant("c"), tenant("never seen")], []),
            ([tenant("a", 2.0), tenant("b"), tenant("c")], [key("b", 1)]),
            ([tenant("a", 2.0), tenant("b"), tenant("c")], [key("b", 2)]),
            ([tenant("b"), tenant("c")], [key("b", 2)]),
            ([tenant("b"), tenant("c", 3.0)], []),
        )
    ]
    assert [sorted(one.name for one in changed) for changed in told] == [
        ["a", "b", "c"],
        ["a"],
        ["b"],
        ["b"],
        ["a"],
        ["b", "c"],
    ]
    assert (a.weight, b.weight, c.weight) == (1.0, 1.0, 3.0)
    assert (a.quota, c.quota) == (Quota(), Quota(concurrent_requests=3))
