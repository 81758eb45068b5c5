"""Computes a metric's rate, change, deviation and trend from its recent values, which are kept in a limited
number of buckets."""

from __future__ import annotations

import math
from collections import deque

_BUCKETS = 60
_MIN_BUCKETS = 10
"""Minimum number of buckets for a trend or a deviation."""
_MIN_RELATIVE_DEVIATION = 0.05
"""Minimum standard deviation, as a fraction of the mean. Without it, the first small change in a constant
metric would count as a large deviation."""
_MIN_FIT = 0.5
"""Minimum coefficient of determination (R²) of a trend. Below it, the metric has no clear trend."""


class _Bucket:
    __slots__ = ("begin", "count", "high", "last", "low", "total")

    def __init__(self, begin: float, value: float) -> None:
        self.begin = begin
        self.count = 1
        self.total = self.low = self.high = self.last = value

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.low, self.high, self.last = min(self.low, value), max(self.high, value), value

    @property
    def mean(self) -> float:
        return self.total / self.count


class Window:
    """A metric's values in the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / _BUCKETS
        self._buckets: deque[_Bucket] = deque()
        self._at = -math.inf

    def add(self, at: float, value: float) -> None:
        """Add a value of the metric. A value that is not newer than the latest one is ignored."""
        if at <= self._at:
            return
        self._at = at
        buckets = self._buckets
        if buckets and at < buckets[-1].begin + self._bucket_s:
            buckets[-1].add(value)
        else:
            buckets.append(_Bucket(at, value))
        while buckets[0].begin <= at - self._window_s - self._bucket_s:
            buckets.popleft()

    def change(self) -> float:
        """Return the difference between the metric's highest and lowest value."""
        return max(one.high for one in self._buckets) - min(one.low for one in self._buckets)

    def rate(self) -> float | None:
        """Return the metric's increase per second, or None if the values cover too little time or if the
        counter was reset."""
        first, last = self._buckets[0], self._buckets[-1]
        span_s = self._at - first.begin
        if span_s < min(self._window_s / 2, 30.0) or last.last < first.low:
            return None
        return (last.last - first.low) / span_s

    def deviation(self, value: float) -> float | None:
        """Return how many standard deviations `value` is above the mean of the earlier values (negative if
        below), or None if there are too few earlier values."""
        earlier = [one.mean for one in self._buckets][: -max(1, _BUCKETS // 10)]
        if len(earlier) < _MIN_BUCKETS:
            return None
        mean = math.fsum(earlier) / len(earlier)
        variance = math.fsum((one - mean) ** 2 for one in earlier) / len(earlier)
        least = max(abs(mean) * _MIN_RELATIVE_DEVIATION, 1e-9)
        return (value - mean) / max(math.sqrt(variance), least)

    def time_to(self, target: float) -> float | None:
        """Return the number of seconds until the metric reaches `target` if its trend continues: infinity if
        it is not approaching the target, None if there are too few values. The trend is the least-squares
        line through the means of the buckets."""
        points = [(one.begin - self._at, one.mean) for one in self._buckets]
        if len(points) < _MIN_BUCKETS or -points[0][0] < self._window_s / 4:
            return None
        mean_x = math.fsum(x for x, _ in points) / len(points)
        mean_y = math.fsum(y for _, y in points) / len(points)
        sxx = math.fsum((x - mean_x) ** 2 for x, _ in points)
        sxy = math.fsum((x - mean_x) * (y - mean_y) for x, y in points)
        syy = math.fsum((y - mean_y) ** 2 for _, y in points)
        if sxx <= 0 or syy <= 0 or sxy * sxy / (sxx * syy) < _MIN_FIT:
            return math.inf
        slope = sxy / sxx
        now = mean_y - slope * mean_x
        left = (target - now) / slope
        return left if left > 0 else 0.0 if _passed(now, target, slope) else math.inf


def _passed(now: float, target: float, slope: float) -> bool:
    """Return whether the metric has already passed the target in the direction of the slope."""
    return now >= target if slope > 0 else now <= target
