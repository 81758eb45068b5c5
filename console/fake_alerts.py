"""The simulated service's alerts: the built-in alert rules, evaluated on simulated snapshots. The alerts
begin and end as in a real service, and their wording is the same."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from appliance.actions.parameters import SilenceAlerts
from appliance.alert_rules import BUILT_IN
from appliance.monitoring.alerts.conditions import Condition, threshold
from appliance.monitoring.alerts.texts import filled, next_step
from appliance.pages import LineLevel
from appliance.protocol import Silence
from appliance.snapshot import Alert, Snapshot
from console import units
from console.fake_log import FakeLog
from console.fake_rows import OTHER_OPERATOR
from console.source import ListRow

_RULES = {rule.name: rule for rule in BUILT_IN}
_SETTLE_S = 60.0
"""How long, in seconds, an alert that has ended can still explain other alerts."""
_SHOWN_ENDED = 50
_CAUSE_WINDOW_S = 300.0


class _Measured(NamedTuple):
    """The current value of the metric that an alert rule checks."""

    rule: str
    where: str
    value: float | None = None
    text: str = ""


class FakeAlerts:
    """Evaluates alert rules on simulated snapshots."""

    def __init__(self, log: FakeLog, now: float) -> None:
        self._log = log
        self._now = now
        self._silences = [
            Silence(
                id="5f0c21aa",
                rule="disk-*",
                subject="*",
                until=now + 2 * 3600.0,
                reason="the backup disk is being replaced",
                created_by=OTHER_OPERATOR,
                created_at=now - 1260.0,
            )
        ]
        self._conditions: dict[tuple[str, str], Condition] = {}
        self._active: dict[tuple[str, str], Alert] = {}
        self._ended: deque[Alert] = deque(maxlen=_SHOWN_ENDED)

    def observe(self, snapshot: Snapshot) -> list[Alert]:
        """Evaluate the alert rules on a snapshot. Return all alerts, including those that have ended, newest
        first. Snapshots must be passed in chronological order."""
        self._now = snapshot.at
        for one in _measured(snapshot):
            key = (one.rule, one.where)
            kind, _, name = one.where.partition(" ")
            scope = frozenset({(kind, name)})
            condition = self._conditions.setdefault(key, Condition(_RULES[one.rule], one.where, scope))
            result = condition.update(snapshot.at, one.value, one.text, "")
            if result:
                alert = self._active[key] = _raised(condition, snapshot)
                self._write(snapshot.at, "warning", "raised", alert)
            elif result is False:
                ended = msgspec.structs.replace(self._active.pop(key), state="resolved", ended_at=snapshot.at)
                if self._explanation(ended, snapshot.at) is None:
                    self._ended.append(ended)
                    self._write(snapshot.at, "info", "ended", ended)
        return self._shown(snapshot.at)

    def rules(self) -> list[ListRow]:
        """Return the alert rules."""
        return [ListRow(id=name, subject=name) for name in _RULES]

    def silences(self) -> list[Silence]:
        """Return the active silences, oldest first."""
        return [one for one in self._silences if one.until > self._now]

    def acknowledge(self, alert_id: str, actor: str) -> Alert:
        """Acknowledge an alert. Raises LookupError for an unknown alert."""
        for key, alert in self._active.items():
            if alert.id == alert_id:
                self._active[key] = msgspec.structs.replace(
                    alert, state="acknowledged", acknowledged_by=actor
                )
                return self._active[key]
        raise LookupError(f"no active alert has id {alert_id!r}: choose an alert from the list")

    def silence(self, asked: SilenceAlerts, actor: str) -> Silence:
        """Silence alerts by rule and subject. Raises LookupError if no rule matches."""
        if not any(fnmatchcase(name, asked.rule) for name in _RULES):
            raise LookupError(f"no rule matches {asked.rule!r}: use one of {', '.join(_RULES)}")
        number = zlib.crc32(f"{asked.rule} {asked.where} {self._now:.3f}".encode())
        silence = Silence(
            id=f"{number:08x}",
            rule=asked.rule,
            subject=asked.where,
            until=self._now + asked.for_s,
            reason=asked.reason,
            created_by=actor,
            created_at=self._now,
        )
        self._silences.append(silence)
        return silence

    def unsilence(self, silence_id: str) -> Silence:
        """End a silence. Raises LookupError for an unknown silence."""
        for silence in self.silences():
            if silence.id == silence_id:
                self._silences.remove(silence)
                return silence
        raise LookupError(f"no silence has id {silence_id!r}: choose a silence from the list")

    def _with_silence(self, alert: Alert) -> Alert:
        """Mark an alert as silenced if an active silence matches it."""
        end_times = [
            one.until
            for one in self.silences()
            if fnmatchcase(alert.rule, one.rule) and fnmatchcase(alert.where, one.subject)
        ]
        return (
            msgspec.structs.replace(alert, state="silenced", silenced_until=max(end_times))
            if end_times
            else alert
        )

    def _shown(self, at: float) -> list[Alert]:
        """Return the alerts that are not explained by another alert, newest first."""
        explained: dict[str, int] = {}
        shown = []
        for alert in self._active.values():
            if (cause := self._explanation(alert, at)) is None:
                shown.append(self._with_silence(alert))
            else:
                explained[cause.id] = explained.get(cause.id, 0) + 1
        shown = [msgspec.structs.replace(one, suppressed=explained.get(one.id, 0)) for one in shown]
        return sorted([*shown, *self._ended], key=lambda one: -(one.since or 0.0))

    def _explanation(self, alert: Alert, at: float) -> Alert | None:
        """Return the alert that explains the given alert, or None."""
        causes = _RULES[alert.rule].downstream_of
        recent = [one for one in self._ended if at - (one.ended_at or 0.0) <= _SETTLE_S]
        return next(
            (
                one
                for one in (*self._active.values(), *recent)
                if one.rule in causes and one.where == alert.where
            ),
            None,
        )

    def _write(self, at: float, level: LineLevel, event: str, alert: Alert) -> None:
        text = f"alert {alert.id} {event}: {alert.rule}: {alert.description}; likely cause: {alert.cause}"
        self._log.write(at, "core", "manager", text, level)


def _measured(snapshot: Snapshot) -> Iterator[_Measured]:
    for gpu in snapshot.gpus:
        where = f"GPU {gpu.number}"
        yield _Measured("gpu-hot", where, gpu.temperature_c)
        yield _Measured("gpu-slowed-down", where, text=", ".join(gpu.throttle_reasons or ()))
    for kv in snapshot.kv:
        yield _Measured("kv-cache-full", kv.replica, units.ratio(kv.blocks_used, kv.blocks_total))
    queue, rates = snapshot.queue, snapshot.rates
    yield _Measured("queue-full", "queue", units.ratio(queue.waiting, queue.limit))
    for one in queue.classes:
        yield _Measured("class-late", f"class {one.name}", units.ratio(one.oldest_wait_s, one.target_s))
    yield _Measured("failures", "rates", units.ratio(rates.failed_per_s, rates.requests_per_s))
    for tenant in snapshot.tenants:
        for limit in tenant.usage:
            if limit.limit == "tokens_per_day":
                used = units.ratio(limit.used, limit.capacity)
                yield _Measured("tenant-daily-quota", f"tenant {tenant.name}", used)


def _raised(condition: Condition, snapshot: Snapshot) -> Alert:
    rule, at = condition.rule, snapshot.at
    minutes = min(_CAUSE_WINDOW_S, snapshot.uptime_s) / 60
    return Alert(
        id=f"{zlib.crc32(f'{rule.name} {condition.where} {at:.3f}'.encode()):08x}",
        rule=rule.name,
        severity=rule.severity,
        state="firing",
        where=condition.where,
        description=filled(rule, condition),
        cause=f"nothing else changed within the {minutes:.0f} min before the alert",
        remedy=next_step(rule, condition.remedy, condition.scope),
        since=condition.since,
        value=condition.value,
        threshold=threshold(rule),
        unit=rule.unit,
    )
