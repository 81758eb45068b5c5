"""Tests of `appliance audit` and `appliance backup`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.protocol import AuditHead
from store import audit, exports
from store.audit import Actor
from store.backup import Backup, back_up
from store.control import ControlStore
from store.errors import StoreError
from store.heads import SigningKey
from tests.audit_trail import forge, read_audit, rewrite
from tests.cli.conftest import Run
from tests.cli.servers import AdminService

TAIL = "DELETE FROM audit WHERE seq > 3; UPDATE sqlite_sequence SET seq = 3 WHERE name = 'audit'"


@pytest.fixture
def state(databases: Path) -> Path:
    """Return a state directory with an audit chain of four actions: the creation of two keys, the creation of
    a tenant, and a refused action. For the last two actions, the chain also contains an intent."""
    control = ControlStore(databases / "control.db")
    control.start()
    actor, _ = control.trail.intend(Actor("uid:7", "box"), "tenants.create", {"name": "acme", "weight": 2.0})
    control.create_tenant(actor=actor, name="acme", changes={"weight": 2.0}).result(60)
    actor, _ = control.trail.intend(Actor("uid:7 key:key_1", "box"), "requests.cancel", {"request_id": "r"})
    control.trail.conclude(actor, "requests.cancel", {"request_id": "r"}, "refused: no such request").result(
        60
    )
    control.close()
    return databases


def test_actions_are_listed_oldest_first_one_line_each(cli: Run, state: Path) -> None:
    lines = cli("audit", "list", "--state-dir", state).out.splitlines()
    assert lines[0].split()[:4] == ["TIME", "ROW", "ACTOR", "HOST"]
    assert len(lines) == 5
    assert lines[3].split()[2:6] == ["3", "uid:7", "box", "tenants.create"]
    assert "weight=2.0" in lines[3] and " ok " in lines[3] and "name=acme" in lines[3]
    assert "refused: no such request" in lines[4]


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ((), [1, 2, 3, 5]),
        (("--limit", 1), [5]),
        (("--actor", "uid:0"), [1, 2]),
        (("--actor", "uid:7"), [3, 5]),
        (("--action", "keys."), [1, 2]),
        (("--action", "requests.cancel"), [5]),
        (("--action", "requests"), []),
        (("--since", "1h"), [1, 2, 3, 5]),
        (("--since", "2100-01-01"), []),
    ],
)
def test_filters_narrow_the_list(cli: Run, state: Path, flags: tuple[object, ...], rows: list[int]) -> None:
    out = cli("audit", "list", "--state-dir", state, "--json", *flags).out
    assert [row["seq"] for row in json.loads(out)] == rows


def test_json_contains_the_old_and_the_new_value_as_objects(cli: Run, state: Path) -> None:
    made = json.loads(cli("audit", "list", "--state-dir", state, "--json").out)[2]
    assert (made["seq"], made["result_seq"], made["result"]) == (3, 4, "ok")
    assert made["params"] == {"name": "acme", "weight": 2.0}
    assert made["before"] is None and made["after"]["weight"] == 2.0


def test_entries_waiting_in_the_spool_are_listed_too(cli: Run, state: Path) -> None:
    control = ControlStore(state / "control.db")
    control.start()
    limit = "PRAGMA max_page_count=1"
    control._writer.call(lambda connection: connection.execute(limit).fetchone()).result(60)
    actor, _ = control.trail.intend(Actor("uid:7"), "drain", {"reason": "x" * 5000})
    control.trail.conclude(actor, "drain", {"reason": "x" * 5000}, "ok").result(60)
    last = json.loads(cli("audit", "list", "--state-dir", state, "--json").out)[-1]
    assert (last["seq"], last["action"], last["result"]) == (None, "drain", "ok")
    assert "2 entries since" in cli("audit", "verify", "--state-dir", state).out
    control._writer.call(
        lambda connection: connection.execute("PRAGMA max_page_count=100000").fetchone()
    ).result(60)
    control.close()


def test_an_action_whose_time_was_tampered_with_is_still_listed(cli: Run, state: Path) -> None:
    forge(state, "UPDATE audit SET at = 'yesterday' WHERE seq = 3")
    lines = cli("audit", "list", "--state-dir", state).out.splitlines()
    assert len(lines) == 1 + 4 and lines[3].split()[:2] == ["yesterday", "3"]


def test_an_intact_chain_is_reported_as_complete_with_its_head(cli: Run, state: Path) -> None:
    outcome = cli("audit", "verify", "--state-dir", state)
    assert outcome.code == 0
    last = outcome.out.splitlines()
    assert last[0].startswith("checked against: the chain itself, ") and "recorded head" in last[0]
    assert "control.db is complete and unchanged: 6 rows" in last[-2]
    seq, _, digest = last[-1].removeprefix("head ").partition(":")
    assert seq == "6"
    assert cli("audit", "verify", "--state-dir", state, "--head", f"{seq}:{digest}").code == 0
    wrong = cli("audit", "verify", "--state-dir", state, "--head", f"5:{digest}")
    assert wrong.code == 1 and "row 5: this row or an earlier one was rewritten" in wrong.out


def test_the_first_wrong_row_is_named_and_the_exit_code_is_1(cli: Run, state: Path) -> None:
    forge(state, "UPDATE audit SET actor = 'uid:9' WHERE seq = 2")
    outcome = cli("audit", "verify", "--state-dir", state, "--json")
    found = json.loads(outcome.out)
    assert (outcome.code, found["ok"], found["broken_seq"], found["rows"]) == (1, False, 2, 1)
    assert found["problems"] == ["row 2: rewritten: its hash does not match its content"]


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a shell script as `journalctl` in a folder that is first in PATH."""

    def put(script: str) -> None:
        (tmp_path / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "journalctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_rows_removed_together_with_their_heads_are_detected_with_the_journal(
    cli: Run, state: Path, tmp_path: Path, journalctl: Callable[[str], None]
) -> None:
    heads = (state / "audit.heads").read_text()
    forge(state, TAIL)
    (state / "audit.heads").write_text("".join(line for line in heads.splitlines(True) if "seq=1 " in line))
    assert cli("audit", "verify", "--state-dir", state).code == 0
    journal = tmp_path / "journal.txt"
    journal.write_text(
        "".join(f"Nov 20 10:00:00 box appliance[1]: {line}" for line in heads.splitlines(True))
    )
    journalctl(f'echo "$@" > {tmp_path}/asked\ncat {journal}')
    for given in (("--heads", journal), ("--journal",)):
        outcome = cli("audit", "verify", "--state-dir", state, *given)
        assert outcome.code == 1 and "rows 4 to 6 are missing from the end of the chain" in outcome.out, given
    assert "--unit=appliance.service" in (tmp_path / "asked").read_text()


