"""Evaluates alert rules on telemetry samples. Reads no clock and has no side effects, so it can be used for
both the running service and the recorded history."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.causes import CauseFinder
from appliance.monitoring.alerts.conditions import Condition, threshold
from appliance.monitoring.alerts.selection import Scope, Selected, related, select
from appliance.monitoring.alerts.texts import filled, next_step
from appliance.snapshot import AlertEvent
from store.alerts import AlertRow
from store.samples import TelemetryLayout, TelemetrySample

SETTLE_S = 60.0
"""How long after its end an alert can still be the cause of other alerts, in seconds."""
GROUP_S = 30.0
"""If a rule raises several alerts within this many seconds, the later ones are grouped under the first."""
_SET_BACK_S = 5.0
"""A sample that is at least this many seconds older than the previous one shows that the clock was set
back."""


class Raised(AlertRow, kw_only=True):
    """An alert that has been raised, with the state that the evaluator keeps for it."""

    objects: Scope
    """The objects that the alert is about, decoded from `scope`."""
    announced: bool = False
    """Whether the alert is shown."""
    known: bool = False
    """Whether any change in this alert's state has been reported yet."""


class Transition(msgspec.Struct, frozen=True):
    """A change in an alert's state. An alert caused by another alert is not reported as "raised"; if it was
    raised before its cause, it becomes "suppressed"."""

    at: float
    event: AlertEvent | Literal["suppressed"]
    alert: Raised


