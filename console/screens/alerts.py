"""Alerts: conditions that need attention, with their likely causes and the recommended next steps."""

from __future__ import annotations

from collections.abc import Sequence

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


def _rank(alert: Alert) -> int:
    """Return the sort key of an alert: alerts are ordered by severity, and all ended alerts come last."""
    return _ORDER.index(alert.severity) + (len(_ORDER) if alert.state == "resolved" else 0)


class AlertsView(TableView[Alert]):
    """The screen with all alerts."""

    name = "alerts"
    key = "8"
    title = "Alerts"
    short = "Alerts"
    alternate = "silences"
    help_text = (
        "Alerts with their likely cause and the next step. Alerts that are a consequence of another alert "
        "are not listed; that alert shows their number. Press {variant} to see the silences."
    )
    target: TargetKind = "alert"
    sorted_by = "severity"
    empty = "✓ no alerts"
    columns = (
        TableColumn(
            "severity",
            "SEVERITY",
            10,
            lambda a: a.severity,
            lambda a: {"critical": "‼ critical", "warning": "! warning", "info": "i info"}[a.severity],
            right=False,
            role=lambda a: SEVERITY_ROLES[a.severity],
            rank=_rank,
        ),
        TableColumn(
            "state", "STATE", 12, lambda a: a.state, right=False, role=lambda a: STATE_ROLES[a.state]
        ),
        TableColumn(
            "since",
            "SINCE",
            8,
            lambda a: a.since,
            lambda a: units.clock(a.since),
            right=False,
            drop=2,
            unit="time",
        ),
        TableColumn("where", "WHERE", 18, lambda a: a.where, right=False, drop=4, role=lambda a: "bold"),
        TableColumn("description", "DESCRIPTION", 54, lambda a: a.description, right=False, flexible=True),
        TableColumn("rule", "RULE", 18, lambda a: a.rule, right=False, drop=5, role=lambda a: "dim"),
        TableColumn(
            "suppressed",
            "ALSO",
            5,
            lambda a: a.suppressed,
            lambda a: f"+{a.suppressed}" if a.suppressed else "",
            drop=3,
        ),
    )
    explanations = (
        *("severity", "alert_state", "since", "where", "description", "rule", "suppressed"),
        *("cause", "remedy", "alert_value", "alert_ended", "silenced_until"),
    )

    def rows(self, context: Context) -> Sequence[Alert]:
        return context.snapshot.alerts if context.snapshot else []

    def id_of(self, row: Alert) -> str:
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
        return super().accepts(action) and action.name != "alerts.unsilence"

    def targets(self, action: Action, context: Context) -> list[str]:
        """Return the ids of the selected alerts, or the names of their rules for an action on rules."""
        selected = set(self.selected(context))
        alerts = [row for row in self.ordered(context) if row.id in selected]
        if action.named_by == "rule":
            return list(dict.fromkeys(row.rule for row in alerts))
        return [row.id for row in alerts]

    def has_target(self, name: str, context: Context) -> bool:
        return any(name in (row.id, row.rule) for row in self.rows(context))

    def title_of(self, row: Alert) -> str:
        return units.about(row.where, row.description)

    def describe(self, row: Alert, context: Context, width: int) -> list[Line]:
        facts = [
            ("rule", row.rule),
            ("severity", row.severity),
            ("state", row.state + (f" by {row.acknowledged_by}" if row.acknowledged_by else "")),
            ("where", row.where),
            ("description", row.description),
            ("since", units.clock(row.since)),
            ("explains", f"{row.suppressed} other alert{'' if row.suppressed == 1 else 's'}"),
        ]
        if row.threshold is not None:  # rules that check text have no threshold
            value = units.UNKNOWN if row.value is None else of_measure(row.value, row.unit)
            facts.append(("value", f"{value} when raised (threshold {of_measure(row.threshold, row.unit)})"))
        for name, at in (("ended", row.ended_at), ("silenced until", row.silenced_until)):
            if at is not None:
                facts.append((name, units.clock(at)))
        advice = (("likely cause", row.cause or units.UNKNOWN), ("next step", row.remedy or units.UNKNOWN))
        return [*fact_lines(advice, width), BLANK, *fact_lines(facts, width)]
