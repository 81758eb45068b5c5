"""What operators decide about tenants, keys and Unix peers: the records of `control.db`. Plain data.

A quota is what a tenant, or a key within its tenant, may use; both hold at once, and None is no limit.
"""

from __future__ import annotations

import msgspec

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
    """Part of a replica's KV blocks that its running requests may hold, 0 to 1."""


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who pays. Times in unix seconds."""

    name: str
    created_at: float
    weight: float = 1.0
    """Share of service against other tenants of the same class."""
    highest_class: int = INTERACTIVE
    """The best class that its requests may ask for; 0 is P0."""
    default_class: int = INTERACTIVE
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
