"""Tests of a real service's audit trail and request log. Tampering must be detected, and auditors with
read-only permission must be able to read both. On a full disk, the service must continue to run and to record
actions."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from store import audit
from store.audit import AuditRow, Entry
from store.heads import SigningKey, read_key
from tests.system.service import Service, service
from tests.system.traffic import Load, ended, verify

pytestmark = pytest.mark.system

AUDITOR, AUDITORS = 4401, 4400
SQL = "SELECT request_id, status, generated_tokens FROM requests WHERE state = 'ended' ORDER BY sequence"


class Record(NamedTuple):
    """The files that a stopped service left behind, and the data that was read while the service ran."""

    state_dir: Path
    log: Path
    request_ids: list[str]
    read_while_running: dict[str, str]
    verified_while_running: Any


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    with service() as running:
        with running.client() as client:
            # Without `ignore_eos`, a sampled answer may end before its fourth token.
            answers = [
                client.completions.create(
                    model="demo", prompt="x = ", max_tokens=4, extra_body={"ignore_eos": True}
                )
                for _ in range(3)
            ]
        ids = [answer.id.removeprefix("cmpl-") for answer in answers]
        operate(running)
        running.wait_until(lambda: len(ended(running)) == 3, 60, "the rows of the requests")
        let_auditors_read(running)
        found = {how: read_as_auditor(running.state_dir, how) for how in ("module", "program")}
        verified = verify(running.state_dir)
        assert running.stop() == 0
        let_auditors_read(running)
        yield Record(running.state_dir, running.log_path, ids, found, verified)


def operate(running: Service) -> None:
    """Perform some operator actions. They result in 12 audit rows."""
    running.command("tenants", "create", "acme", "--weight", "2")
    running.command("tenants", "set", "acme", "--weight", "3")
    key = running.command("keys", "create", "--name", "ci", "--tenant", "acme")
    running.command("drain", "--yes", "--model", "demo", "--grace", "1s", "--no-wait")
    running.command("resume", "--model", "demo")
    running.command("keys", "revoke", "--yes", key["id"])


def let_auditors_read(running: Service) -> None:
    """Grant read access as an administrator would: through a group that owns the files and may read the
    folder."""
    running.folder.chmod(0o755)
    running.state_dir.chmod(0o750)
    if os.geteuid() == 0:
        for path in (running.state_dir, *running.state_dir.iterdir()):
            os.chown(path, -1, AUDITORS)


def read_as_auditor(state_dir: Path, how: str) -> str:
    """Return the rows as read by a user with read-only permission. The rows are read with SQLite, either
    through Python's module or with SQLite's command-line program."""
    become = f"os.setgroups([]); os.setgid({AUDITORS}); os.setuid({AUDITOR})" if os.geteuid() == 0 else "pass"
    if how == "program":
        program = shutil.which("sqlite3")
        if program is None:
            return "needs the program sqlite3"
        words = ["sqlite3", "-readonly", "-list"]
        act = f"os.execv({program!r}, [*{words!r}, sys.argv[1] + '/history.db', {SQL!r}])"
    else:
        act = (
            "database = sqlite3.connect('file:' + sys.argv[1] + '/history.db?mode=ro', uri=True)\n"
            f"for row in database.execute({SQL!r}): print(*row, sep='|')\n"
            "try: open(sys.argv[1] + '/history.db', 'ab'); print('may write')\n"
            "except OSError: pass\n"
            "try: open(sys.argv[1] + '/anything', 'w'); print('may write')\n"
            "except OSError: pass\n"
        )
    source = f"import os, sqlite3, sys\n{become}\n{act}"
    command = [sys.executable, "-I", "-S", "-c", source, str(state_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ── an auditor ──


@pytest.mark.parametrize("how", ["module", "program"])
def test_an_auditor_reads_the_request_log_without_write_permission(record: Record, how: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to act as a user without write permission")
    if how == "program" and shutil.which("sqlite3") is None:
        pytest.skip("needs the program sqlite3")
    expected = [f"{request_id}|200|4" for request_id in record.request_ids]
    assert record.read_while_running[how].splitlines() == expected
    assert read_as_auditor(record.state_dir, how).splitlines() == expected


def test_every_action_is_recorded_with_its_actor_and_the_old_and_new_values(record: Record) -> None:
    with closing(sqlite3.connect(f"file:{record.state_dir}/control.db?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        actions = [dict(row) for row in database.execute("SELECT * FROM audit_actions ORDER BY seq")]
    assert [action["action"] for action in actions] == [
        *("tenants.create", "tenants.set", "keys.create", "drain", "resume", "keys.revoke")
    ]
    assert {action["actor"] for action in actions} == {f"uid:{os.geteuid()}"}
    assert {action["host"] for action in actions} == {os.uname().nodename}
    assert {action["result"] for action in actions} == {"ok"}
    assert all(action["result_seq"] > action["seq"] for action in actions), "intents come before results"
    changed, drained = actions[1], actions[3]
    assert (json.loads(changed["before"]), json.loads(changed["after"])) == ({"weight": 2.0}, {"weight": 3.0})
    assert json.loads(drained["params"])["grace_s"] == 1.0
    assert json.loads(drained["before"]) == "in service" and "drain" in json.loads(drained["after"])


# ── tampering ──


def test_the_audit_trail_is_complete_while_the_service_runs_and_afterwards(record: Record) -> None:
    for found in (record.verified_while_running, verify(record.state_dir, "--heads", str(record.log))):
        assert (found["code"], found["ok"], found["rows"]) == (0, True, 12)
    assert found["confirmed_seq"] == 12, "after a clean stop, the heads must confirm every row"


@pytest.fixture
def copy(record: Record, tmp_path: Path) -> Path:
    """Return a copy of the files for a test to tamper with."""
    return Path(shutil.copytree(record.state_dir, tmp_path / "state"))


@contextmanager
def unlocked(state_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the audit chain's database and drop its triggers, as an attacker with write access to the file
    could."""
    with closing(sqlite3.connect(state_dir / "control.db", isolation_level=None)) as database:
        for trigger in ("audit_rows_do_not_change", "audit_rows_do_not_go"):
            database.execute(f"DROP TRIGGER {trigger}")
        yield database


