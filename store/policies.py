"""The records in `control.db`: tenants, keys and Unix peers, as configured by operators. The records contain
only data.

The fields of tenants, keys and quotas are declared only here (`store.fields`). To add a field to
`TenantRecord` or `KeyFields`, append it to the class and give it a default; the next startup adds its column.

A quota limits a tenant, or a key within its tenant. A request must stay within the limits of both. None means
no limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, TypeVar, get_args

import msgspec

from store.fields import CLASSES, Declared, Field, declared

K = TypeVar("K")
R = TypeVar("R")

INTERACTIVE = 1
BACKGROUND = CLASSES - 1
KeyScope = Literal["inference", "admin", "read"]
SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
"""A key's possible permissions: use the inference API, perform all operator actions, or read the service's
state."""
LogPolicy = Literal["metadata", "hashes", "full"]
"""How prompts and answers are stored: not at all, as SHA-256 hashes, or as redacted text."""

Fallback = Literal["never", "allowed"]
"""Whether a model's fallback may answer requests."""

QuotaScope = Literal["tenant", "key"]
"""What a quota limits: a tenant or a key."""

PeerKind = Literal["uid", "gid"]
PEER_KINDS: tuple[PeerKind, ...] = get_args(PeerKind)

_MIN_RATE, _MAX_RATE = 1e-6, 1e15
"""Smallest and largest allowed limit. A float can represent every whole number up to the largest limit
exactly."""
_MAX_DAYS = 36525.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one tenant or key."""

    requests_per_minute: Annotated[
        float | None,
        Field("Maximum number of requests per minute", "requests/min", _MIN_RATE, _MAX_RATE, none="no limit"),
    ] = None
    tokens_per_minute: Annotated[
        float | None,
        Field(
            "Maximum number of prompt and output tokens per minute",
            "tokens/min",
            _MIN_RATE,
            _MAX_RATE,
            none="no limit",
        ),
    ] = None
    tokens_per_day: Annotated[
        float | None,
        Field(
            "Maximum number of prompt and output tokens per day; the quota refills continuously",
            "tokens/day",
            _MIN_RATE,
            _MAX_RATE,
            none="no limit",
        ),
    ] = None
    burst_s: Annotated[
        float,
        Field(
            "Time over which unused capacity of the per-minute limits accumulates; a longer time "
            "allows larger bursts",
            "s",
            1e-6,
            36525 * 86400.0,
        ),
    ] = 60.0
    concurrent_requests: Annotated[
        int | None,
        Field(
            "Maximum number of requests that run at the same time; additional requests wait",
            "requests",
            none="no limit",
        ),
    ] = None
    queued_requests: Annotated[
        int | None,
        Field(
            "Maximum number of waiting requests; additional requests are refused", "requests", none="no limit"
        ),
    ] = None
    context_tokens: Annotated[
        int | None,
        Field(
            "Maximum length of a request, prompt and output together",
            "tokens",
            none="the model's maximum length",
        ),
    ] = None
    kv_share: Annotated[
        float | None,
        Field(
            "Maximum fraction of a model's KV blocks, over all replicas, that running requests may occupy",
            low=1e-6,
            high=1,
            none="no limit",
        ),
    ] = None


RATE_LIMITS: Mapping[str, Declared] = {
    field.name: field for field in declared(Quota).values() if "/" in field.field.unit
}
"""The quota fields that limit requests or tokens per minute or day, by name."""


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, which is billed for its requests. Times are in unix seconds."""

    name: str
    created_at: float
    weight: Annotated[
        float,
        # A smaller weight would make a tenant's share too small to measure.
        Field(
            "Weight in fair sharing, relative to other tenants with requests of the same class",
            low=0.001,
            high=1000,
        ),
    ] = 1.0
    highest_class: Annotated[
        int, Field("Highest service class that the tenant's requests can use", "class", 0, BACKGROUND)
    ] = INTERACTIVE
    default_class: Annotated[
        int,
        Field(
            "Service class of requests that do not set one, capped at the tenant's highest class",
            "class",
            0,
            BACKGROUND,
        ),
    ] = INTERACTIVE
    default_max_tokens: Annotated[
        int | None,
        Field(
            "Output limit for requests that do not set max_tokens",
            "tokens",
            none="the model's maximum length",
        ),
    ] = None
    cache_group: Annotated[
        str | None,
        Field("Name of a group of tenants that share cached prefixes", none="no sharing"),
    ] = None
    log_policy: Annotated[
        LogPolicy,
        Field(
            "How prompts and answers are stored: not at all (metadata), as hashes (hashes), or as redacted "
            "text (full)"
        ),
    ] = "metadata"
    log_days: Annotated[
        float | None,
        Field(
            "Retention period of stored prompts, answers and hashes",
            "days",
            1e-6,
            _MAX_DAYS,
            none="the setting log.contents_days",
        ),
    ] = None
    quota: Quota = Quota()
    suspended_at: float | None = None
    """If set, the tenant's requests are refused."""


class PeerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Maps a local user or group to a tenant, for connections to `api.sock`. A user's own mapping takes
    precedence over the mappings of the user's groups."""

    kind: PeerKind
    number: int
    tenant: str
    created_at: float


class KeyFields(msgspec.Struct, frozen=True, kw_only=True):
    """A key's fields, without its secret or hash. Times are in unix seconds."""

    id: str
    name: Annotated[str, Field("Purpose or user of the key")]
    tenant: str
    prefix: str
    """The key's first characters, by which people recognise it."""
    created_at: float
    expires_at: Annotated[float | None, Field("Expiry time of the key", "unix time", none="never")] = None
    revoked_at: float | None = None
    scopes: Annotated[
        tuple[KeyScope, ...],
        Field(
            "Permissions of the key: inference (use the models' API), admin (perform all operator "
            "actions), read (read the service's state)"
        ),
    ] = ("inference",)
    models: Annotated[tuple[str, ...] | None, Field("Models that the key may use", none="all models")] = None
    highest_class: Annotated[
        int | None,
        Field(
            "Highest service class that requests with the key can use, capped at the tenant's highest class",
            "class",
            0,
            BACKGROUND,
            none="the tenant's",
        ),
    ] = None
    quota: Quota = Quota()
    """Limits of this key. The limits of its tenant apply as well."""
    replaced_by: str | None = None
    """The id of the key that replaced this one in a rotation."""
    fallback: Annotated[
        Fallback,
        Field(
            "Whether a model's fallback (the models.NAME.fallback setting) may answer requests that the "
            "model cannot take because it is overloaded or has failed"
        ),
    ] = "never"

    def valid_at(self, now: float) -> bool:
        """Return True if the key is valid at unix time `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyRecord(KeyFields, frozen=True, kw_only=True):
    """A key with the hash of its secret."""

    sha256: str


class Policies:
    """A snapshot of all tenants, keys and peers. It is immutable, so any thread may read it. Every change
    creates a new object, so comparing snapshots with `is` shows whether anything has changed."""

    def __init__(
        self,
        tenants: Iterable[TenantRecord] = (),
        keys: Iterable[KeyRecord] = (),
        peers: Iterable[PeerRecord] = (),
    ) -> None:
        self.tenants: Mapping[str, TenantRecord] = {tenant.name: tenant for tenant in tenants}
        self.keys: Mapping[str, KeyRecord] = {key.id: key for key in keys}
        """Keys indexed by id, oldest first."""
        self.peers: Mapping[tuple[str, int], PeerRecord] = {(peer.kind, peer.number): peer for peer in peers}
        self.keys_by_hash: Mapping[str, KeyRecord] = {key.sha256: key for key in self.keys.values()}

    def latest(self, key: KeyRecord) -> KeyRecord:
        """Follow a key's rotations and return the newest key, whose limits also apply to the keys that it
        replaced."""
        while key.replaced_by is not None and (successor := self.keys.get(key.replaced_by)) is not None:
            key = successor
        return key

    def with_changes(self, *changes: Change) -> Policies:
        """Return these policies with the changes applied."""
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


PolicyRecord = TenantRecord | KeyRecord | PeerRecord


class Change(NamedTuple):
    """A record before and after an operator's change. `before` is None for a created record, `after` for a
    deleted one."""

    before: PolicyRecord | None
    after: PolicyRecord | None


def _put(records: dict[K, R], name: K, record: R | None) -> None:
    if record is None:
        del records[name]
    else:
        records[name] = record
