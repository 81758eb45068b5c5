"""Helpers that read and forge a database's audit trail in tests."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from store import audit
from store.audit import Actor, AuditRow
from store.control import ControlStore
from store.control_schema import CONTROL
from store.database import reading
from store.heads import read_key

ROOT = Actor("uid:0", "box")


def read_audit(path: Path) -> list[AuditRow]:
    """Return the audit rows, oldest first, through a read-only connection."""
    with reading(path, CONTROL) as connection:
        return list(audit.all_rows(connection))


def forge(folder: Path, sql: str) -> None:
    """Execute statements on `control.db` after dropping the triggers that protect the audit rows."""
    with closing(sqlite3.connect(folder / "control.db", isolation_level=None)) as connection:
        connection.executescript(
            "DROP TRIGGER IF EXISTS audit_rows_do_not_change; DROP TRIGGER IF EXISTS audit_rows_do_not_go;"
            + sql
        )


def rewrite(folder: Path, seq: int) -> None:
    """Forge a row's actor, as an attacker who runs as the service's user could. All later hashes are
    recomputed, and the recorded chain heads are replaced with a newly signed one."""
    chain = read_audit(folder / "control.db")
    forge(folder, "DELETE FROM audit; DELETE FROM sqlite_sequence WHERE name = 'audit'")
    with closing(sqlite3.connect(folder / "control.db", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for row in chain:
            entry = audit.Entry(**{name: getattr(row, name) for name in audit.Entry._fields})
            newest = audit.append(connection, entry._replace(actor="uid:9") if row.seq == seq else entry)
        connection.execute("COMMIT")
    line = read_key(folder / "audit.key").sign_head(newest, audit.utc_now()).line
    (folder / "audit.heads").write_text(line + "\n")


def announced(control: ControlStore, action: str, **params: object) -> Actor:
    """Record an action's intent. Returns the actor with which to record the action's result."""
    acting, recorded = control.trail.intend(ROOT, action, params)
    recorded.result(60)
    return acting


def fill(folder: Path) -> None:
    """Create a database with a few rows in its audit trail."""
    control = ControlStore(folder / "control.db")
    control.start()
    for number in range(5):
        control.create_tenant(actor=ROOT, name=f"t{number}", changes={}).result(60)
    control.close()
