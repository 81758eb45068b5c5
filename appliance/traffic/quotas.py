"""Reserves and charges the quotas of tenants and keys.

    reserve ──► Reservation ──► settle (actual use) ──► close (log row closed)
       └──► Shortage: nothing was taken

Each request reserves one request and its maximum number of tokens (prompt and answer) in every bucket of its
tenant and key. If any bucket contains too little, nothing is reserved. Concurrent requests therefore never
jointly exceed a limit. The unused amount is returned when the request is settled. A request that is retried
on another replica keeps its reservation.

This module does no I/O. It is not thread-safe: all calls are made on the core's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from appliance.channel.core_messages import ExceededLimit, RateLimits
from appliance.protocol import LimitUsage
from appliance.quantities import duration
from appliance.traffic.buckets import Bucket, rate_of
from store.policies import RATE_LIMITS, Policies, Quota, QuotaScope
from store.quotas import QuotaLevels, QuotaState, Used

MIN_ANSWER_TOKENS = 16
"""Minimum answer length. Without `max_tokens`, an answer is limited to the tokens left in the quota. If fewer
than this are left, the request is refused."""
MAX_USEFUL_WAIT_S = 120.0
"""Longest retry delay, in seconds, that OpenAI's clients honour. If the quota takes longer to refill, a retry
would fail."""

Name = tuple[QuotaScope, str]
"""A quota's scope, and the name of the tenant or the id of the key."""


class Account:
    """The rate limit buckets of one tenant or key."""

    def __init__(self, scope: QuotaScope, name: str, quota: Quota, now: float) -> None:
        self.scope = scope
        self.name = name
        self.quota = Quota()
        self.buckets: dict[str, Bucket] = {}
        """Buckets by limit."""
        self.set_quota(quota, now)

    def set_quota(self, quota: Quota, now: float) -> None:
        """Apply a new quota. A new limit's bucket starts full, and a changed limit keeps its level
        (`Bucket.set_rate`)."""
        if quota == self.quota:
            return
        self.quota = quota
        buckets, self.buckets = self.buckets, {}
        for limit in RATE_LIMITS:
            if (rate := rate_of(quota, limit)) is not None:
                bucket = buckets.get(limit)
                if bucket is None:
                    bucket = Bucket(f"{self.scope} {self.name!r}", limit, rate, now)
                else:
                    bucket.set_rate(rate, now)
                self.buckets[limit] = bucket


