"""Checks the databases. Each database is opened read-only and only briefly, because a stopping service cannot
leave SQLite's WAL mode while another process has the database open."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from appliance.monitoring.findings import Finding
from appliance.ownership import UntrustedError, check_database, trusted_state
from appliance.quantities import of_bytes
from store.control_schema import CONTROL
from store.database import open_readonly
from store.errors import StoreError
from store.evidence import AUDIT_FILES, examine_folder
from store.migrations import Schema
from store.requests import RequestFilter, RequestReader
from store.schemas import CONTENTS, HISTORY


def databases(state_dir: Path, run_dir: Path, running: bool) -> Iterator[Finding]:
    """Check the databases (owners, pages, schema versions, sizes) and the audit chain. Look for open requests
    in the request log. Files that an untrusted user could have created are not opened."""
    try:
        uids = _owners(state_dir, run_dir)
    except UntrustedError as error:
        yield _refused("state directory", error)
        return
    for name, schema in (("control.db", CONTROL), ("history.db", HISTORY), ("contents.db", CONTENTS)):
        path = state_dir / name
        try:
            for file in AUDIT_FILES if schema is CONTROL else (name,):
                check_database(state_dir / file, uids)
            path.open("rb").close()
        except UntrustedError as error:
            yield _refused(name, error)
            continue
        except PermissionError:
            yield Finding(
                area="databases",
                subject=name,
                level="warning",
                text=f"{path} cannot be read by uid {os.geteuid()}",
                remedy="run the doctor as the service's user, or as root",
            )
            continue
        except OSError:
            yield Finding(
                area="databases",
                subject=name,
                level="problem" if running else "ok",
                text=f"{path} does not exist" + ("" if running else ": it will be created on first start"),
                remedy="wait: the service restores the file within seconds; if it does not, 'appliance "
                "status' shows the reason"
                if running
                else "",
            )
            continue
        try:
            sound = _soundness(path, schema)
            yield sound
            if sound.level == "ok" and schema is CONTROL:
                yield _audit(state_dir)
            elif sound.level == "ok" and schema is HISTORY:
                yield from _requests(path, running)
        except StoreError as error:
            yield _refused(name, error)


def _owners(state_dir: Path, run_dir: Path) -> frozenset[int]:
    """Return the users who may own the databases. The owner of an untrusted run directory is left out,
    because another finding reports that directory."""
    try:
        return trusted_state(state_dir, run_dir)
    except UntrustedError:
        return trusted_state(state_dir, None)


def _soundness(path: Path, schema: Schema) -> Finding:
    """Check a database file for damage. Raises StoreError if it cannot be opened."""
    connection = open_readonly(path)
    try:
        complaints = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    except sqlite3.Error as error:
        complaints, version, mode = [str(error)], 0, "?"
    finally:
        connection.close()
    if complaints != ["ok"]:
        return _broken(
            path.name,
            f"{path} is damaged: {'; '.join(complaints)}",
            "stop the service, move the file and its -wal file away, then restore a backup or recover "
            "the remaining data with: sqlite3 FILE .recover",
        )
    known = len(schema.migrations)
    if version > known:
        return _broken(
            path.name,
            f"{path} has schema version {version}, but this version of Appliance supports only {known}",
            "install the version of Appliance that wrote the file",
        )
    size = sum(file.stat().st_size for file in (path, path.with_name(path.name + "-wal")) if file.exists())
    upgrade = "" if version == known else f" (the next start upgrades it to {known})"
    return Finding(
        area="databases",
        subject=path.name,
        level="ok",
        text=f"{path} is intact: schema version {version}{upgrade}, {of_bytes(size)}, journal mode {mode}",
    )


def _audit(state_dir: Path) -> Finding:
    findings = examine_folder(state_dir)
    head = findings.verdict.head
    if findings.ok:
        return Finding(
            area="databases",
            subject="audit chain",
            level="ok",
            text=f"the audit chain is complete and unchanged: {findings.verdict.rows:,} rows, head "
            f"{head.hash[:16]}, checked against {findings.heads:,} recorded heads",
        )
    return Finding(
        area="databases",
        subject="audit chain",
        level="problem",
        text=f"the audit chain is incomplete or was changed: {findings.problems[0]}",
        remedy="keep the files as evidence, and show the details with: appliance audit verify",
    )


def _requests(path: Path, running: bool) -> Iterator[Finding]:
    reader = RequestReader(path)
    if twice := reader.double_ends():
        yield Finding(
            area="databases",
            subject="request log",
            level="problem",
            text=f"{twice:,} requests were recorded as ended twice, which is a bug in the service",
            remedy="report the bug and include these rows: SELECT * FROM requests WHERE double_ends > 0",
        )
    if not running and (left := reader.query(RequestFilter(state="open"), 1)):
        yield Finding(
            area="databases",
            subject="request log",
            level="warning",
            text="the request log has open requests although no service is running (for example "
            f"{left[0].request_id})",
            remedy="none needed: the next start marks them as interrupted",
        )


def _refused(subject: str, error: StoreError | UntrustedError) -> Finding:
    """Return a finding about an unusable file."""
    return _broken(subject, error.description, error.remedy)


def _broken(subject: str, text: str, remedy: str) -> Finding:
    return Finding(area="databases", subject=subject, level="problem", text=text, remedy=remedy)