def test_a_rewrite_by_the_services_own_user_is_detected_with_the_journal_by_default(
    cli: Run,
    databases: Path,
    caplog: pytest.LogCaptureFixture,
    journalctl: Callable[[str], None],
    tmp_path: Path,
) -> None:
    with caplog.at_level("INFO", "store.heads"):
        control = ControlStore(databases / "control.db")
        control.start()
        control.create_tenant(actor="uid:7", name="acme", changes={}).result(60)
        control.close()
    lines = [f"12:00:00 INFO    heads: {message}\n" for message in caplog.messages]
    (tmp_path / "lines").write_text("no head\n" + "".join(lines))
    journalctl(f"cat {tmp_path}/lines")
    verify = ("audit", "verify", "--state-dir")
    sound = cli(*verify, databases)
    assert sound.code == 0 and f", {len(lines)} journal heads\n" in sound.out

    elsewhere = shutil.copytree(databases, tmp_path / "backup")
    rewrite(databases, 2)
    found = cli(*verify, databases)
    assert found.code == 1 and "this row or an earlier one was rewritten" in found.out
    assert cli(*verify, databases, "--json").code == 1
    without = cli(*verify, databases, "--no-journal")
    assert without.code == 0 and "no journal heads (--no-journal)" in without.out
    of_others = cli(*verify, elsewhere)
    assert of_others.code == 0 and f"no audit heads of appliance.service with {elsewhere}" in of_others.out


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no permission >&2; exit 1", "journalctl failed: no permission"),
        ("exit 0", "no audit heads of appliance.service"),
        ("exec sleep 60", "journalctl did not finish within 0.2 s"),
        (None, "journalctl cannot be run here"),
    ],
)
def test_missing_journal_heads_are_explained_and_are_not_an_error(
    cli: Run,
    state: Path,
    journalctl: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str | None,
    reason: str,
) -> None:
    if script == "exec sleep 60":
        monkeypatch.setattr("appliance.cli.audit_journal.MAX_READ_S", 0.2)
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    else:
        journalctl(script)
    outcome = cli("audit", "verify", "--state-dir", state)
    assert outcome.code == 0 and f"no journal heads ({reason}" in outcome.out
    assert reason in json.loads(cli("audit", "verify", "--state-dir", state, "--json").out)["journal_missing"]