def rewrite(state_dir: Path, seq: int, **changes: str) -> list[AuditRow]:
    """Change a row and recompute all later hashes. Returns the new chain."""
    with unlocked(state_dir) as database:
        chain = list(audit.all_rows(database))
        database.execute("DELETE FROM audit")
        database.execute("DELETE FROM sqlite_sequence WHERE name = 'audit'")
        database.execute("BEGIN")
        for row in chain:
            entry = Entry(**{name: getattr(row, name) for name in Entry._fields})
            audit.append(database, entry._replace(**changes) if row.seq == seq else entry)
        database.execute("COMMIT")
        return list(audit.all_rows(database))


def test_a_rewrite_with_newly_signed_heads_is_detected_with_the_heads_in_the_journal(
    copy: Path, record: Record
) -> None:
    """The forger has the same permissions as the service itself. Only chain heads that are stored out of the
    forger's reach, here in the journal, reveal the change."""
    forged = rewrite(copy, 6, after='{"name":"somebody else"}')
    key: SigningKey = read_key(copy / "audit.key")
    line = key.sign_head(audit.Head(forged[-1].seq, forged[-1].hash), forged[-1].at).line
    (copy / "audit.heads").write_text(line + "\n")
    assert verify(copy)["code"] == 0
    found = verify(copy, "--heads", str(record.log))
    assert found["code"] == 1 and found["broken_seq"] >= 6 and "rewritten" in found["problems"][0]


# ── a full disk ──


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk completely."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


def refused(running: Service, *words: str) -> str:
    """Return the error message of a failing command."""
    done = running.run(*words)
    assert done.returncode == 1, done
    return done.stderr


def actions(running: Service) -> list[tuple[str, str]]:
    return [(row["action"], row["result"]) for row in running.command("audit", "list", "--limit", "1000")]


