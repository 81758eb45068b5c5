"""Token buckets, which track how much of each rate limit remains. Buckets have no clock: callers pass the
time in seconds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from store.policies import RATE_LIMITS, Quota

_PERIODS_S = {"min": 60.0, "day": 86400.0}
"""Length of a limit's period in seconds, keyed by the limit's time unit, such as "min" for "tokens/min"."""


class Rate:
    """A bucket's refill rate: `per_s` per second, up to `capacity`."""

    __slots__ = ("capacity", "per_s")

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s


def rate_of(quota: Quota, limit: str) -> Rate | None:
    """Return the refill rate for one of `RATE_LIMITS`, or None if the quota does not set that limit. A
    per-minute limit's capacity is the amount refilled in `burst_s` seconds; a daily limit's is a full day's
    amount. The capacity is at least one request, because otherwise no request could run.
    """
    amount: float | None = getattr(quota, limit)
    if amount is None:
        return None
    counted, _, period = RATE_LIMITS[limit].field.unit.partition("/")
    period_s = _PERIODS_S[period]
    # Multiply first: 123 / 60 * 60 is less than 123, which would refuse a request for exactly 123 tokens.
    capacity = amount if period == "day" else amount * quota.burst_s / period_s
    return Rate(max(1.0, capacity) if counted == "requests" else capacity, amount / period_s)


class Bucket:
    """One rate limit of a tenant or key. The bucket refills continuously up to its capacity.

    A request takes the maximum amount that it may use and later returns the unused part. If the bucket has
    been full in the meantime, less is returned, so that the level never exceeds what it would have been if
    the unused part had never been taken. In any period, requests therefore use at most the capacity plus that
    period's refill, no matter how much they reserve.

    `level` is negative only after a crash, if requests had used more than was recorded.
    """

    __slots__ = ("_peaks", "counts_tokens", "held", "level", "limit", "owner", "rate", "updated_at")

    def __init__(self, owner: str, limit: str, rate: Rate, now: float) -> None:
        self.owner = owner
        """The limit's owner as shown in messages, such as "tenant 'acme'"."""
        self.limit = limit
        """The name of the limit, from RATE_LIMITS."""
        self.counts_tokens = RATE_LIMITS[limit].field.unit.startswith("tokens")
        """Whether the limit counts tokens rather than requests."""
        self.rate = rate
        self.level = rate.capacity
        self.held = 0.0
        """Amount taken from the bucket by requests whose log rows are still open."""
        self.updated_at = now
        self._peaks = Peaks()

    @property
    def settled(self) -> float:
        """The level that the bucket would have if in-flight requests returned everything they hold."""
        return min(self.rate.capacity, self.level + self.held)

    def refill(self, now: float) -> None:
        """Refill the bucket up to time `now`. If the clock has gone backwards, the level does not change."""
        elapsed_s = now - self.updated_at
        self.updated_at = now
        if elapsed_s > 0.0:
            self.level = min(self.rate.capacity, self.level + elapsed_s * self.rate.per_s)

    def set_rate(self, rate: Rate, now: float) -> None:
        """Change the refill rate. The level stays the same unless it exceeds the new capacity, so raising a
        limit does not raise the level immediately."""
        self.refill(now)
        self.rate = rate
        self.level = min(self.level, rate.capacity)

    def take(self, amount: float) -> int:
        """Take `amount` from the bucket for a request and return the serial number to pass to `settle`. Call
        `refill` first."""
        number = self._peaks.take(self.level)
        self.level -= amount
        self.held += amount
        return number

    def charge(self, amount: float) -> None:
        """Take `amount` for good, without holding it for a request. Call `refill` first."""
        self._peaks.settle(self._peaks.take(self.level), 0.0, self.rate.capacity)
        self.level -= amount

    def settle(self, number: int, unused: float, now: float) -> None:
        """Return the unused part of a taken amount to the bucket. Call this once per `take`."""
        self.refill(now)
        capacity = self.rate.capacity
        peak = max(self.level, self._peaks.settle(number, unused, capacity))
        self.level += max(0.0, min(unused, capacity - peak))
        self.held -= unused

    def let_go(self, amount: float) -> None:
        """Release an amount that was held for a request. Call this when the request has finished."""
        self.held -= amount

    def wait_s(self, amount: float) -> float:
        """Return the time in seconds until the bucket contains `amount`, or inf if it never will."""
        if amount > self.rate.capacity:
            return math.inf
        return max(0.0, (amount - self.level) / self.rate.per_s)


class Peaks:
    """Tracks a bucket's highest level since each unsettled take. A *take* is an amount taken for a request.
    Only takes lower the level, so each peak occurs just before a take. A peak is kept until the level reaches
    it again, and at most one peak is kept per unsettled take.
    """

    __slots__ = ("_levels", "_numbers", "_open", "_takes")

    MAX = 1024
    """Maximum number of peaks, to bound the cost of settling. With more unsettled takes than this, the peaks
    become less precise."""

    def __init__(self) -> None:
        self._takes = 0
        self._open: list[int] = []
        """Serial numbers of the takes (amounts taken for requests) not yet settled, oldest first."""
        self._numbers: list[int] = []
        """For each peak of the bucket's level, the serial number of the take that follows."""
        self._levels: list[float] = []
        """The bucket's level at each peak, in descending order."""

    def take(self, level: float) -> int:
        """Register an amount taken for a request (a take) and return its serial number. `level` is the
        bucket's level before the take."""
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
        """Settle a take (an amount taken for a request), of which `unused` was not used. Return the bucket's
        highest level since the take, or -inf if there was no later take."""
        numbers, levels = self._numbers, self._levels
        first = bisect_right(numbers, number)
        peak = levels[first] if first < len(levels) else -math.inf
        if unused:
            # Raise the levels to what they would have been if only the used amount had been taken.
            levels[first:] = [min(capacity, level + unused) for level in levels[first:]]
        self._close(number, first)
        return peak

    def _close(self, number: int, first: int) -> None:
        """Remove the settled take `number` and the peaks that no unsettled take needs any longer. `first` is
        the index of the first peak after the settled take."""
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