def test_a_requested_journal_without_heads_is_an_error(
    cli: Run, state: Path, journalctl: Callable[[str], None]
) -> None:
    journalctl("exit 0")
    outcome = cli("audit", "verify", "--state-dir", state, "--journal")
    assert outcome.code == 1 and "no audit heads of appliance.service" in outcome.err


def test_a_missing_file_of_heads_or_folder_is_reported_with_a_remedy(
    cli: Run, state: Path, run_dir: Path
) -> None:
    heads = cli("audit", "verify", "--state-dir", state, "--heads", state / "none")
    assert heads.code == 1 and "give a text file that contains chain heads" in heads.err
    place = ("--run-dir", run_dir, "--state-dir", state)
    backup = cli("backup", state / "none" / "x", *place)
    assert backup.code == 1 and f"{state / 'none'} is not a writable folder" in backup.err


@pytest.mark.parametrize("head", ["", "5", "5:abc", "x:" + "0" * 64])
def test_an_invalid_head_is_refused_with_the_expected_format(cli: Run, state: Path, head: str) -> None:
    outcome = cli("audit", "verify", "--state-dir", state, "--head", head)
    assert outcome.code == 2 and "write SEQ:HASH" in outcome.err


def test_an_export_is_complete_and_signed_and_can_be_verified_anywhere(
    cli: Run, state: Path, tmp_path: Path
) -> None:
    target = tmp_path / "audit.jsonl"
    assert cli("audit", "export", target, "--state-dir", state) == (0, "", "")
    assert target.stat().st_mode & 0o777 == 0o600
    assert (
        cli("audit", "export", "--state-dir", state).out.splitlines()[:-1]
        == target.read_text().splitlines()[:-1]
    )
    *rows, trailer = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert trailer["trailer"]["rows"] == 6 and len(trailer["trailer"]["sig"]) == 64
    assert cli("audit", "verify", "--file", target).code == 0
    said = json.loads(cli("audit", "export", target, "--state-dir", state, "--json").out)
    assert (said["rows"], said["head"]["hash"], said["signed"]) == (6, rows[-1]["hash"], True)
    target.write_text(target.read_text().replace("acme", "evil"))
    assert cli("audit", "verify", "--file", target).code == 1
    (state / "audit.key").unlink()
    assert "not signed" in cli("audit", "export", target, "--state-dir", state).err


def test_a_completely_rewritten_export_is_detected_by_its_missing_signature(
    cli: Run, state: Path, tmp_path: Path
) -> None:
    """Only the missing signature reveals the change, because the forger recomputed all hashes."""
    target = tmp_path / "elsewhere" / "audit.jsonl"
    target.parent.mkdir()
    chain = [row._replace(actor="uid:0") for row in read_audit(state / "control.db")]
    previous = audit.GENESIS_HASH
    for place, row in enumerate(chain):
        row = row._replace(previous_hash=previous)
        chain[place] = row._replace(hash=audit.row_hash(row))
        previous = chain[place].hash
    target.write_text("".join(exports.lines_of(chain, SigningKey(b"somebody else's"))))
    unchecked = cli("audit", "verify", "--file", target)
    assert unchecked.code == 0 and "signatures were not checked" in unchecked.out
    found = cli("audit", "verify", "--file", target, "--state-dir", state)
    assert found.code == 1 and "is not signed by this service" in found.out
    target.with_name("audit.key").write_bytes((state / "audit.key").read_bytes())
    assert cli("audit", "verify", "--file", target).code == 1
    cli("audit", "export", target, "--state-dir", state)
    assert "not checked" not in cli("audit", "verify", "--file", target, "--state-dir", state).out
    assert cli("audit", "verify", "--file", target, "--state-dir", target.parent.parent / "none").code == 1


