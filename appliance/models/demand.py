"""Predicts how many replicas a model will need, from its load over the last few minutes and on the previous
day. Demand is measured in replicas: 1.5 means that the load would fully occupy one and a half replicas."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_RECENT_S, _TREND_S = 10.0, 300.0
"""Periods, in seconds, for averaging the current demand and for computing the trend."""
_MIN_TREND_S = 30.0
"""The trend is used only once demand has been recorded for this long."""
_MAX_GROWTH = 2.0
"""The trend's prediction is capped at this multiple of the current demand."""
_DAY_S, _MINUTE_S = 86_400.0, 60.0
_AROUND_S = 300.0
"""The prediction also considers yesterday's demand, from the current time of day until this many seconds
after the time of day for which the prediction is made."""


class Demand(NamedTuple):
    """How many replicas a model needs, and why."""

    replicas: float
    reason: str
    """Explanation for operators."""


class DemandForecast:
    """Records a model's demand and predicts its future demand. All times are in seconds on one monotonic
    clock."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()
        """(time, demand) pairs from the last `_TREND_S` seconds."""
        self._minutes: dict[int, float] = {}
        """Peak of the mean demand in each minute of the last day, keyed by monotonic-clock minute."""

    def add(self, now: float, demand: float) -> None:
        """Add the current demand. Call this about once a second, at regular intervals."""
        self._recent.append((now, demand))
        while self._recent[0][0] < now - _TREND_S:
            self._recent.popleft()
        minute = int(now // _MINUTE_S)
        if minute not in self._minutes:
            oldest = minute - int((_DAY_S + _TREND_S) // _MINUTE_S)
            self._minutes = {key: value for key, value in self._minutes.items() if key >= oldest}
        self._minutes[minute] = max(self._minutes.get(minute, 0.0), self.present(now))

    def present(self, now: float) -> float:
        """Return the mean demand over the last few seconds, or 0 if no demand has been recorded."""
        total, count = 0.0, 0
        for at, demand in reversed(self._recent):
            if at < now - _RECENT_S:
                break
            total, count = total + demand, count + 1
        return total / count if count else 0.0

    def expected(self, now: float, ahead_s: float) -> Demand:
        """Return the highest demand expected in the next `ahead_s` seconds: the maximum of the current
        demand, the demand predicted from the last few minutes' trend, and the demand at about this time a day
        ago."""
        present = self.present(now)
        best = Demand(present, f"the load needs {present:.1f} replicas")
        slope = self._slope()
        trend = min(present + slope * ahead_s, _MAX_GROWTH * present)
        if trend > best.replicas:
            best = Demand(
                trend,
                f"the load needs {present:.1f} replicas and grows by {60 * slope:.2f} per minute, so it will "
                f"need {trend:.1f} in {ahead_s:.0f} s",
            )
        before = self._day_before(now, ahead_s)
        if before > best.replicas:
            best = Demand(
                before,
                f"the load needs {present:.1f} replicas, and a day ago it needed {before:.1f} at this time",
            )
        return best

    def _slope(self) -> float:
        """Return the demand's growth per second, computed by linear regression, or 0 if the demand has not
        been recorded for long enough."""
        if len(self._recent) < 2 or self._recent[-1][0] - self._recent[0][0] < _MIN_TREND_S:
            return 0.0
        count = len(self._recent)
        mean_at = sum(at for at, _ in self._recent) / count
        mean = sum(demand for _, demand in self._recent) / count
        spread = sum((at - mean_at) ** 2 for at, _ in self._recent)
        return sum((at - mean_at) * (demand - mean) for at, demand in self._recent) / spread

    def _day_before(self, now: float, ahead_s: float) -> float:
        first = int((now - _DAY_S) // _MINUTE_S)
        last = int((now - _DAY_S + ahead_s + _AROUND_S) // _MINUTE_S)
        return max((self._minutes.get(minute, 0.0) for minute in range(first, last + 1)), default=0.0)
