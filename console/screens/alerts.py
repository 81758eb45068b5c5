"""Alerts: conditions that need attention, with likely causes and recommended next steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.actions import Action, TargetKind
from appliance.protocol import Silence
from appliance.quantities import of_measure
from appliance.snapshot import Alert
from console import units
from console.context import Context
from console.keys import key_of
from console.lines import BLANK, Line, fact_lines
from console.screens.panels import SEVERITY_ROLES, STATE_ROLES
from console.screens.table import TableColumn, TableView
from console.source import ListName

_ORDER = ("critical", "warning", "info")


class ListedAlert(NamedTuple):
    """A row of the screen: an alert, and the time of its snapshot."""

    alert: Alert
    now: float
    """Time of the snapshot, in unix seconds."""

    @property
    def id(self) -> str:
        """The id of the alert."""
        return self.alert.id

    @property
    def age_s(self) -> float | None:
        """How long the alert's condition has held or, if the condition has ended, how long it held, in
        seconds."""
        if self.alert.since is None:
            return None
        return max(0.0, (self.now if self.alert.ended_at is None else self.alert.ended_at) - self.alert.since)


def _rank(row: ListedAlert) -> int:
    """Return an alert's sort key: by severity, with resolved alerts last."""
    alert = row.alert
    return _ORDER.index(alert.severity) + (len(_ORDER) if alert.state == "resolved" else 0)


class AlertsView(TableView[ListedAlert]):
    """The screen that lists all alerts."""

    name = "alerts"
    key = "8"
    title = "Alerts"
    short = "Alerts"
    alternate = "silences"
    help_text = (
        "Alerts with their likely causes and next steps. Alerts caused by another alert are not listed; the "
        "alert that caused them shows how many there are. Press {variant} to see the silences."
    )
    target: TargetKind = "alert"
    sorted_by = "severity"
    empty = "✓ no alerts"
    columns = (
        TableColumn(
            "severity",
            "SEVERITY",
            10,
            lambda r: r.alert.severity,
            lambda r: {"critical": "‼ critical", "warning": "! warning", "info": "i info"}[r.alert.severity],
            right=False,
            role=lambda r: SEVERITY_ROLES[r.alert.severity],
            rank=_rank,
        ),
        TableColumn(
            "state",
            "STATE",
            12,
            lambda r: r.alert.state,
            right=False,
            role=lambda r: STATE_ROLES[r.alert.state],
        ),
        TableColumn("age_s", "AGE", 6, lambda r: r.age_s, lambda r: units.seconds(r.age_s), unit="s"),
        TableColumn(
            "since",
            "SINCE",
            14,
            lambda r: r.alert.since,
            lambda r: units.short_date(r.alert.since),
            right=False,
            drop=2,
            unit="time",
        ),
        TableColumn(
            "where", "WHERE", 18, lambda r: r.alert.where, right=False, drop=4, role=lambda r: "bold"
        ),
        TableColumn(
            "description", "DESCRIPTION", 54, lambda r: r.alert.description, right=False, flexible=True
        ),
        TableColumn("rule", "RULE", 18, lambda r: r.alert.rule, right=False, drop=5, role=lambda r: "dim"),
        TableColumn(
            "suppressed",
            "ALSO",
            5,
            lambda r: r.alert.suppressed,
            lambda r: f"+{r.alert.suppressed}" if r.alert.suppressed else "",
            drop=3,
        ),
    )
    explanations = (
        *("severity", "alert_state", "alert_age", "since", "where", "description", "rule", "suppressed"),
        *("cause", "remedy", "alert_value", "alert_ended", "silenced_until"),
    )

    def rows(self, context: Context) -> Sequence[ListedAlert]:
        snapshot = context.snapshot
        return [] if snapshot is None else [ListedAlert(one, snapshot.at) for one in snapshot.alerts]

    def id_of(self, row: ListedAlert) -> str:
        return row.id

    def lists(self) -> tuple[ListName, ...]:
        return ("silences",)

    def required_lists(self) -> tuple[ListName, ...]:
        return ()

    def note(self, context: Context) -> str:
        silences = len(context.rows_of("silences", Silence))
        if not silences:
            return ""
        key = key_of(context.keys, "variant")
        return f"{silences} active silence{'' if silences == 1 else 's'}" + (
            f" ({key} to show)" if key else ""
        )

    def accepts(self, action: Action) -> bool:
        return action.target in ("alert", "rule")

    def targets(self, action: Action, context: Context) -> list[str]:
        """Return the selected alerts' ids or, for an action on rules, their rule names."""
        selected = set(self.selected(context))
        alerts = [row for row in self.ordered(context) if row.id in selected]
        if action.target == "rule":
            return list(dict.fromkeys(row.alert.rule for row in alerts))
        return [row.id for row in alerts]

    def has_target(self, name: str, context: Context) -> bool:
        return any(name in (row.id, row.alert.rule) for row in self.rows(context))

    def title_of(self, row: ListedAlert) -> str:
        return units.about(row.alert.where, row.alert.description)

    def describe(self, row: ListedAlert, context: Context, width: int) -> list[Line]:
        one = row.alert
        held = "lasted " if one.ended_at is not None else "for "
        facts = [
            ("rule", one.rule),
            ("severity", one.severity),
            ("state", one.state + (f" by {one.acknowledged_by}" if one.acknowledged_by else "")),
            ("where", one.where),
            ("description", one.description),
            ("since", f"{units.date(one.since)}, {held}{units.seconds(row.age_s)}"),
            ("explains", f"{one.suppressed} other alert{'' if one.suppressed == 1 else 's'}"),
        ]
        if one.threshold is not None:  # Rules on text values have no threshold.
            value = units.UNKNOWN if one.value is None else of_measure(one.value, one.unit)
            facts.append(("value", f"{value} when raised (threshold {of_measure(one.threshold, one.unit)})"))
        for name, at in (("ended", one.ended_at), ("silenced until", one.silenced_until)):
            if at is not None:
                facts.append((name, units.date(at)))
        advice = (("likely cause", one.cause or units.UNKNOWN), ("next step", one.remedy or units.UNKNOWN))
        return [*fact_lines(advice, width), BLANK, *fact_lines(facts, width)]
