"""The running service's alert manager, which evaluates the alert rules on each sample, stores
acknowledgements and silences, writes alerts to `history.db` and passes alerts to the receivers."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import msgspec

from appliance.alert_rules import AlertRule
from appliance.history.reader import SHOWN_ENDED_S, alert_at
from appliance.monitoring.alerts.evaluation import Evaluator, Raised, Transition
from appliance.monitoring.alerts.selection import Scope
from appliance.snapshot import Alert, AlertEvent
from store.alerts import AlertLog, AlertRow
from store.samples import TelemetrySample
from store.structs import Silence

log = logging.getLogger(__name__)

_SHOWN_ENDED = 50
"""Maximum number of ended alerts that `list` returns."""
MAX_SILENCES = 500


class Receivers(Protocol):
    """Sends alerts to the configured receivers."""

    def send(self, event: AlertEvent, alert: Alert) -> None:
        """Pass an alert to the receivers. Must not block."""


class AlertManager:
    """Raises, stores and silences alerts. All methods must be called on the event loop thread."""

    def __init__(
        self,
        rules: Sequence[AlertRule],
        alert_log: AlertLog,
        receivers: Receivers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._evaluator = Evaluator(rules)
        self._log = alert_log
        self._receivers = receivers
        self._clock = clock
        self._silences: dict[str, Silence] = {}
        self._ended: deque[Alert] = deque(maxlen=_SHOWN_ENDED)
        self._explained: dict[str, int] = {}
        """Number of alerts suppressed by each alert, as written to the database."""

    def restore(self, alerts: Sequence[AlertRow], silences: Sequence[Silence]) -> None:
        """Restore alerts and silences from the service's previous run. `alerts` are sorted by the time at
        which they were raised. Suppressed alerts are ended; they are raised again if their conditions still
        hold. Alerts with a damaged scope are ended in the same way. If the end of an earlier alert about the
        same subject was not stored, that alert is ended."""
        lasting = []
        newest = {(row.rule, row.subject): row.id for row in alerts}
        for row in alerts:
            is_ended = bool(row.suppressed_by) or row.id != newest[row.rule, row.subject]
            objects: Scope = frozenset()
            try:
                objects = frozenset(msgspec.json.decode(row.scope, type=list[tuple[str, str]]))
            except msgspec.DecodeError as error:
                log.error("alert %s is ended because its scope %r is damaged: %s", row.id, row.scope, error)
                is_ended = True
            if is_ended:
                self._log.save(msgspec.structs.replace(row, ended_at=self._clock()))
                continue
            lasting.append(Raised(**msgspec.structs.asdict(row), objects=objects))
        self._evaluator.restore(lasting)
        self._silences = {silence.id: silence for silence in silences}

    def set_rules(self, rules: Sequence[AlertRule]) -> None:
        """Replace the alert rules."""
        self._evaluator.set_rules(rules)

    def observe(self, sample: TelemetrySample) -> None:
        """Evaluate the alert rules on a new sample."""
        for transition in self._evaluator.step(sample):
            self._announce(transition)
        for alert in self._evaluator.alerts.values():
            if alert.announced and self._explained.get(alert.id, 0) != alert.suppressed:
                self._log.save(alert)
        self._explained = {one.id: one.suppressed for one in self._evaluator.alerts.values()}

    def list(self) -> list[Alert]:
        """Return all unsuppressed alerts that are active or ended within the last hour, newest first."""
        lasting = [
            self._shown(alert)
            for alert in self._evaluator.alerts.values()
            if alert.announced and alert.ended_at is None
        ]
        since = self._clock() - SHOWN_ENDED_S
        ended = [alert for alert in self._ended if (alert.ended_at or 0.0) >= since]
        return sorted([*lasting, *ended], key=lambda alert: -(alert.since or 0.0))

    def silences(self) -> Sequence[Silence]:
        """Return the active silences, oldest first."""
        now = self._clock()
        return [silence for silence in self._silences.values() if silence.until > now]

    def acknowledge(self, alert_id: str, actor: str) -> Alert:
        """Record that an operator is handling an alert. Raises LookupError if the alert is not active, and
        ValueError if it has already been acknowledged."""
        alert = self._evaluator.alerts.get(alert_id)
        if alert is None or alert.ended_at is not None or not alert.announced:
            raise LookupError(f"no active alert has id {alert_id!r}; list ids with: appliance alerts list")
        if alert.acknowledged_by:
            raise ValueError(f"alert {alert_id} has already been acknowledged by {alert.acknowledged_by}")
        alert.acknowledged_by, alert.acknowledged_at = actor, self._clock()
        self._log.save(alert)
        return self._shown(alert)

    def silence(self, rule: str, subject: str, for_s: float, reason: str, actor: str) -> Silence:
        """Stop sending alerts of matching rules and subjects to the receivers for a limited time. Raises
        LookupError if no rule matches, and ValueError if too many silences are active."""
        if not any(fnmatchcase(name, rule) for name in self._evaluator.rules):
            known = ", ".join(sorted(self._evaluator.rules))
            raise LookupError(f"no rule matches {rule!r}: use one of {known}")
        now = self._clock()
        self._silences = {one.id: one for one in self._silences.values() if one.until > now}
        if len(self._silences) >= MAX_SILENCES:
            raise ValueError(
                f"there are already {MAX_SILENCES} silences; end one with: appliance alerts unsilence ID"
            )
        silence = Silence(
            id=secrets.token_hex(4),
            rule=rule,
            subject=subject,
            until=now + for_s,
            reason=reason,
            created_by=actor,
            created_at=now,
        )
        self._silences[silence.id] = silence
        self._log.save_silence(silence)
        return silence

    def unsilence(self, silence_id: str) -> Silence:
        """End a silence. Raises LookupError for an unknown id."""
        silence = self._silences.pop(silence_id, None)
        if silence is None:
            raise LookupError(f"no silence has id {silence_id!r}; list ids with: appliance alerts list")
        self._log.remove_silence(silence_id)
        return silence

    def _announce(self, transition: Transition) -> None:
        raised, event = transition.alert, transition.event
        alert = self._shown(raised)
        self._log.save(raised)
        if event == "ended" and not raised.suppressed_by:
            self._ended.append(alert)
        if raised.suppressed_by:
            log.info(
                "alert %s (%s: %s) is explained by alert %s",
                alert.id,
                alert.rule,
                alert.where,
                raised.suppressed_by,
            )
        elif self._silence_of(raised) is not None:
            log.info("alert %s %s, silenced: %s", alert.id, event, alert.description)
        elif event != "suppressed":
            level = logging.WARNING if event == "raised" else logging.INFO
            log.log(
                level,
                "alert %s %s: %s: %s; likely cause: %s",
                alert.id,
                event,
                alert.rule,
                alert.description,
                alert.cause,
            )
            self._receivers.send(event, alert)

    def _shown(self, alert: Raised) -> Alert:
        shown, silence = alert_at(alert, math.inf), self._silence_of(alert)
        if silence is None:
            return shown
        state = "resolved" if shown.state == "resolved" else "silenced"
        return msgspec.structs.replace(shown, state=state, silenced_until=silence.until)

    def _silence_of(self, alert: Raised) -> Silence | None:
        """Return the silence that covers the alert: the longest-lasting one if there are several."""
        matching = [
            silence
            for silence in self.silences()
            if fnmatchcase(alert.rule, silence.rule) and fnmatchcase(alert.subject, silence.subject)
        ]
        return max(matching, key=lambda silence: silence.until, default=None)
