"""What operators decide about tenants, keys and Unix peers: the records of `control.db`. Plain data.

A quota is what a tenant, or a key within its tenant, may use; both hold at once, and None is no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

K = TypeVar("K")
R = TypeVar("R")

CLASSES = 4
"""P0 real-time, P1 interactive, P2 batch, P3 background."""
INTERACTIVE = 1
SCOPES = ("inference", "admin", "read")
"""What a key opens: the API of models; every operator action; looking without touching."""
LOG_POLICIES = ("metadata", "hashes", "full")
"""What the request log keeps of prompts and answers: nothing, SHA-256 of each, or their redacted text."""


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one tenant or key."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Prompt and output tokens together."""
    tokens_per_day: float | None = None
    """As `tokens_per_minute`; the day refills continuously, like every bucket."""
    burst_s: float = 60.0
    """Seconds of the per-minute rates that may be used at once: the size of their buckets."""
    concurrent_requests: int | None = None
    """Requests that run at once; more wait in the queue."""
    queued_requests: int | None = None
    """Requests that wait; more are refused."""
    context_tokens: int | None = None
    """Longest request, prompt and output together."""
    kv_share: float | None = None
    """Part of a model's KV blocks, over its replicas, that its running requests may hold, 0 to 1."""


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who pays. Times in unix seconds."""

    name: str
    created_at: float
    weight: float = 1.0
    """Share of service against other tenants of the same class."""
    highest_class: int = INTERACTIVE
    """The best class that its requests may ask for; 0 is P0."""
    default_class: int = INTERACTIVE
    """Of a request that asks for none; never better than `highest_class`."""
    default_max_tokens: int | None = None
    """Output of a request that names no `max_tokens`; None: what the model's length leaves."""
    cache_group: str | None = None
    """Tenants of one group find each other's prefixes in the cache; None: only its own."""
    log_policy: str = "metadata"
    """Of LOG_POLICIES."""
    log_days: float | None = None
    """Hashes and texts are removed after so many days; None: the service's retention."""
    quota: Quota = Quota()
    suspended_at: float | None = None
    """Set: nothing of it is served."""


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which tenant a user or group of the box stands for on `api.sock`. A uid goes before its groups."""

    kind: str
    """"uid" or "gid"."""
    number: int
    tenant: str
    created_at: float


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Times in unix seconds."""

    id: str
    name: str
    tenant: str
    prefix: str
    """The key's first characters, for people to recognise it by."""
    sha256: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    scopes: tuple[str, ...] = ("inference",)
    """Of SCOPES."""
    models: tuple[str, ...] | None = None
    """The only models that it opens; None: all."""
    highest_class: int | None = None
    """Narrows its tenant's; None: the tenant's."""
    quota: Quota = Quota()
    """Within its tenant's."""
    replaced_by: str | None = None
    """The key that a rotation put in its place."""

    def valid_at(self, now: float) -> bool:
        """Whether the key opens anything at unix time `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class Policies:
    """Everything that operators decided, at one moment. Never changed: a change makes another one, so that
    any thread may read, and comparing two by `is` tells whether anything has changed.
    """

    def __init__(
        self,
        tenants: Iterable[TenantRecord] = (),
        keys: Iterable[KeyRecord] = (),
        peers: Iterable[PeerRecord] = (),
    ) -> None:
        self.tenants: Mapping[str, TenantRecord] = {tenant.name: tenant for tenant in tenants}
        self.keys: Mapping[str, KeyRecord] = {key.id: key for key in keys}
        """By id, oldest first."""
        self.peers: Mapping[tuple[str, int], PeerRecord] = {(peer.kind, peer.number): peer for peer in peers}
        self.keys_by_hash: Mapping[str, KeyRecord] = {key.sha256: key for key in self.keys.values()}

    def latest(self, key: KeyRecord) -> KeyRecord:
        """The key that stands in this one's place after every rotation: its limits hold for both."""
        while key.replaced_by is not None and (successor := self.keys.get(key.replaced_by)) is not None:
            key = successor
        return key

    def with_changes(self, *changes: Change) -> Policies:
        """These policies after the changes."""
        tenants, keys, peers = dict(self.tenants), dict(self.keys), dict(self.peers)
        for before, after in changes:
            match before if after is None else after:
                case TenantRecord(name=name) as tenant:
                    _put(tenants, name, None if after is None else tenant)
                case KeyRecord(id=key_id) as key:
                    _put(keys, key_id, None if after is None else key)
                case PeerRecord(kind=kind, number=number) as peer:
                    _put(peers, (kind, number), None if after is None else peer)
        return Policies(tenants.values(), keys.values(), peers.values())


Record = TenantRecord | KeyRecord | PeerRecord


class Change(NamedTuple):
    """What an operator changed: a record that was made has no `before`, one that is gone no `after`."""

    before: Record | None
    after: Record | None


def _put(records: dict[K, R], name: K, record: R | None) -> None:
    if record is None:
        del records[name]
    else:
        records[name] = record
