"""Tracks the waiting and running requests of each tenant and key, and the limits on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from appliance.traffic.outputs import OutputLengths
from store.policies import KeyRecord, Policies, Quota, QuotaScope, TenantRecord

Record = TypeVar("Record", TenantRecord, KeyRecord)

_SEEN_S = 60.0
"""A tenant that has sent a request within this many seconds is expected to send more."""
_NO_LIMITS = Quota()


class Use:
    """One tenant's or key's waiting and running requests."""

    __slots__ = ("kv_tokens", "queued", "queued_tokens", "running", "seqs")

    def __init__(self) -> None:
        self.queued = 0
        self.queued_tokens = 0
        self.running = 0
        self.seqs: dict[str, int] = {}
        """Number of sequences running on replicas, by model."""
        self.kv_tokens: dict[str, int] = {}
        """Maximum number of cache tokens that the running sequences may occupy, by model."""

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not (self.queued or self.running)

    def queue(self, tokens: int, sign: int) -> None:
        """Count a request that begins to wait (`sign` 1) or stops waiting (`sign` -1)."""
        self.queued += sign
        self.queued_tokens += sign * tokens

    def run(self, model: str, seqs: int, kv_tokens: int) -> None:
        """Count a request that begins to run."""
        self.running += 1
        self.seqs[model] = self.seqs.get(model, 0) + seqs
        self.kv_tokens[model] = self.kv_tokens.get(model, 0) + kv_tokens

    def leave(self, model: str, seqs: int, kv_tokens: int) -> None:
        """Stop counting a request as running."""
        self.running -= 1
        self.seqs[model] -= seqs
        self.kv_tokens[model] -= kv_tokens
        if not self.seqs[model]:
            del self.seqs[model], self.kv_tokens[model]

    def add(self, other: Use) -> None:
        """Add another key's usage to this key's usage."""
        self.queued += other.queued
        self.queued_tokens += other.queued_tokens
        self.running += other.running
        for model, seqs in other.seqs.items():
            self.seqs[model] = self.seqs.get(model, 0) + seqs
            self.kv_tokens[model] = self.kv_tokens.get(model, 0) + other.kv_tokens[model]

    def may_run(self, quota: Quota, model: str, kv_tokens: int, kv_total: int) -> bool:
        """True if the quota allows running a request that may occupy up to `kv_tokens` cache tokens.
        `kv_total` is the KV cache capacity of all the model's replicas, in tokens, or 0 if unknown. If no
        request for the model is running, any request may run."""
        if quota.concurrent_requests is not None and self.running >= quota.concurrent_requests:
            return False
        if quota.kv_share is None or not kv_total or not self.seqs.get(model):
            return True
        return self.kv_tokens[model] + kv_tokens <= quota.kv_share * kv_total


class TenantTraffic:
    """One tenant that has sent requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.quota = _NO_LIMITS
        self.suspended = False
        self.use = Use()
        self.keys: dict[str, Use] = {}
        """Usage of keys with waiting or running requests."""
        self.outputs = OutputLengths()
        self.service = 0.0
        """Tokens served since startup, weighted by cost. Corrected when each request ends, because exact
        token counts are known only then."""
        self.held_at: set[tuple[str, str]] = set()
        """(model, key id) pairs that have reached their running-request limit. An empty key id stands for the
        tenant's own limit."""

    def key(self, key_id: str) -> Use:
        """Return the usage of one of the tenant's keys."""
        use = self.keys.get(key_id)
        if use is None:
            use = self.keys[key_id] = Use()
        return use

    def uses(self, key_id: str) -> tuple[Use, ...]:
        """Return the usage records that count a request with this key: the tenant's and, if there is a key,
        the key's."""
        return (self.use, self.key(key_id)) if key_id else (self.use,)

    def leave(self, model: str, key_id: str, seqs: int, kv_tokens: int) -> set[str]:
        """Stop counting a request as running. Return the models whose waiting requests may now be able to
        start."""
        for use in self.uses(key_id):
            use.leave(model, seqs, kv_tokens)
        freed = {held for held in self.held_at if held[1] in ("", key_id)}
        self.held_at -= freed
        return {model, *(name for name, _ in freed)}

    def follow_rotations(self, latest: Callable[[str], str]) -> None:
        """Move the usage of rotated keys to the keys that replaced them. `latest` returns the replacement of
        a key."""
        for key_id in list(self.keys):
            if (successor := latest(key_id)) != key_id:
                self.key(successor).add(self.keys.pop(key_id))

    def forget_idle_keys(self) -> None:
        """Remove keys without waiting or running requests. Call this periodically."""
        self.keys = {key_id: use for key_id, use in self.keys.items() if not use.idle}


