"""Audit and Logs: lists read from the service when their screen is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from appliance.pages import ChainReport
from console import units
from console.context import Context
from console.lines import BLANK, Line, fact_column, wrap
from console.roles import Role
from console.screens.base import Fact
from console.screens.table import TableColumn, TableView
from console.source import MAX_ROWS, ListName, ListRow, RowLevel

_NAME_WIDTH = 16
_MAX_PROBLEMS = 3
"""Maximum number of audit chain problems shown after the first one."""
_LEVEL_ROLES: dict[RowLevel, Role] = {
    "error": "bad",
    "problem": "bad",
    "critical": "bad",
    "warning": "warn",
    "ok": "good",
    "info": "dim",
    "debug": "dim",
}
_LEVEL_RANKS: dict[Role, int] = {"bad": 0, "warn": 1}


def _level_rank(row: ListRow) -> int:
    """Return a row's sort key by level: errors and problems first, then warnings, then everything else."""
    return _LEVEL_RANKS.get(_LEVEL_ROLES.get(row.level, "text"), len(_LEVEL_RANKS))


class ListView(TableView[ListRow]):
    """A screen that shows one of the service's lists."""

    def list_name(self) -> ListName:
        """Return the name of the list that the screen shows."""
        raise NotImplementedError

    def fact_names(self) -> tuple[str, str, str]:
        """Return the detail view's labels for a row's actor, subject and target."""
        raise NotImplementedError

    def lists(self) -> tuple[ListName, ...]:
        return (self.list_name(),)

    def rows(self, context: Context) -> Sequence[ListRow]:
        return context.rows_of(self.list_name(), ListRow)

    def id_of(self, row: ListRow) -> str:
        return row.id

    def describe(self, row: ListRow, context: Context, width: int) -> list[Line]:
        facts = {
            "time": units.date(row.at) if row.at is not None else "",
            "level": row.level,
            **dict(zip(self.fact_names(), (row.actor, row.subject, row.target), strict=True)),
            **row.detail,
        }
        known = [(name, text) for name, text in facts.items() if text.strip()]
        return [BLANK, *wrap(row.text, width), BLANK, *fact_column(known, width, _NAME_WIDTH)]


def _number(row: ListRow) -> int | None:
    """Return an audit row's sequence number, or None for an action waiting in the spool."""
    return int(row.id) if row.id.isdigit() else None


def _number_text(row: ListRow) -> str:
    number = _number(row)
    return "spool" if number is None else str(number)


def _number_rank(row: ListRow) -> float:
    """Return an audit row's sort key. Actions in the spool are newer than all rows in the chain."""
    number = _number(row)
    return math.inf if number is None else number


class AuditView(ListView):
    """The screen that shows the audit trail."""

    name = "audit"
    key = "9"
    title = "Audit"
    short = "Audit"
    help_text = (
        "The audit trail of operator actions, newest first. The audit chain has two rows per action: its "
        "start and its result. Each row contains the previous row's hash, so any later change is detected. "
        "The heading shows the newest hash and the number of rows proven unchanged. {verify} verifies the "
        "whole chain on the service's machine, and shows the first wrong or missing row, if any. "
        "An incident file contains the actions of its period, but not the chain."
    )
    sorted_by = "seq"
    reverse = True
    max_rows = MAX_ROWS
    empty = "no actions have been recorded"
    columns = (
        TableColumn("seq", "SEQ", 6, _number, _number_text, rank=_number_rank),
        TableColumn(
            "at", "TIME", 14, lambda r: r.at, lambda r: units.short_date(r.at), right=False, unit="time"
        ),
        TableColumn("actor", "OPERATOR", 15, lambda r: r.actor, right=False, role=lambda r: "bold"),
        TableColumn("action", "ACTION", 15, lambda r: r.subject, right=False, role=lambda r: "accent"),
        TableColumn("target", "TARGET", 16, lambda r: r.target, right=False, flexible=True),
        TableColumn(
            "result", "RESULT", 7, lambda r: r.text, right=False, flexible=True, role=lambda r: "dim"
        ),
    )
    explanations = (
        *("seq", "audit_at", "actor", "action", "audit_target", "outcome", "audit_rows"),
        *("audit_host", "audit_parameters", "audit_change", "audit_note", "audit_ended", "audit_hash"),
        "audit_chain",
    )

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        return super().hints if self.detail else (*super().hints, ("verify", "verify"))

    def list_name(self) -> ListName:
        return "audit"

    def above(self, context: Context, width: int) -> list[Line]:
        lines: list[Line] = []
        for text, role in _chain_lines(context.chain):
            lines += wrap(text, width, role)
        return lines

    def facts(self, context: Context) -> list[Fact]:
        chain = [("chain", text, role) for text, role in _chain_lines(context.chain)[:1]]
        return [*chain, *super().facts(context)]

    def fact_names(self) -> tuple[str, str, str]:
        return "operator", "action", "target"

    def title_of(self, row: ListRow) -> str:
        name = "Spooled" if _number(row) is None else f"Row {row.id}"
        return f"{name}: {row.subject} {row.target}".rstrip()

    def empty_text(self, context: Context) -> str:
        if context.incident_since is None or context.snapshot is None:
            return self.empty
        since, at = (units.short_date(one) for one in (context.incident_since, context.snapshot.at))
        return (
            f"this incident file contains no actions from its start ({since}) to the displayed time ({at}): "
            "the service recorded none in this period"
        )

    def note(self, context: Context) -> str:
        snapshot = context.snapshot
        if snapshot is None or snapshot.audit_rows is None:
            return ""
        if context.incident_since is not None:
            rows = units.counted(snapshot.audit_rows, "row")
            return f"in this file: since {units.clock(context.incident_since)} · chain of the service: {rows}"
        # Before the first action, the head hash is all zeros.
        head = f" · head {snapshot.audit_head[:12]}" if snapshot.audit_head and snapshot.audit_rows else ""
        anchored = units.count(snapshot.audit_recorded_rows)
        return f"chain: {units.counted(snapshot.audit_rows, 'row')}, {anchored} anchored{head}"