class Reservation:
    """A request's reservation in the request and token quotas of its tenant and key, held until the request's
    log row has been closed."""

    __slots__ = ("accounts", "max_tokens", "taken", "tokens")

    def __init__(
        self,
        accounts: tuple[Account, ...],
        taken: tuple[tuple[Bucket, int], ...],
        prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        self.accounts = accounts
        """The accounts whose buckets the reservation was taken from."""
        self.tokens = prompt_tokens + max_tokens
        """Number of tokens reserved or, after `Quotas.settle`, charged."""
        self.max_tokens = max_tokens
        """Maximum number of generated tokens over all samples."""
        self.taken = taken
        """The buckets that the reservation was taken from, each with the serial number returned by
        `Bucket.take`."""


class Shortage:
    """The limit that prevents a request from running. If there are several, the one that delays the request
    the longest."""

    def __init__(self, bucket: Bucket, needed: int) -> None:
        self._bucket = bucket
        self._needed = needed
        self.wait_s = bucket.wait_s(needed)
        """Time in seconds until the bucket contains the requested amount, or inf if it never will."""

    @property
    def kind(self) -> ExceededLimit:
        """The kind of limit that would be exceeded."""
        return "tokens" if self._bucket.counts_tokens else "requests"

    @property
    def useful(self) -> bool:
        """Whether a retry can succeed after `wait_s`."""
        return self.wait_s <= MAX_USEFUL_WAIT_S

    @property
    def message(self) -> str:
        """The error message: the limit, its usage, the requested amount, and the time until that amount is
        available."""
        bucket, words = self._bucket, RATE_LIMITS[self._bucket.limit].label
        limit, used = math.floor(bucket.rate.capacity), math.ceil(bucket.rate.capacity - bucket.level)
        head = f"{words} of {bucket.owner}: limit {limit}"
        if self.wait_s == math.inf:
            return (
                f"request too large for {head}, requested {self._needed}; shorten the prompt or lower "
                "max_tokens"
            )
        # A reservation may be held for so long that its tokens have since been refilled. Refilled tokens no
        # longer count as used.
        reserved = min(used, math.ceil(bucket.held))
        held = f" ({reserved} reserved by unfinished requests)" if reserved else ""
        return (
            f"rate limit reached for {head}, used {used}{held}, requested {self._needed}; try again in "
            f"{duration(self.wait_s)}"
        )


class Quotas:
    """The quota accounts of all tenants and keys. `clock` is a monotonic clock in seconds
    (`time.monotonic`)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._policies = Policies()
        self._accounts: dict[Name, Account] = {}
        self._tenants: dict[str, Account] = {}
        self._keys: dict[str, Account] = {}
        """Accounts by key id. A rotated key shares its account with its predecessors."""
        self._changed: dict[Account, None] = {}
        """Accounts whose levels have changed since the last call to `news`, in the order they changed."""
        self._deleted: set[Name] = set()
        self._asked = False

    # ── changes by operators ──

    def set_policies(self, policies: Policies) -> None:
        """Apply the quotas of tenants and keys. Unchanged quotas keep their levels."""
        if policies is self._policies:
            return
        self._policies = policies
        now, before = self._clock(), self._accounts
        tenants, keys = dict(self._tenants), dict(self._keys)
        self._accounts, self._tenants, self._keys = {}, {}, {}
        for tenant in policies.tenants.values():
            if _has_rates(tenant.quota):
                known = tenants.get(tenant.name)
                self._tenants[tenant.name] = self._open("tenant", tenant.name, tenant.quota, known, now)
        for key in policies.keys.values():
            latest = policies.latest(key)
            in_use = key.revoked_at is None or latest.revoked_at is None
            if in_use and _has_rates(latest.quota):
                known = self._keys.get(latest.id) or keys.get(latest.id) or keys.get(key.id)
                self._keys[key.id] = self._open("key", latest.id, latest.quota, known, now)
                self._keys[latest.id] = self._keys[key.id]
        self._deleted = (self._deleted | before.keys()) - self._accounts.keys()

    def _open(self, scope: QuotaScope, name: str, quota: Quota, known: Account | None, now: float) -> Account:
        if known is None:
            known = Account(scope, name, quota, now)
            self._changed[known] = None
        elif (known.name, known.quota) != (name, quota):
            known.set_quota(quota, now)
            known.name = name
            for bucket in known.buckets.values():
                bucket.owner = f"{scope} {name!r}"
            self._changed[known] = None
        self._accounts[(scope, name)] = known
        return known

    # ── requests ──

    def reserve(
        self,
        tenant: str,
        key_id: str,
        *,
        prompt_tokens: int,
        max_tokens: int,
        samples: int = 1,
        may_lower: bool = False,
    ) -> Reservation | Shortage:
        """Reserve a request's maximum usage. If any bucket contains too little, reserve nothing and return
        the shortage. `max_tokens` limits the output tokens of all samples together. If `may_lower` is set,
        the client set no limit, so `max_tokens` may be lowered to the number of tokens remaining, by the same
        amount for each sample.
        """
        self._asked = True
        now = self._clock()
        accounts = self._accounts_of(tenant, key_id)
        buckets = _refilled(accounts, now)
        if may_lower:
            max_tokens = _lowered(buckets, prompt_tokens, max_tokens, samples)
        needed = prompt_tokens + max_tokens
        short = [bucket for bucket in buckets if bucket.level < (needed if bucket.counts_tokens else 1)]
        if short:
            shortages = [Shortage(bucket, needed if bucket.counts_tokens else 1) for bucket in short]
            return max(shortages, key=lambda shortage: shortage.wait_s)
        taken = tuple([(bucket, bucket.take(needed if bucket.counts_tokens else 1)) for bucket in buckets])
        reservation = Reservation(accounts, taken, prompt_tokens, max_tokens)
        self._note(reservation)
        return reservation

    def settle(self, reservation: Reservation, tokens: int) -> None:
        """Charge a request for `tokens` (prompt and output) and release the rest of its reservation. If
        `tokens` is 0, the request never ran, so the request limit is not charged either. Call this once per
        reservation."""
        now = self._clock()
        unused = max(0, reservation.tokens - tokens)
        for bucket, number in reservation.taken:
            bucket.settle(number, unused if bucket.counts_tokens else 0 if tokens else 1, now)
        self._note(reservation)
        if not tokens:
            reservation.taken = ()
        reservation.tokens -= unused

    def close(self, reservation: Reservation) -> None:
        """Release the amount held for a settled request. Call this exactly once, after the request's log row
        has been closed."""
        for bucket, _ in reservation.taken:
            bucket.let_go(reservation.tokens if bucket.counts_tokens else 1)
        if reservation.taken:
            self._note(reservation)
        reservation.taken = ()

    def charge(self, tenant: str, key_id: str, tokens: int, requests: int = 1) -> None:
        """Charge tokens and requests that were not reserved, but at most what remains in each bucket."""
        accounts = self._accounts_of(tenant, key_id)
        for bucket in _refilled(accounts, self._clock()):
            bucket.charge(max(0.0, min(bucket.level, tokens if bucket.counts_tokens else requests)))
        self._changed |= dict.fromkeys(accounts)

    def rate_limits(self, tenant: str, key_id: str) -> RateLimits | None:
        """Return the request limit and the token limit that are closest to exhaustion, for the response
        headers. Return None if the caller has no limits."""
        buckets = _refilled(self._accounts_of(tenant, key_id), self._clock())
        if not buckets:
            return None
        requests = min((b for b in buckets if not b.counts_tokens), key=_level, default=None)
        tokens = min((b for b in buckets if b.counts_tokens), key=_level, default=None)
        return RateLimits(*_remaining(requests), *_remaining(tokens))

    def usage(self, scope: QuotaScope, name: str) -> list[LimitUsage]:
        """Return a tenant's or key's usage of each rate limit, for operators."""
        account = (self._tenants if scope == "tenant" else self._keys).get(name)
        if account is None:
            return []
        now = self._clock()
        usage = []
        for bucket in account.buckets.values():
            bucket.refill(now)
            capacity = bucket.rate.capacity
            usage.append(
                LimitUsage(
                    limit=bucket.limit,
                    capacity=math.floor(capacity),
                    used=math.ceil(capacity - bucket.level),
                    held=math.ceil(bucket.held),
                    resets_in_s=bucket.wait_s(capacity),
                )
            )
        return usage

    def buckets(self, tenant: str) -> list[Bucket]:
        """Return a tenant's buckets, refilled to the current time. The caller must not modify the buckets."""
        account = self._tenants.get(tenant)
        return [] if account is None else list(_refilled((account,), self._clock()))

    def _accounts_of(self, tenant: str, key_id: str) -> tuple[Account, ...]:
        of_tenant, of_key = self._tenants.get(tenant), self._keys.get(key_id)
        return tuple([account for account in (of_tenant, of_key) if account is not None])

    def _note(self, reservation: Reservation) -> None:
        """Mark a reservation's accounts as changed."""
        for account in reservation.accounts:
            self._changed[account] = None

    # ── restarts ──

    def news(self, now: float) -> tuple[list[QuotaLevels], list[Name]]:
        """Return the data to store at unix time `now`: the quota levels that changed since the last call, and
        the names of accounts that no longer exist."""
        monotonic = self._clock()
        deleted, self._deleted = list(self._deleted), set()
        # Omit deleted accounts. They may be in `_changed` if requests were still running when they were
        # deleted.
        changed = [one for one in self._changed if self._accounts.get((one.scope, one.name)) is one]
        self._changed = {}
        if not changed and self._asked:
            # Requests may have been logged without changing any quota level. Store one account's levels
            # anyway: after a restart, the log is read only from the row that was newest when a level was last
            # stored.
            changed = list(self._accounts.values())[:1]
        self._asked = False
        return [_levels(account, monotonic, now) for account in changed], deleted

    def used_levels(self, now: float) -> list[QuotaLevels]:
        """Return the quota levels, at unix time `now`, of all accounts that have used part of a limit."""
        monotonic = self._clock()
        return [
            _levels(account, monotonic, now)
            for account in self._accounts.values()
            if any(bucket.level < bucket.rate.capacity for bucket in account.buckets.values())
        ]

    def remember(self, deleted: Iterable[Name] = ()) -> None:
        """Include all quota levels in the next result from `news`. Call this if the last result could not be
        stored."""
        self._deleted |= set(deleted) - self._accounts.keys()
        self._changed = dict.fromkeys(self._accounts.values())

    def restore(self, state: QuotaState, now: float) -> None:
        """Restore the quota levels stored before a restart. `now` is the current unix time. Call this after
        the first `set_policies`."""
        known: dict[Account, QuotaLevels] = {}
        for levels in state.levels:
            account = (self._tenants if levels.scope == "tenant" else self._keys).get(levels.name)
            if account is not None:
                known[account] = levels
            if (levels.scope, levels.name) not in self._accounts:
                self._deleted.add((levels.scope, levels.name))
        used: dict[Account, list[Used]] = {}
        for one in state.used:
            for account in (self._tenants.get(one.tenant), self._keys.get(one.key_id)):
                if account is not None:
                    used.setdefault(account, []).append(one)
        for account in self._accounts.values():
            for limit, bucket in account.buckets.items():
                level = known[account].remaining.get(limit) if account in known else None
                at = now if level is None else known[account].at
                _replay(bucket, level, at, used.get(account, []), now)
                bucket.updated_at = self._clock()
        self.remember()


def _has_rates(quota: Quota) -> bool:
    return any(getattr(quota, limit) is not None for limit in RATE_LIMITS)


def _refilled(accounts: Iterable[Account], now: float) -> tuple[Bucket, ...]:
    buckets = tuple([bucket for account in accounts for bucket in account.buckets.values()])
    for bucket in buckets:
        bucket.refill(now)
    return buckets


def _lowered(buckets: Iterable[Bucket], prompt_tokens: int, max_tokens: int, samples: int) -> int:
    """Return `max_tokens`, capped at the smallest number of tokens remaining under any token limit."""
    left = min((bucket.level for bucket in buckets if bucket.counts_tokens), default=math.inf)
    if prompt_tokens + max_tokens <= left:
        return max_tokens
    each = max(MIN_ANSWER_TOKENS, math.floor(left - prompt_tokens) // samples)
    return min(max_tokens, each * samples)


def _level(bucket: Bucket) -> float:
    return bucket.level


def _remaining(bucket: Bucket | None) -> tuple[int, int, float] | tuple[None, None, None]:
    if bucket is None:
        return None, None, None
    capacity = bucket.rate.capacity
    return math.floor(capacity), max(0, math.floor(bucket.level)), bucket.wait_s(capacity)


def _levels(account: Account, monotonic: float, now: float) -> QuotaLevels:
    settled = {}
    for limit, bucket in account.buckets.items():
        bucket.refill(monotonic)
        settled[limit] = bucket.settled
    return QuotaLevels(scope=account.scope, name=account.name, at=now, remaining=settled)


def _replay(bucket: Bucket, level: float | None, at: float, used: Iterable[Used], now: float) -> None:
    """Set a bucket's level at unix time `now`, computed from its stored `level` at the earlier time `at` and
    the usage recorded since then. If `level` is None, the bucket was full at that time."""
    moment = min(at, now)
    left = bucket.rate.capacity if level is None else level
    for one in used:
        # Reservations made before `at` are not reflected in the stored level, so subtract them before the
        # refill is capped.
        if one.at > moment:
            later = min(one.at, now)
            left = min(bucket.rate.capacity, left + (later - moment) * bucket.rate.per_s)
            moment = later
        left -= one.tokens if bucket.counts_tokens else 1
    bucket.level = min(bucket.rate.capacity, left + (now - moment) * bucket.rate.per_s)
