"""Reads the audit trail of a database in tests."""

from __future__ import annotations

from pathlib import Path

from store import audit
from store.audit import AuditRow
from store.database import reading
from store.schemas import CONTROL


def read_audit(path: Path, after: int = 0) -> list[AuditRow]:
    """Return the audit rows with a seq above `after`, oldest first, through a read-only connection."""
    with reading(path, CONTROL) as connection:
        return [row for row in audit.all_rows(connection) if row.seq > after]