def _chain_lines(chain: ChainReport | str | None) -> list[tuple[str, Role]]:
    """Describe the outcome of an audit chain verification as texts with style roles. The first text is the
    overall result."""
    if chain is None:
        return []
    if isinstance(chain, str):
        return [(chain, "warn")]
    at = units.short_date(chain.at)
    if chain.ok:
        heads = f"{chain.heads:,} recorded head{'' if chain.heads == 1 else 's'}"
        found = f"chain ok at {at}: {chain.rows:,} rows, checked against {heads}"
        lines: list[tuple[str, Role]] = [(found, "good")]
    else:
        place = "" if chain.broken_seq is None else f" at row {chain.broken_seq:,}"
        first, *more = chain.problems
        first = first.removeprefix(f"row {chain.broken_seq}: ")
        lines = [
            (f"chain BROKEN{place}, found at {at}: {first}", "bad"),
            *((one, "bad") for one in more[:_MAX_PROBLEMS]),
        ]
        if len(more) > _MAX_PROBLEMS:
            lines.append((f"and {len(more) - _MAX_PROBLEMS:,} more problems", "bad"))
    return [*lines, *((one, "dim") for one in chain.notes)]


class LogsView(ListView):
    """The screen that shows the log, the settings with their sources, and the findings of `appliance
    doctor`."""

    name = "logs"
    key = "0"
    title = "Logs"
    short = "Logs"
    help_text = (
        "The newest log lines of the core, the front processes and the replicas. {variant} switches to the "
        "current settings with their sources, and then to the findings of appliance doctor."
    )
    variants = ("logs", "settings", "findings")
    max_rows = MAX_ROWS
    sorted_by = "at"
    reverse = True
    empty = "no rows"
    columns: tuple[TableColumn, ...] = (
        TableColumn(
            "at", "TIME", 14, lambda r: r.at, lambda r: units.short_date(r.at), right=False, unit="time"
        ),
        TableColumn(
            "level",
            "LEVEL",
            8,
            lambda r: r.level,
            right=False,
            role=lambda r: _LEVEL_ROLES.get(r.level, "text"),
            rank=_level_rank,
        ),
        TableColumn("process", "PROCESS", 18, lambda r: r.actor, right=False, role=lambda r: "bold"),
        TableColumn("area", "AREA", 14, lambda r: r.subject, right=False, drop=1, role=lambda r: "dim"),
        TableColumn("message", "MESSAGE", 30, lambda r: r.text, right=False, flexible=True),
    )
    _settings = (
        TableColumn("subject", "SETTING", 36, lambda r: r.subject, right=False, role=lambda r: "bold"),
        TableColumn("text", "VALUE", 18, lambda r: r.text, right=False, flexible=True),
        TableColumn(
            "actor", "SOURCE", 20, lambda r: r.actor, right=False, flexible=True, role=lambda r: "dim"
        ),
    )
    _findings = (
        TableColumn(
            "level",
            "LEVEL",
            8,
            lambda r: r.level,
            right=False,
            role=lambda r: _LEVEL_ROLES.get(r.level, "text"),
            rank=_level_rank,
        ),
        TableColumn("area", "AREA", 11, lambda r: r.actor, right=False),
        TableColumn("subject", "SUBJECT", 16, lambda r: r.subject, right=False, role=lambda r: "bold"),
        TableColumn("text", "FINDING", 30, lambda r: r.text, right=False, flexible=True),
    )
    explanations = (
        *("at", "level", "process", "area", "message"),
        *("setting", "setting_value", "setting_source", "finding"),
    )

    def list_name(self) -> ListName:
        return self.variant  # type: ignore[return-value]

    def fact_names(self) -> tuple[str, str, str]:
        if self.variant == "logs":
            return "process", "area", "target"
        return (
            ("source", "setting", "target") if self.variant == "settings" else ("area", "subject", "target")
        )

    def title_of(self, row: ListRow) -> str:
        return f"{row.actor}: {row.subject}" if self.variant == "logs" else row.subject

    def next_variant(self) -> None:
        super().next_variant()
        kind = type(self)
        self.columns = {"logs": kind.columns, "settings": kind._settings, "findings": kind._findings}[
            self.variant
        ]
        self.title = {"logs": "Logs", "settings": "Settings", "findings": "Doctor's findings"}[self.variant]
        self.sorted_by, self.reverse = self.columns[0].name, self.variant == "logs"
        self.max_rows = MAX_ROWS if self.variant == "logs" else 0
        self.filter, self.detail = "", ""
        self._clear_marks()
        self.cursor, self._index = "", 0
