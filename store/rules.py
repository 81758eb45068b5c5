"""What the values of a policy may be. Every check raises `ValueError` with field, value and remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from store.policies import CLASSES, LOG_POLICIES, SCOPES, KeyRecord, PeerRecord, Quota, TenantRecord

MOST_MODELS = 256
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
"""Service is counted by weight: with less, what others get could not be told apart beside it."""
MOST_RATE = 1e15
MOST_PEER_NUMBER = 2**32 - 2
"""The highest uid and gid that Linux has; the next one means "none"."""

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WHOLE_LIMITS = ("concurrent_requests", "queued_requests", "context_tokens")
_RATES = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "burst_s")


def check_tenant(tenant: TenantRecord) -> None:
    """A tenant's values, but for its name, which was checked when it was made."""
    if not LEAST_WEIGHT <= tenant.weight <= MOST_WEIGHT:
        raise _wrong("weight", tenant.weight, f"give a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    _check_class("highest_class", tenant.highest_class)
    _check_class("default_class", tenant.default_class)
    if tenant.default_max_tokens is not None and tenant.default_max_tokens < 1:
        raise _wrong("default_max_tokens", tenant.default_max_tokens, "give at least 1, or none")
    if tenant.cache_group is not None:
        check_text("cache_group", tenant.cache_group)
    if tenant.log_policy not in LOG_POLICIES:
        raise _wrong("log_policy", tenant.log_policy, f"it can be {', '.join(LOG_POLICIES)}")
    if tenant.log_days is not None and not 0 < tenant.log_days < math.inf:
        raise _wrong("log_days", tenant.log_days, "give a number of days above 0, or none")
    check_quota(tenant.quota)


def check_key(key: KeyRecord, now: float) -> None:
    """A key's values at unix time `now`."""
    check_text("name", key.name)
    if key.expires_at is not None and not now < key.expires_at < math.inf:
        raise ValueError(
            f"expires_at is {key.expires_at}, which is past (now: {now:.0f}): give a later unix time"
        )
    if not key.scopes or not set(key.scopes) <= set(SCOPES) or len(set(key.scopes)) < len(key.scopes):
        raise _wrong("scopes", list(key.scopes), f"give one or more of {', '.join(SCOPES)}, each once")
    if key.models is not None:
        _check_models(key.models)
    if key.highest_class is not None:
        _check_class("highest_class", key.highest_class)
    check_quota(key.quota)


def check_peer(peer: PeerRecord) -> None:
    """A mapping of a user or group."""
    if peer.kind not in ("uid", "gid"):
        raise _wrong("kind", peer.kind, "it can be uid, gid")
    if not 0 <= peer.number <= MOST_PEER_NUMBER:
        raise _wrong("number", peer.number, f"give a {peer.kind} of Linux, 0 to {MOST_PEER_NUMBER}")


def check_tenant_name(name: str) -> None:
    """The name of a new tenant: it stands in URLs, labels of metrics and file names."""
    if not _TENANT_NAME.fullmatch(name):
        raise _wrong(
            "name", name, "begin with a letter or digit and go on with those or any of . _ - (at most 64)"
        )


def check_text(field: str, value: str) -> None:
    """A name that people give."""
    if not value or len(value) > 200 or not value.isprintable():
        raise _wrong(field, value, "give 1 to 200 printable characters")


def check_quota(quota: Quota) -> None:
    """A quota's values."""
    for field in _RATES:
        rate = getattr(quota, field)
        if rate is not None and not 0 < rate <= MOST_RATE:
            raise _wrong(
                field, rate, f"give a number above 0, at most {MOST_RATE:g}" + _LIFTED[field == "burst_s"]
            )
    for field in _WHOLE_LIMITS:
        limit = getattr(quota, field)
        if limit is not None and limit < 1:
            raise _wrong(field, limit, f"give at least 1{_LIFTED[False]}")
    if quota.kv_share is not None and not 0 < quota.kv_share <= 1:
        raise _wrong("kv_share", quota.kv_share, f"give a part above 0, at most 1{_LIFTED[False]}")


_LIFTED = (", or none for no limit; suspend the tenant or revoke the key to stop it", "")


def _check_class(field: str, value: int) -> None:
    if not 0 <= value < CLASSES:
        raise _wrong(field, value, "give 0 (real-time), 1 (interactive), 2 (batch) or 3 (background)")


def _check_models(models: Sequence[str]) -> None:
    if not 0 < len(models) <= MOST_MODELS:
        raise _wrong("models", list(models)[:3], f"give 1 to {MOST_MODELS} names, or none for all models")
    for name in models:
        check_text("models", name)


def _wrong(field: str, value: object, remedy: str) -> ValueError:
    return ValueError(f"{field} is {value!r}: {remedy}")
