"""Decides when a rule raises an alert for a metric, and when that alert ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.selection import Scope, matches_text
from appliance.monitoring.alerts.windows import Window

_DEFAULT_GAP = 0.1
"""Default distance between the threshold that raises an alert and the value that ends it, as a fraction of
the threshold."""


@dataclass(slots=True)
class Condition:
    """The state of one alert rule's condition for one metric."""

    rule: AlertRule
    where: str
    scope: Scope
    phase: Literal["ok", "pending", "firing"] = "ok"
    since: float = 0.0
    """Time when the condition last began to hold."""
    raised_at: float = 0.0
    clear_since: float | None = None
    """Time when the condition ceased to hold; None while it holds. The alert may stay active for some time
    afterwards."""
    seen_at: float = 0.0
    """Time of the latest sample that contains the metric."""
    value: float | None = None
    text: str = ""
    remedy: str = ""
    armed: bool = False
    """Whether one of the rule's `clear_texts` has occurred in a sample."""
    window: Window | None = field(default=None)

    def update(self, at: float, value: float | None, text: str, remedy: str) -> bool | None:
        """Update the condition with a new sample. Return True if this raises the alert, False if it ends the
        alert, and None otherwise."""
        self.seen_at = at
        crossed, cleared = self._text(text) if self.rule.texts else self._number(at, value)
        if self.phase == "firing":
            if crossed and self.rule.texts:
                self.text, self.remedy = text, remedy
            return self._firing(at, cleared)
        if not crossed:
            self.phase = "ok"
            return None
        if self.phase == "ok":
            self.phase, self.since = "pending", at
        self.text, self.remedy = text, remedy
        if at - self.since < self.rule.for_s:
            return None
        self.phase, self.raised_at, self.clear_since = "firing", at, None
        return True

    def restart(self) -> None:
        """Forget the times and values of earlier samples, because the clock was set back."""
        self.window = self.clear_since = None
        if self.phase == "pending":
            self.phase = "ok"

    def miss(self, at: float) -> bool | None:
        """Update the condition with a sample that lacks the metric. A missing metric ends an alert just as a
        normal value does. Return False if the alert ends, and None otherwise."""
        if self.phase != "firing":
            self.phase = "ok"
            return None
        return self._firing(at, cleared=True)

    def _firing(self, at: float, cleared: bool) -> bool | None:
        if not cleared:
            self.clear_since = None
            return None
        if self.clear_since is None:
            self.clear_since = at
        if at - self.clear_since < self.rule.clear_for_s:
            return None
        self.phase = "ok"
        return False

    def _text(self, text: str) -> tuple[bool, bool]:
        rule = self.rule
        crossed = matches_text(text, rule.texts)
        if not rule.clear_texts:
            return crossed, not crossed
        cleared = matches_text(text, rule.clear_texts)
        self.armed = cleared or self.armed
        return crossed and self.armed, cleared

    def _number(self, at: float, value: float | None) -> tuple[bool, bool]:
        """Return whether the measured value has crossed the threshold, and whether the alert may end. An
        unknown value neither raises nor ends an alert."""
        rule = self.rule
        measured = None if value is None else self._measure(at, value)
        if measured is None or math.isnan(measured):
            return False, False
        self.value = measured
        if rule.at_least is not None and value is not None and value < rule.at_least:
            return False, True
        if rule.above is not None:
            return measured >= rule.above, measured < clear_value(rule)
        assert rule.below is not None
        return measured <= rule.below, measured > clear_value(rule)

    def _measure(self, at: float, value: float) -> float | None:
        rule = self.rule
        if rule.measure == "value":
            return value
        if self.window is None:
            self.window = Window(rule.window_s)
        self.window.add(at, value)
        if rule.measure == "change":
            return self.window.change()
        if rule.measure == "rate":
            return self.window.rate()
        if rule.measure == "deviation":
            return self.window.deviation(value)
        return self.window.time_to(rule.target)


def threshold(rule: AlertRule) -> float | None:
    """Return the rule's threshold, or None if the rule compares texts."""
    return rule.above if rule.above is not None else rule.below


def clear_value(rule: AlertRule) -> float:
    """Return the value that the measured value must cross before the alert ends."""
    limit = threshold(rule)
    assert limit is not None
    if rule.clear is not None:
        return rule.clear
    gap = abs(limit) * _DEFAULT_GAP
    return limit - gap if rule.above is not None else limit + gap
