"""Token buckets: how much of a limit is left now. Plain arithmetic; time is passed in, in seconds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from store.policies import Quota

LIMITS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day",
}
"""The limits of a quota that are rates, by their field, in words."""

_MINUTE_S, _DAY_S = 60.0, 86400.0


class Rate:
    """How a bucket refills: `capacity` at most, `per_s` each second."""

    __slots__ = ("capacity", "per_s")

    def __init__(self, capacity: float, per_s: float) -> None:
        self.capacity = capacity
        self.per_s = per_s


def rate_of(quota: Quota, limit: str) -> Rate | None:
    """How the bucket of a limit (of LIMITS) refills; None without that limit.

    What may be used at once is `burst_s` seconds of a rate a minute, and a day's worth of one a day; never
    less than one request, or there would be none ever.
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
    """One limit of one tenant or key. It refills continuously, up to its capacity.

    A request takes the most that it may use, and what it did not use comes back: but no more of it than would
    be there had it never been taken. Where the bucket would have been full meanwhile, refill would have been
    lost. So over any time, what was used is at most the capacity and what refills in that time, however long
    requests hold how much more than they use.

    `level` may be below zero only after a crash, when more was used than was known.
    """

    __slots__ = ("_peaks", "held", "level", "limit", "owner", "rate", "updated_at")

    def __init__(self, owner: str, limit: str, rate: Rate, now: float) -> None:
        self.owner = owner
        """In words: "tenant 'acme'"."""
        self.limit = limit
        """Of LIMITS."""
        self.rate = rate
        self.level = rate.capacity
        self.held = 0.0
        """Taken by requests whose rows have not ended: reserved, or charged already."""
        self.updated_at = now
        self._peaks = Peaks()

    @property
    def counts_tokens(self) -> bool:
        """Whether it counts tokens; else requests."""
        return self.limit != "requests_per_minute"

    @property
    def settled(self) -> float:
        """The level as if no request whose row has not ended had taken anything."""
        return min(self.rate.capacity, self.level + self.held)

    def refill(self, now: float) -> None:
        """Bring the level up to `now`. A clock that went back gives nothing and takes nothing."""
        elapsed_s = now - self.updated_at
        self.updated_at = now
        if elapsed_s > 0.0:
            self.level = min(self.rate.capacity, self.level + elapsed_s * self.rate.per_s)

    def set_rate(self, rate: Rate, now: float) -> None:
        """Refill in another way from now on. What is left is left, as far as it fits: raising a limit gives
        nothing at once."""
        self.refill(now)
        self.rate = rate
        self.level = min(self.level, rate.capacity)

    def take(self, amount: float) -> int:
        """A request takes this much of a bucket that was refilled just now; the number of this take."""
        number = self._peaks.take(self.level)
        self.level -= amount
        self.held += amount
        return number

    def settle(self, number: int, unused: float, now: float) -> None:
        """Of what that take took, so much was not used. To be called once for each."""
        self.refill(now)
        capacity = self.rate.capacity
        peak = max(self.level, self._peaks.settle(number, unused, capacity))
        self.level += max(0.0, min(unused, capacity - peak))
        self.held -= unused

    def let_go(self, amount: float) -> None:
        """A request that holds so much has ended: it is used."""
        self.held -= amount

    def wait_s(self, amount: float) -> float:
        """Seconds until this much is there if nobody takes or gives back any; inf if it never can be."""
        if amount > self.rate.capacity:
            return math.inf
        return max(0.0, (amount - self.level) / self.rate.per_s)


class Peaks:
    """How high a bucket's level was at most since each take that is not settled.

    A level rises but for takes, so its peaks are before takes. Kept are those that it did not reach again
    since, and one of them after each open take.
    """

    __slots__ = ("_levels", "_numbers", "_open", "_takes")

    MOST = 1024
    """Bounds what settling costs; with more takes open, the levels are known more coarsely."""

    def __init__(self) -> None:
        self._takes = 0
        self._open: list[int] = []
        """Numbers of the takes that are not settled, oldest first."""
        self._numbers: list[int] = []
        """Of the takes before which the peaks were."""
        self._levels: list[float] = []
        """Of the peaks, falling."""

    def take(self, level: float) -> int:
        """A take begins, at this level before it; its number."""
        number = self._takes
        self._takes += 1
        if self._open:
            while self._levels and self._levels[-1] <= level:
                del self._numbers[-1], self._levels[-1]
            if not self._numbers or self._numbers[-1] <= self._open[-1]:
                self._numbers.append(number)
                self._levels.append(level)
                if len(self._numbers) > self.MOST:
                    self._forget_half()
        self._open.append(number)
        return number

    def settle(self, number: int, unused: float, capacity: float) -> float:
        """A take ends, which took so much too much; the highest level since (-inf: no take came since)."""
        numbers, levels = self._numbers, self._levels
        first = bisect_right(numbers, number)
        peak = levels[first] if first < len(levels) else -math.inf
        if unused:
            # Had it not been taken, it would have been there at these peaks too.
            levels[first:] = [min(capacity, level + unused) for level in levels[first:]]
        self._close(number, first)
        return peak

    def _close(self, number: int, first: int) -> None:
        """Keep what the other open takes need. `first` is the first peak after the take."""
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
        # Of two peaks, the higher level at the later take: none is taken for lower than it was.
        odd = len(self._numbers) % 2
        numbers, levels = self._numbers[1::2], self._levels[: len(self._levels) - odd : 2]
        if odd:
            numbers.append(self._numbers[-1])
            levels.append(self._levels[-1])
        self._numbers, self._levels = numbers, levels
