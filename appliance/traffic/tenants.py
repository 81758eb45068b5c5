"""What tenants and their keys have in the house now, against what they may have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from appliance.traffic.outputs import OutputLengths
from store.policies import KeyRecord, Policies, Quota, TenantRecord

Record = TypeVar("Record", TenantRecord, KeyRecord)

_SEEN_S = 60.0
"""A tenant that asked so lately is expected to ask again."""
_NO_LIMITS = Quota()


class Use:
    """Of one tenant, or one key."""

    __slots__ = ("kv_tokens", "queued", "queued_tokens", "rows", "running")

    def __init__(self) -> None:
        self.queued = 0
        self.queued_tokens = 0
        self.running = 0
        self.rows: dict[str, int] = {}
        """Sequences on replicas, by model."""
        self.kv_tokens: dict[str, int] = {}
        """The most that these may keep in the cache, by model."""

    @property
    def idle(self) -> bool:
        """Nothing in the house."""
        return not (self.queued or self.running)

    def queue(self, tokens: int, sign: int) -> None:
        """A request begins (1) or ends (-1) to wait."""
        self.queued += sign
        self.queued_tokens += sign * tokens

    def run(self, model: str, rows: int, kv_tokens: int) -> None:
        """A request begins to run."""
        self.running += 1
        self.rows[model] = self.rows.get(model, 0) + rows
        self.kv_tokens[model] = self.kv_tokens.get(model, 0) + kv_tokens

    def leave(self, model: str, rows: int, kv_tokens: int) -> None:
        """It ran."""
        self.running -= 1
        self.rows[model] -= rows
        self.kv_tokens[model] -= kv_tokens
        if not self.rows[model]:
            del self.rows[model], self.kv_tokens[model]

    def add(self, other: Use) -> None:
        """Have what another has too."""
        self.queued += other.queued
        self.queued_tokens += other.queued_tokens
        self.running += other.running
        for model, rows in other.rows.items():
            self.rows[model] = self.rows.get(model, 0) + rows
            self.kv_tokens[model] = self.kv_tokens.get(model, 0) + other.kv_tokens[model]

    def may_run(self, quota: Quota, model: str, kv_tokens: int, kv_total: int) -> bool:
        """Whether one more may run that may keep so many tokens, where all replicas of the model have room
        for `kv_total` (0: nobody knows). Whoever has nothing running may always run one."""
        if quota.concurrent_requests is not None and self.running >= quota.concurrent_requests:
            return False
        if quota.kv_share is None or not kv_total or not self.rows.get(model):
            return True
        return self.kv_tokens[model] + kv_tokens <= quota.kv_share * kv_total


class Tenant:
    """One tenant's presence."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.quota = _NO_LIMITS
        self.suspended = False
        self.use = Use()
        self.keys: dict[str, Use] = {}
        """Of keys that have something in the house."""
        self.outputs = OutputLengths()
        self.service = 0.0
        """Weighted tokens since the service began, as corrected at the end of each request."""
        self.held_at: set[tuple[str, str]] = set()
        """Models whose queue holds it, or (named) one of its keys: these run as much as they may."""

    def key(self, key_id: str) -> Use:
        """What one of its keys has."""
        use = self.keys.get(key_id)
        if use is None:
            use = self.keys[key_id] = Use()
        return use

    def uses(self, key_id: str) -> tuple[Use, ...]:
        """Whose limits a request with this key counts against."""
        return (self.use, self.key(key_id)) if key_id else (self.use,)

    def leave(self, model: str, key_id: str, rows: int, kv_tokens: int) -> set[str]:
        """A request ran; the models at which others may have turns now."""
        for use in self.uses(key_id):
            use.leave(model, rows, kv_tokens)
        freed = {held for held in self.held_at if held[1] in ("", key_id)}
        self.held_at -= freed
        return {model, *(name for name, _ in freed)}

    def follow_rotations(self, latest: Callable[[str], str]) -> None:
        """What a replaced key has in the house is its successor's: `latest` names whose limits hold."""
        for key_id in list(self.keys):
            if (successor := latest(key_id)) != key_id:
                self.key(successor).add(self.keys.pop(key_id))

    def forget_idle_keys(self) -> None:
        """Drop what is known of keys that have nothing in the house. To be called now and then."""
        self.keys = {key_id: use for key_id, use in self.keys.items() if not use.idle}