def test_a_full_disk_stops_neither_the_service_nor_the_audit_trail(small_disk: Path) -> None:
    with service("--state-dir", str(small_disk)) as running:
        running.state_dir = small_disk
        running.command("tenants", "create", "acme")
        load = Load(running)
        load.start()
        filler = fill(small_disk)
        failing = running.wait_until(lambda: sick(running), 60, "the databases to report the failure")
        assert "full" in failing["last_error"]

        # The service continues to answer requests. If it cannot perform an action, it refuses the action with
        # a reason and records the refusal.
        served = len(load.request_ids)
        running.wait_until(lambda: len(load.request_ids) > served + 3, 60, "requests to be served")
        assert "full" in refused(running, "keys", "create", "--name", "k", "--tenant", "acme")
        running.command("drain", "--yes", "--model", "demo", "--queue", "--grace", "5s", "--no-wait")
        running.command("resume", "--model", "demo")
        running.wait_until(lambda: running.status()["audit"]["spooled"] == 6, 60, "the spooled entries")
        status = running.status()
        assert status["state"] == "degraded"
        assert status["audit"]["places"] == [str(small_disk / "audit.spool")]
        assert status["audit"]["in_memory"] == status["audit"]["dropped"] == 0
        said = human_status(running)
        assert "audit" in said and "audit.spool" in said and "disk is full" in said
        # The service answers requests, so it must be ready.
        running.wait_until(running.ready, 60, "the service to be ready")
        assert "database or disk is full" in running.log_path.read_text()
        refusal, drained, resumed = actions(running)[-3:]
        assert refusal[0] == "keys.create" and refusal[1].startswith("failed: ") and "full" in refusal[1]
        assert (drained, resumed) == (("drain", "ok"), ("resume", "ok"))

        # After space has been freed, nothing has been lost.
        filler.unlink()
        running.wait_until(lambda: well(running), 60, "the databases to catch up")
        load.end()
        running.wait_until(
            lambda: ended(running) >= set(load.request_ids),
            60,
            "the rows of all requests",
        )
        running.command("tenants", "set", "acme", "--weight", "2")
        found = verify(small_disk)
        assert found["ok"] and found["rows"] == 10 and found["spooled"] == 0
        assert [action for action, _ in actions(running)] == [
            *("tenants.create", "keys.create", "drain", "resume", "tenants.set")
        ]
        notes = [row["note"] for row in running.command("audit", "list")]
        assert [bool(note and note.startswith("spooled")) for note in notes] == [
            False,
            True,
            True,
            True,
            False,
        ]
        assert running.status()["databases"][0]["dropped_rows"] == 0
        assert running.status()["databases"][1]["dropped_rows"] == 0


def test_entries_spooled_when_the_service_is_killed_are_in_the_chain_after_the_next_start(
    small_disk: Path,
) -> None:
    with service("--state-dir", str(small_disk)) as running:
        filler = fill(small_disk)
        assert "full" in refused(running, "keys", "create", "--name", "k", "--tenant", "default")
        running.wait_until(lambda: running.status()["audit"]["spooled"] == 2, 60, "the spool")
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(60)
        filler.unlink()
        running.start()
        running.wait_until(lambda: well(running), 60, "the spooled entries to be written to the chain")
        (action,) = running.command("audit", "list")
        assert action["action"] == "keys.create" and action["result"].startswith("failed")
        found = verify(small_disk)
        assert found["ok"] and found["rows"] == 2


def sick(running: Service) -> Any:
    """Return the status of a database whose writes fail, or None if there is no such database."""
    return next((one for one in running.status()["databases"] if one["failing_s"] > 0), None)


def well(running: Service) -> bool:
    status = running.status()
    return sick(running) is None and status["audit"]["spooled"] == 0 and not status["audit"]["last_error"]


def human_status(running: Service) -> str:
    done = running.run("status")
    assert done.returncode == 0, done.stderr
    return done.stdout