class Tenants:
    """All tenants that have sent requests, and the configured records of tenants and keys."""

    def __init__(self) -> None:
        self._policies = Policies()
        self._tenants: dict[str, TenantTraffic] = {}
        self._seen: OrderedDict[str, float] = OrderedDict()
        self.outputs = OutputLengths()
        """Answer length statistics across all tenants."""

    def __iter__(self) -> Iterator[TenantTraffic]:
        return iter(self._tenants.values())

    def set_policies(self, policies: Policies) -> list[TenantTraffic]:
        """Apply new tenant and key records. A tenant without a record has weight 1 and no limits. Return the
        tenants whose own record or key records changed."""
        before, self._policies = self._policies, policies
        names = {record.name for record in _different(before.tenants, policies.tenants)}
        names |= {record.tenant for record in _different(before.keys, policies.keys)}
        changed = [self._tenants[name] for name in names & self._tenants.keys()]
        for tenant in changed:
            self._apply(tenant)
        return changed

    def of(self, name: str) -> TenantTraffic:
        """Return the tenant with this name."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = TenantTraffic(name)
            self._apply(tenant)
        return tenant

    def limits_key(self, key_id: str) -> str:
        """Return the id of the key whose limits restrict requests with key `key_id`: after a rotation, the
        new key."""
        key = self._policies.keys.get(key_id)
        return self._policies.latest(key).id if key is not None else key_id

    def quota_of(self, scope: QuotaScope, name: str) -> tuple[Quota, Use]:
        """Return a tenant's or key's limits and usage."""
        if scope == "tenant":
            record, seen = self._policies.tenants.get(name), self._tenants.get(name)
            return record.quota if record is not None else _NO_LIMITS, seen.use if seen is not None else Use()
        name = self.limits_key(name)
        key = self._policies.keys.get(name)
        seen = self._tenants.get(key.tenant) if key is not None else None
        return self.key_quota(name), seen.keys.get(name, Use()) if seen is not None else Use()

    def key_quota(self, key_id: str) -> Quota:
        """Return a key's own limits, without its tenant's."""
        key = self._policies.keys.get(self.limits_key(key_id)) if key_id else None
        return key.quota if key is not None else _NO_LIMITS

    def learn_output(self, name: str, tokens: int, max_tokens: float) -> None:
        """Update the tenant's answer length estimate with a finished answer whose token limit was
        `max_tokens`."""
        for outputs in (self.of(name).outputs, self.outputs):
            outputs.learn(tokens, max_tokens)

    def count_answer(self, name: str, sign: int) -> None:
        """Count the start (`sign` 1) or end (`sign` -1) of an answer to a tenant."""
        for outputs in (self.of(name).outputs, self.outputs):
            outputs.running += sign

    def saw(self, name: str, now: float) -> None:
        """Record the arrival of a request from a tenant."""
        self._seen[name] = now
        self._seen.move_to_end(name)
        self.forget_unseen(now)

    @property
    def several(self) -> bool:
        """Whether more than one tenant sent requests recently."""
        return len(self._seen) > 1

    def forget_unseen(self, now: float) -> None:
        """Remove tenants that have sent no requests recently. Call this periodically."""
        while self._seen:
            name, seen_at = next(iter(self._seen.items()))
            if seen_at > now - _SEEN_S:
                return
            del self._seen[name]

    def _apply(self, tenant: TenantTraffic) -> None:
        record: TenantRecord | None = self._policies.tenants.get(tenant.name)
        tenant.weight = record.weight if record is not None else 1.0
        tenant.quota = record.quota if record is not None else _NO_LIMITS
        tenant.suspended = record is not None and record.suspended_at is not None


def _different(before: Mapping[str, Record], after: Mapping[str, Record]) -> Iterator[Record]:
    """Yield the records that were added, removed or changed."""
    for one, other in ((before, after), (after, before)):
        for name, record in one.items():
            # Most records are the same objects as before, because a change creates new objects only for the
            # records it affects.
            if (known := other.get(name)) is not record and known != record:
                yield record