def test_a_copy_of_the_database_alone_can_be_verified_too(cli: Run, state: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes((state / "control.db").read_bytes())
    assert cli("audit", "verify", "--file", copy).code == 0
    assert cli("audit", "list", "--file", copy, "--json").code == 0
    assert cli("audit", "verify", "--file", tmp_path / "none").code == 1


def test_reading_requires_no_write_permission(
    state: Path, open_folder: Path, run_unprivileged_cli: Run
) -> None:
    state = shutil.copytree(state, open_folder / "state")
    state.chmod(0o755)
    if os.geteuid() == 0:
        # The other user is in the service's group, but only the service's user may read the key.
        for file in state.iterdir():
            os.chown(file, -1, 65534)
    outcomes = [
        run_unprivileged_cli("audit", word, "--state-dir", state) for word in ("list", "export", "verify")
    ]
    for outcome in outcomes:
        assert outcome.code == 0, outcome.err
    assert "signatures of recorded heads were not checked" in outcomes[-1].out


# ── backup ──


def test_a_backup_of_a_stopped_service_reports_that_it_is_not_audited(
    cli: Run, state: Path, tmp_path: Path, run_dir: Path
) -> None:
    target = tmp_path / "backup"
    words = ("backup", target, "--state-dir", state, "--run-dir", run_dir)
    outcome = cli(*words)
    assert (
        outcome.code == 0
        and "is complete: databases checked, audit chain verified up to row 6" in outcome.out
    )
    assert "so the backup is not recorded in the audit chain" in outcome.err
    assert cli("audit", "verify", "--state-dir", target).code == 0
    again = cli(*words, "--json")
    assert again.code == 0 and json.loads(again.out)["path"].startswith(f"{target}/appliance-")


def test_a_backup_of_a_running_service_records_its_begin_and_its_end(
    cli: Run, state: Path, tmp_path: Path, run_dir: Path, admin: AdminService
) -> None:
    last = read_audit(state / "control.db")[-1]
    admin.head = AuditHead(seq=last.seq, hash=last.hash)
    target, place = tmp_path / "backup.tar", ("--state-dir", state, "--run-dir", run_dir)
    made = cli("backup", target, *place, "--json")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert made.code == 0 and json.loads(made.out)["sha256"] == digest
    end = {"path": str(target), "rows": 6, "sha256": digest, "error": None}
    assert admin.actions == [
        ("backup.begin", {"path": str(target), "contents": True}),
        ("backup.end", end),
    ]
    assert cli("backup", target, *place).code == 1
    name, failed = admin.actions[-1]
    assert (name, failed["sha256"]) == ("backup.end", None) and "already exists" in failed["error"]


@pytest.mark.parametrize("complete", [True, False])
def test_a_backup_warns_if_the_service_ended_before_the_result_was_recorded(
    cli: Run,
    state: Path,
    tmp_path: Path,
    run_dir: Path,
    admin: AdminService,
    monkeypatch: pytest.MonkeyPatch,
    complete: bool,
) -> None:
    last = read_audit(state / "control.db")[-1]
    admin.head = AuditHead(seq=last.seq, hash=last.hash)

    def copy(*words: Any, **options: Any) -> Backup:
        (run_dir / "admin.sock").unlink()
        if not complete:
            raise StoreError("the disk is gone")
        return back_up(*words, **options)

    monkeypatch.setattr("appliance.cli.backup.back_up", copy)
    words = ("backup", tmp_path / "backup", "--state-dir", state, "--run-dir", run_dir)
    outcome = cli(*words)
    assert ("is complete" in outcome.out) == (outcome.code == 0) == complete
    assert ("the disk is gone" in outcome.err) != complete
    assert "The result of this backup could not be recorded in the audit" in outcome.err


def test_a_backup_has_the_settings(cli: Run, state: Path, tmp_path: Path, run_dir: Path) -> None:
    config = tmp_path / "etc" / "appliance.toml"
    (config.parent / "conf.d").mkdir(parents=True)
    config.write_text("fronts = 1\n")
    (config.parent / "conf.d" / "10-more.toml").write_text("fronts = 2\n")
    target = tmp_path / "backup"
    outcome = cli("backup", target, "--state-dir", state, "--run-dir", run_dir, "--config", config)
    assert outcome.code == 0
    assert (target / "settings" / "appliance.toml").read_text() == "fronts = 1\n"
    assert (target / "settings" / "conf.d" / "10-more.toml").read_text() == "fronts = 2\n"


def test_a_service_with_a_broken_chain_is_not_backed_up(
    cli: Run, state: Path, tmp_path: Path, run_dir: Path
) -> None:
    forge(state, TAIL)
    outcome = cli("backup", tmp_path / "backup", "--state-dir", state, "--run-dir", run_dir)
    assert outcome.code == 1 and "rows 4 to 6 are missing" in outcome.err
    assert not (tmp_path / "backup").exists()