class Tenants:
    """All tenants that were seen, and what operators decided about them."""

    def __init__(self) -> None:
        self._policies = Policies()
        self._tenants: dict[str, Tenant] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.outputs = OutputLengths()
        """Of everybody's answers."""

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def set_policies(self, policies: Policies) -> list[Tenant]:
        """Take other decisions; a tenant that nothing was decided about has a weight of 1 and no limits.
        Returns the tenants for which, or for whose keys, something is different."""
        before, self._policies = self._policies, policies
        names = {record.name for record in _different(before.tenants, policies.tenants)}
        names |= {record.tenant for record in _different(before.keys, policies.keys)}
        changed = [self._tenants[name] for name in names & self._tenants.keys()]
        for tenant in changed:
            self._apply(tenant)
        return changed

    def of(self, name: str) -> Tenant:
        """The tenant of this name."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name)
            self._apply(tenant)
        return tenant

    def limits_key(self, key_id: str) -> str:
        """Whose limits hold for a key: those of the one that a rotation put in its place."""
        key = self._policies.keys.get(key_id)
        return self._policies.latest(key).id if key is not None else key_id

    def quota_of(self, scope: str, name: str) -> tuple[Quota, Use]:
        """The limits of a tenant or key, and what it has in the house."""
        if scope == "tenant":
            record, seen = self._policies.tenants.get(name), self._tenants.get(name)
            return record.quota if record is not None else _NO_LIMITS, seen.use if seen is not None else Use()
        name = self.limits_key(name)
        key = self._policies.keys.get(name)
        seen = self._tenants.get(key.tenant) if key is not None else None
        return self.key_quota(name), seen.keys.get(name, Use()) if seen is not None else Use()

    def key_quota(self, key_id: str) -> Quota:
        """A key's own limits."""
        key = self._policies.keys.get(self.limits_key(key_id)) if key_id else None
        return key.quota if key is not None else _NO_LIMITS

    def learn_output(self, name: str, tokens: int, most: float) -> None:
        """An answer to this tenant had so many tokens, and might have had `most`."""
        for outputs in (self.of(name).outputs, self.outputs):
            outputs.learn(tokens, most)

    def count_answer(self, name: str, sign: int) -> None:
        """An answer to this tenant begins (1) or ends (-1) to be made."""
        for outputs in (self.of(name).outputs, self.outputs):
            outputs.running += sign

    def saw(self, name: str, now: float) -> None:
        """A request of this tenant came."""
        self._seen[name] = now
        self._seen.move_to_end(name)
        self.forget_unseen(now)

    @property
    def several(self) -> bool:
        """Whether more than one tenant asked of late."""
        return len(self._seen) > 1

    def forget_unseen(self, now: float) -> None:
        """To be called now and then."""
        while self._seen:
            name, seen_at = next(iter(self._seen.items()))
            if seen_at > now - _SEEN_S:
                return
            del self._seen[name]

    def _apply(self, tenant: Tenant) -> None:
        record: TenantRecord | None = self._policies.tenants.get(tenant.name)
        tenant.weight = record.weight if record is not None else 1.0
        tenant.quota = record.quota if record is not None else _NO_LIMITS
        tenant.suspended = record is not None and record.suspended_at is not None


def _different(before: Mapping[str, Record], after: Mapping[str, Record]) -> Iterator[Record]:
    """The records that are not in both, or not the same."""
    for one, other in ((before, after), (after, before)):
        for name, record in one.items():
            # Most are the same object: a change keeps the records that it is not about.
            if (known := other.get(name)) is not record and known != record:
                yield record