class Evaluator:
    """Evaluates all alert rules and keeps their state. Samples must be passed to `step` in the order in which
    they were taken."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._causes = CauseFinder()
        self._at = -math.inf
        """Time of the latest sample."""
        self._layout: TelemetryLayout | None = None
        self._selected: list[tuple[AlertRule, list[Selected]]] = []
        self._conditions: dict[tuple[str, str], Condition] = {}
        self.alerts: dict[str, Raised] = {}
        """The active alerts and those that ended within the last `SETTLE_S` seconds, by id."""
        self._of: dict[tuple[str, str], Raised] = {}
        """The active alert for each (rule, subject) pair."""
        self.rules: dict[str, AlertRule] = {}
        self.set_rules(rules)

    def set_rules(self, rules: Sequence[AlertRule]) -> None:
        """Replace the alert rules. Unchanged rules keep the state of their conditions."""
        former, self.rules = self.rules, {rule.name: rule for rule in rules}
        kept = {name for name, rule in self.rules.items() if former.get(name) == rule}
        self._conditions = {
            key: condition for key, condition in self._conditions.items() if condition.rule.name in kept
        }
        self._layout = None

    def restore(self, alerts: Iterable[Raised]) -> None:
        """Restore the alerts that were active when the service last stopped."""
        for alert in alerts:
            rule = self.rules.get(alert.rule)
            self.alerts[alert.id] = self._of[alert.rule, alert.subject] = alert
            alert.announced = alert.known = True
            if rule is None:
                continue
            condition = Condition(rule, alert.subject, alert.objects, "firing", alert.since, alert.raised_at)
            self._conditions[alert.rule, alert.subject] = condition

    def step(self, sample: TelemetrySample) -> list[Transition]:
        """Evaluate all alert rules on a sample and return the resulting changes in alert states."""
        if sample.at <= self._at - _SET_BACK_S:
            self._restart()
        self._at = sample.at
        if sample.layout is not self._layout:
            self._layout = sample.layout
            self._selected = [
                (rule, list(select(sample.layout, rule.metric, rule.per, bool(rule.texts))))
                for rule in self.rules.values()
            ]
        self._causes.observe(sample)
        ended = list(self._update(sample))
        self._suppress()
        transitions = [*self._announce(sample.at), *ended]
        self._forget(sample.at)
        return transitions

    def _restart(self) -> None:
        """Forget the times of earlier samples, because the clock was set back. Otherwise, no condition that
        lasts for some time could be evaluated until the clock has reached its former time again."""
        self._causes = CauseFinder()
        self.alerts = {alert.id: alert for alert in self._of.values()}
        for condition in self._conditions.values():
            condition.restart()

    def _update(self, sample: TelemetrySample) -> Iterator[Transition]:
        at, numbers = sample.at, sample.numbers
        for key, alert in list(self._of.items()):
            if key not in self._conditions:
                # The rule was removed or changed. A changed rule may raise a new alert below.
                yield from self._end_alert(key, alert, at)
        for rule, selected in self._selected:
            for metric in selected:
                key = (rule.name, metric.where)
                condition = self._conditions.get(key)
                if condition is None:
                    condition = self._conditions[key] = Condition(rule, metric.where, metric.scope)
                elif condition.seen_at == at:
                    # If several texts about one subject match, raise only one alert. For example, a GPU can
                    # have two reasons for throttling.
                    continue
                value = None
                if metric.position >= 0:
                    value = numbers[metric.position]
                    if metric.per >= 0:
                        per = numbers[metric.per]
                        value = value / per if per > 0 else None
                    if value is not None and value != value:
                        value = None
                result = condition.update(at, value, metric.text, metric.remedy)
                if result:
                    condition.scope = metric.scope
                    self._raise(condition)
                elif result is False:
                    yield from self._end(condition, at)
        for key, condition in list(self._conditions.items()):
            if condition.seen_at != at:
                if condition.miss(at) is False:
                    yield from self._end(condition, at)
                if condition.phase == "ok":
                    del self._conditions[key]

    def _raise(self, condition: Condition) -> None:
        rule, at = condition.rule, condition.raised_at
        identity = f"{rule.name} {condition.where} {at:.3f}".encode()
        alert = Raised(
            id=hashlib.blake2s(identity, digest_size=4).hexdigest(),
            rule=rule.name,
            severity=rule.severity,
            subject=condition.where,
            description=filled(rule, condition),
            cause=self._causes.find(condition),
            remedy=next_step(rule, condition.remedy, condition.scope),
            since=condition.since,
            raised_at=at,
            value=condition.value,
            threshold=threshold(rule),
            unit=rule.unit,
            scope=msgspec.json.encode(sorted(condition.scope)).decode(),
            objects=condition.scope,
        )
        self.alerts[alert.id] = self._of[rule.name, condition.where] = alert

    def _end(self, condition: Condition, at: float) -> Iterator[Transition]:
        key = (condition.rule.name, condition.where)
        if (alert := self._of.get(key)) is not None:
            yield from self._end_alert(key, alert, at)

    def _end_alert(self, key: tuple[str, str], alert: Raised, at: float) -> Iterator[Transition]:
        del self._of[key]
        alert.ended_at = at
        if alert.known:
            yield Transition(at, "ended", alert)

    def _suppress(self) -> None:
        """Find each active alert's cause among the other alerts."""
        for alert in self.alerts.values():
            alert.suppressed = 0
        for alert in self._of.values():
            cause = self._explanation(alert)
            alert.suppressed_by = "" if cause is None else cause.id
        for alert in self._of.values():
            if alert.suppressed_by:
                root = self.alerts[alert.suppressed_by]
                while root.suppressed_by and (above := self.alerts.get(root.suppressed_by)) is not None:
                    root = above
                root.suppressed += 1
                if root.rule == alert.rule:
                    self._widen(root, alert.objects)

    def _widen(self, alert: Raised, objects: Scope) -> None:
        """Remove from an alert's next step the names that do not also apply to a second alert, which is
        grouped under the first. `objects` are the objects that the second alert is about."""
        rule, condition = self.rules.get(alert.rule), self._conditions.get((alert.rule, alert.subject))
        if rule is not None and condition is not None:
            alert.remedy = next_step(rule, condition.remedy, alert.objects | objects)

    def _explanation(self, alert: Raised) -> Raised | None:
        rule = self.rules.get(alert.rule)
        upstream = () if rule is None else rule.downstream_of
        for other in self.alerts.values():
            if other is alert:
                continue
            if other.rule in upstream and related(other.objects, alert.objects):
                return other
            if _is_head(other, alert):
                return other
        return None

    def _announce(self, at: float) -> Iterator[Transition]:
        for alert in list(self._of.values()):
            if alert.suppressed_by:
                if alert.announced:
                    alert.announced = False
                    yield Transition(at, "suppressed", alert)
            elif not alert.announced and self._conditions[alert.rule, alert.subject].clear_since is None:
                # An alert that is about to end is not reported as raised, even if it is no longer suppressed.
                alert.announced = alert.known = True
                yield Transition(at, "raised", alert)

    def _forget(self, at: float) -> None:
        for alert in list(self.alerts.values()):
            if alert.ended_at is not None and at - alert.ended_at > SETTLE_S:
                del self.alerts[alert.id]


def _is_head(other: Raised, alert: Raised) -> bool:
    """Return whether `alert` is grouped under `other`: an active, unsuppressed alert of the same rule that
    was raised at most `GROUP_S` seconds earlier."""
    if other.rule != alert.rule or other.ended_at is not None or other.suppressed_by:
        return False
    first = (other.raised_at, other.id) < (alert.raised_at, alert.id)
    return first and alert.raised_at - other.raised_at <= GROUP_S
