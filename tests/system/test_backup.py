"""Tests of backups of a running service, and of a service that starts from a backup."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from store.contents import read_contents
from store.database import integrity_problems
from store.evidence import examine_folder
from tests.system.service import Service, service
from tests.system.traffic import Load, ended

pytestmark = pytest.mark.system

RESTORED = ("control.db", "history.db", "contents.db", "audit.heads", "audit.key")


def test_a_service_starts_from_a_backup_made_under_load(tmp_path: Path) -> None:
    with service() as running:
        running.tenant("acme", log_policy="full")
        key = running.key("k", "acme")
        loads = [Load(running, key) for _ in range(3)]
        for load in loads:
            load.start()
        running.wait_until(lambda: len(ended(running)) > 5, 60, "traffic")
        running.wait_until(lambda: loads[0].request_ids, 60, "an answer to the first client")
        old = loads[0].request_ids[0]
        running.wait_until(lambda: old in ended(running) and has_texts(running, old), 60, "its texts")
        backups = [tmp_path / "first", tmp_path / "second.tar.gz"]
        done = [running.command("backup", str(backup)) for backup in backups]
        for load in loads:
            load.end()
        served = [request_id for load in loads for request_id in load.request_ids]
        running.wait_until(
            lambda: ended(running) >= set(served),
            60,
            "rows",
        )
        without = running.command("backup", str(tmp_path / "without"), "--no-contents")
        assert {file["name"] for file in without["files"]} == {*RESTORED} - {"contents.db"}
        assert not (tmp_path / "without" / "contents.db").exists()
        begun = running.command("audit", "list", "--action", "backup.begin")
        reported = running.command("audit", "list", "--action", "backup.end")
        for taken in (begun, reported):
            assert [action["params"]["path"] for action in taken] == [
                *map(str, backups),
                str(tmp_path / "without"),
            ]
            assert {action["result"] for action in taken} == {"ok"}
        digests = [tmp_path / "first" / "backup.json", backups[1], tmp_path / "without" / "backup.json"]
        for action, report, path in zip(reported, [*done, without], digests, strict=True):
            assert action["params"]["rows"] == report["audit_rows"]
            assert action["params"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        # A backup that fails is recorded as failed.
        with pytest.raises(AssertionError, match="already exists"):
            running.command("backup", str(tmp_path / "second.tar.gz"))
        failed = running.command("audit", "list", "--action", "backup.end")[-1]
        assert failed["result"].startswith(f"failed: {backups[1]} already exists")

    with tarfile.open(backups[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    folders = [tmp_path / "first", tmp_path / "second"]
    counts = []
    for folder, report in zip(folders, done, strict=True):
        assert {*RESTORED} == {file["name"] for file in report["files"]}
        assert (folder / "audit.key").stat().st_mode & 0o777 == 0o600
        assert all(integrity_problems(folder / name) == [] for name in RESTORED if name.endswith(".db"))
        found = examine_folder(folder)
        assert found.ok and found.verdict.rows == report["audit_rows"]
        counts.append(count(folder / "history.db", "requests"))
    # Each backup contains the state at the time when it was made, so even the last backup lacks some of the
    # later traffic.
    assert 5 < counts[0] <= counts[1] <= len(served)
    assert done[0]["audit_rows"] < done[1]["audit_rows"]

    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    for name in RESTORED:
        shutil.copy2(folders[1] / name, state)
    with service("--state-dir", str(state)) as restored:
        restored.state_dir = state
        with restored.client().with_options(api_key=key) as client:
            answer: Any = client.completions.create(model="demo", prompt="x = ", max_tokens=4)
        request_id = answer.id.removeprefix("cmpl-")
        restored.wait_until(lambda: request_id in ended(restored), 60, "its row")
        assert [row["tenant"] for row in restored.rows(request_id=request_id)] == ["acme"]
        known = ended(restored)
        assert len(known & set(served)) == counts[1]
        assert old in known
        assert restored.command("requests", "show", old)["texts"]
        found = examine_folder(state)
        assert found.ok and found.verdict.rows > done[1]["audit_rows"]
    # The requests that were open at the time of the backup are closed, and no row is incomplete.
    with closing(sqlite3.connect(state / "history.db")) as database:
        assert database.execute("SELECT count(*) FROM requests WHERE state = 'open'").fetchone() == (0,)


def has_texts(running: Service, request_id: str) -> bool:
    """Return whether the request's prompt and answer have been written to `contents.db`."""
    return bool(read_contents(running.state_dir / "contents.db", request_id))


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
