"""Converts audited actions, log lines and doctor findings to console rows."""

from __future__ import annotations

import msgspec

from appliance.monitoring.findings import Finding
from appliance.pages import AuditAction, LogLine
from console.source import ListRow


def audit_row(action: AuditAction) -> ListRow:
    """Return an audited action as a row. Actions not yet written to the chain have no number, so their time,
    action and target identify them."""
    params = action.params if isinstance(action.params, dict) else {}
    target = next(
        (str(params[name]) for name in ("name", "id", "request_id", "model", "peer") if params.get(name)), ""
    )
    detail = {
        "host": action.host or "",
        "parameters": _json(action.params),
        "before": _json(action.before),
        "after": _json(action.after),
        "note": action.note or "",
        "ended": action.ended_at or "",
    }
    return ListRow(
        id=f"spooled {action.at} {action.action} {target}" if action.seq is None else str(action.seq),
        at=action.began_at,
        actor=action.actor,
        subject=action.action,
        target=target,
        text=action.result or "no result recorded",
        detail=detail,
    )


def log_row(line: LogLine) -> ListRow:
    """Return a log line as a row."""
    return ListRow(
        id=str(line.number),
        at=line.at,
        level=line.level,
        actor=line.process,
        subject=line.area,
        text=line.message,
    )


def finding_row(number: int, finding: Finding) -> ListRow:
    """Return a finding as a row. `number` is its position in the list."""
    return ListRow(
        id=f"{number}/{finding.area}/{finding.subject}",
        level=finding.level,
        actor=finding.area,
        subject=finding.subject,
        text=finding.text,
        detail={"remedy": finding.remedy},
    )


def _json(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
