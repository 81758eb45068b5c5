"""Token buckets, which track how much of a rate limit is left. The caller passes in the time, in seconds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from store.policies import Quota

LIMITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day",
}
"""A quota's rate limits, as pairs of field name and description."""

_MINUTE_S, _DAY_S = 60.0, 86400.0


class Rate:
    """The refill of a bucket: `per_s` each second, up to `capacity`."""

    __slots__ = ("capacity", "per_s")

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s


def rate_of(quota: Quota, limit: str) -> Rate | None:
    """Return the refill of the bucket for a limit in LIMITS; None if the quota does not have this limit.

    A per-minute limit's capacity is the amount that `burst_s` seconds refill; a daily limit's capacity is the
    whole day's amount. The capacity is at least one request, because otherwise no request could ever run.
    """
    amount: float | None = getattr(quota, limit)
    if amount is None:
        return None
    if limit == "tokens_per_day":
        return Rate(amount, amount / _DAY_S)
    per_s = amount / _MINUTE_S
    capacity = per_s * quota.burst_s
    return Rate(max(1.0, capacity) if limit == "requests_per_minute" else capacity, per_s)


class Bucket:
    """One limit of one tenant or key, which refills continuously up to its capacity.

    A request takes the maximum that it may use, and returns what it did not use. The bucket may have been
    full in the meantime, so the returned amount is capped: the level never exceeds what it would be if the
    unused amount had never been taken. In any period, requests therefore use at most the capacity plus the
    refill of that period, regardless of how much they reserve.

    `level` is negative only after a crash in which more was used than had been recorded.
    """

    __slots__ = ("_peaks", "held", "level", "limit", "owner", "rate", "updated_at")

    def __init__(self, owner: str, limit: str, rate: Rate, now: float) -> None:
        self.owner = owner
        """The owner as shown in messages, such as "tenant 'acme'"."""
        self.limit = limit
        """The name of the limit, from LIMITS."""
        self.rate = rate
        self.level = rate.capacity
        self.held = 0.0
        """Amount reserved or charged by requests whose log rows are still open."""
        self.updated_at = now
        self._peaks = Peaks()

    @property
    def counts_tokens(self) -> bool:
        """Whether the limit counts tokens. Otherwise it counts requests."""
        return self.limit != "requests_per_minute"

    @property
    def settled(self) -> float:
        """The level that the bucket would have if the requests in flight held nothing."""
        return min(self.rate.capacity, self.level + self.held)

    def refill(self, now: float) -> None:
        """Add the refill up to `now`. The level does not change if the clock went back."""
        elapsed_s = now - self.updated_at
        self.updated_at = now
        if elapsed_s > 0.0:
            self.level = min(self.rate.capacity, self.level + elapsed_s * self.rate.per_s)

    def set_rate(self, rate: Rate, now: float) -> None:
        """Change the refill of the bucket. The level is kept but capped at the new capacity, so raising a
        limit adds nothing immediately."""
        self.refill(now)
        self.rate = rate
        self.level = min(self.level, rate.capacity)

    def take(self, amount: float) -> int:
        """Take this amount for a request and return the serial number of the take. Call `refill` before
        this."""
        number = self._peaks.take(self.level)
        self.level -= amount
        self.held += amount
        return number

    def settle(self, number: int, unused: float, now: float) -> None:
        """Return the unused amount of a take to the bucket. Call this once per take."""
        self.refill(now)
        capacity = self.rate.capacity
        peak = max(self.level, self._peaks.settle(number, unused, capacity))
        self.level += max(0.0, min(unused, capacity - peak))
        self.held -= unused

    def let_go(self, amount: float) -> None:
        """Stop counting this amount as held, because the request that used it has ended."""
        self.held -= amount

    def wait_s(self, amount: float) -> float:
        """Return how long it takes to refill the bucket to this level, in seconds; inf if the bucket never
        reaches it."""
        if amount > self.rate.capacity:
            return math.inf
        return max(0.0, (amount - self.level) / self.rate.per_s)


class Peaks:
    """The highest level of a bucket since each unsettled take.

    The level falls only when a request takes from the bucket, so peaks occur just before takes. A peak is
    kept until the level reaches it again, and only one peak is kept after each open take."""

    __slots__ = ("_levels", "_numbers", "_open", "_takes")

    MAX = 1024
    """Maximum number of peaks, which bounds the cost of settling. With more open takes, the peaks are less
    precise."""

    def __init__(self) -> None:
        self._takes = 0
        self._open: list[int] = []
        """Serial numbers of the unsettled takes, oldest first."""
        self._numbers: list[int] = []
        """The serial number of the take that follows each peak."""
        self._levels: list[float] = []
        """The level at each peak, descending."""

    def take(self, level: float) -> int:
        """Begin a take and return its number. `level` is the level before it."""
        number = self._takes
        self._takes += 1
        if self._open:
            while self._levels and self._levels[-1] <= level:
                del self._numbers[-1], self._levels[-1]
            if not self._numbers or self._numbers[-1] <= self._open[-1]:
                self._numbers.append(number)
                self._levels.append(level)
                if len(self._numbers) > self.MAX:
                    self._forget_half()
        self._open.append(number)
        return number

    def settle(self, number: int, unused: float, capacity: float) -> float:
        """End a take that left this amount unused. Returns the highest level since the take began; -inf if no
        take followed."""
        numbers, levels = self._numbers, self._levels
        first = bisect_right(numbers, number)
        peak = levels[first] if first < len(levels) else -math.inf
        if unused:
            # If the unused amount had not been taken, these peaks would have been higher.
            levels[first:] = [min(capacity, level + unused) for level in levels[first:]]
        self._close(number, first)
        return peak

    def _close(self, number: int, first: int) -> None:
        """Remove the peaks that no other open take needs. `first` is the index of the first peak after the
        take."""
        numbers, levels = self._numbers, self._levels
        at = bisect_left(self._open, number)
        before = self._open[at - 1] if at else -1
        after = self._open[at + 1] if at + 1 < len(self._open) else self._takes
        del self._open[at]
        if first < len(numbers):
            while first and levels[first - 1] <= levels[first]:
                first -= 1
                del numbers[first], levels[first]
            if first and numbers[first - 1] > before and numbers[first] <= after:
                del numbers[first], levels[first]
        useless = bisect_right(numbers, self._open[0]) if self._open else len(numbers)
        del numbers[:useless], levels[:useless]

    def _forget_half(self) -> None:
        # When two peaks are merged, keep the higher level and the later take, so that no peak is
        # underestimated.
        odd = len(self._numbers) % 2
        numbers, levels = self._numbers[1::2], self._levels[: len(self._levels) - odd : 2]
        if odd:
            numbers.append(self._numbers[-1])
            levels.append(self._levels[-1])
        self._numbers, self._levels = numbers, levels
