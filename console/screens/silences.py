"""Silences: alerts that operators have muted until a given time."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.actions import TargetKind
from appliance.protocol import Silence
from console import units
from console.context import Context
from console.fingerprints import silenced_alerts
from console.lines import BLANK, Line, fact_lines
from console.screens.table import TableColumn, TableView
from console.source import ListName


class SilencesView(TableView[Silence]):
    """The screen that lists active silences."""

    name = "silences"
    key = "8"
    title = "Silences"
    short = "Alerts"
    alternate = "alerts"
    help_text = (
        "The active silences. Silenced alerts are still listed and recorded, but not sent to receivers. "
        "Press {actions} to end the selected silence early, and {variant} to show the alerts."
    )
    target: TargetKind = "silence"
    sorted_by = "until"
    empty = "no silences are active"
    columns = (
        TableColumn("id", "SILENCE", 9, lambda s: s.id, right=False, drop=4),
        TableColumn("rule", "RULE", 18, lambda s: s.rule, right=False, role=lambda s: "bold"),
        TableColumn("subject", "WHERE", 14, lambda s: s.subject, right=False),
        TableColumn(
            "until", "UNTIL", 19, lambda s: s.until, lambda s: units.date(s.until), right=False, unit="time"
        ),
        TableColumn("created_by", "SILENCED BY", 14, lambda s: s.created_by, right=False),
        TableColumn(
            "created_at",
            "SINCE",
            19,
            lambda s: s.created_at,
            lambda s: units.date(s.created_at),
            right=False,
            drop=5,
            unit="time",
        ),
        TableColumn("reason", "REASON", 12, lambda s: s.reason, right=False, flexible=True, drop=3),
    )
    explanations = (
        *("silence_id", "silence_rule", "silence_subject", "until", "created_by", "created_at"),
        *("silence_reason", "silence_ends_in", "silenced_alerts"),
    )

    def lists(self) -> tuple[ListName, ...]:
        return ("silences",)

    def rows(self, context: Context) -> Sequence[Silence]:
        return context.rows_of("silences", Silence)

    def id_of(self, row: Silence) -> str:
        return row.id

    def title_of(self, row: Silence) -> str:
        return f"Silence {row.id}"

    def describe(self, row: Silence, context: Context, width: int) -> list[Line]:
        snapshot = context.snapshot
        alerts = [] if snapshot is None else silenced_alerts(row, snapshot)
        facts = [
            ("rule", row.rule),
            ("where", row.subject),
            ("until", units.date(row.until)),
            ("ends in", units.seconds(None if snapshot is None else max(0.0, row.until - snapshot.at))),
            ("silenced by", row.created_by or units.UNKNOWN),
            ("since", units.date(row.created_at)),
        ]
        texts = (
            ("reason", row.reason or "none given"),
            (
                "silenced alerts",
                ", ".join(units.about(one.where, one.description) for one in alerts) or "none now",
            ),
        )
        return [*fact_lines(texts, width), BLANK, *fact_lines(facts, width)]
