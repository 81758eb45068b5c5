from __future__ import annotations

import hashlib
import re
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path

import pytest

from store import audit
from store.control import ControlStore, read_policies
from store.errors import StorageFaultError, UnknownKeyError
from store.evidence import read_audit_head, verify_audit
from tests.audit_trail import read_audit

ROOT = Path(__file__).resolve().parents[2]


def create(control: ControlStore, name: str = "laptop", **options: float):
    return control.create_key(actor="uid:0", name=name, tenant="default", **options).result(60)


def test_a_new_key_is_valid_and_names_its_tenant(control):
    created = create(control)
    assert re.fullmatch(r"ak-[A-Za-z0-9_-]{43}", created.key)
    found = control.lookup(created.key)
    assert found == created.record
    assert (found.name, found.tenant, found.prefix) == ("laptop", "default", created.key[:8])
    assert create(control).key != created.key


@pytest.mark.parametrize("guess", ["", "ak-", "ak-" + "A" * 43, "\ud800", "x" * 100_000])
def test_other_texts_are_not_valid_keys(control, guess):
    create(control)
    assert control.lookup(guess) is None


def test_the_disk_contains_the_hash_of_a_secret_but_not_the_secret(tmp_path, control):
    created = create(control)
    control.close()
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert created.key.encode() not in content
    assert created.key[12:].encode() not in content
    assert hashlib.sha256(created.key.encode()).hexdigest().encode() in content


def test_a_revoked_key_is_no_longer_valid(control):
    created = create(control)
    revoked = control.revoke_key(actor="uid:0", key_id=created.record.id).result(60).after
    assert revoked.revoked_at is not None
    assert control.lookup(created.key) is None
    again = control.revoke_key(actor="uid:0", key_id=created.record.id).result(60).after
    assert again.revoked_at == revoked.revoked_at


def test_revoking_an_unknown_key_names_it_and_leaves_no_audit_row(control):
    with pytest.raises(UnknownKeyError, match="key_none"):
        control.revoke_key(actor="uid:0", key_id="key_none").result(60)
    assert read_audit(control.path) == []


def test_an_expired_key_is_not_valid(control, monkeypatch):
    created = create(control, expires_at=time.time() + 1000)
    assert control.lookup(created.key) is not None
    later = time.time() + 1001
    monkeypatch.setattr("store.control.time.time", lambda: later)
    assert control.lookup(created.key) is None


def test_invalid_fields_of_a_key_are_refused_with_the_value(control):
    with pytest.raises(ValueError, match=r"expires_at is 5\.0, which is in the past"):
        control.create_key(actor="uid:0", name="a", tenant="default", expires_at=5.0)
    for at in (1e3 * time.time(), 1e300, float("inf"), float("nan")):  # The first time is in milliseconds.
        with pytest.raises(ValueError, match=r"expires_at is .*: use a unix time in the future, in seconds"):
            control.create_key(actor="uid:0", name="a", tenant="default", expires_at=at)
    for name in ("", "a\nb", "x" * 201, "\ud800"):
        with pytest.raises(ValueError, match="name is"):
            control.create_key(actor="uid:0", name=name, tenant="default")


def test_keys_survive_a_restart(tmp_path, control):
    kept, revoked = create(control, "kept"), create(control, "revoked")
    control.revoke_key(actor="uid:0", key_id=revoked.record.id).result(60)
    control.close()
    again = ControlStore(control.path)
    again.start()
    assert [record.name for record in again.list_keys()] == ["kept", "revoked"]
    assert again.lookup(kept.key) == kept.record
    assert again.lookup(revoked.key) is None
    again.close()


def test_each_change_is_in_the_audit_chain_without_the_secret(control):
    created = create(control)
    control.revoke_key(actor="uid:1000", key_id=created.record.id).result(60)
    control.trail.conclude("uid:5", "keys.create", {"name": "x"}, "refused").result(60)
    rows = read_audit(control.path)
    assert [(row.seq, row.actor, row.action, row.result) for row in rows] == [
        (1, "uid:0", "keys.create", "ok"),
        (2, "uid:1000", "keys.revoke", "ok"),
        (3, "uid:5", "keys.create", "refused"),
    ]
    assert created.record.id in rows[0].params and created.key not in rows[0].params
    assert read_audit_head(control.path) == audit.Head(rows[2].seq, rows[2].hash)
    assert verify_audit(control.path, [read_audit_head(control.path)]).ok


def test_a_change_and_its_audit_row_are_committed_or_rolled_back_together(control):
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM keys")
        raise RuntimeError("halfway")

    created = create(control)
    with pytest.raises(RuntimeError):
        control.change(actor="uid:0", action="keys.purge", params={}, apply=half).result(60)
    with pytest.raises(TypeError):
        control.change(
            actor="uid:0",
            action="keys.purge",
            params={"not": object()},
            apply=lambda connection: connection.execute("DELETE FROM keys").rowcount,
        ).result(60)
    assert [record.id for record in read_policies(control.path).keys.values()] == [created.record.id]
    assert [row.action for row in read_audit(control.path)] == ["keys.create"]


def test_plain_sql_cannot_change_audit_rows(control):
    create(control)
    control.close()
    with closing(sqlite3.connect(control.path)) as connection:
        for statement in ("UPDATE audit SET actor = 'x'", "DELETE FROM audit"):
            with pytest.raises(sqlite3.IntegrityError, match="audit rows are never"):
                connection.execute(statement)


def test_a_hundred_keys_created_concurrently_form_one_audit_chain(control):
    futures = [
        control.create_key(actor="uid:0", name=f"k{number}", tenant="default") for number in range(100)
    ]
    assert not wait(futures, 300).not_done
    assert len(control.list_keys()) == 100
    verdict = verify_audit(control.path)
    assert verdict.ok and verdict.rows == 100


def test_every_commit_of_control_state_reaches_the_disk(control):
    def synchronous(connection: sqlite3.Connection) -> int:
        return connection.execute("PRAGMA synchronous").fetchone()[0]

    full = 2
    assert control.change(actor="uid:0", action="test", params={}, apply=synchronous).result(60) == full


def test_a_change_confirmed_by_a_future_survives_kill_9(tmp_path):
    source = """
import os, signal, sys; from pathlib import Path
from store.control import ControlStore
control = ControlStore(Path(sys.argv[1])); control.start()
print(control.create_key(actor="uid:0", name="a", tenant="default").result().record.id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "control.db"
    done = subprocess.run(
        [sys.executable, "-c", source, path], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == -9
    assert [record.id for record in read_policies(path).keys.values()] == [done.stdout.strip()]
    assert verify_audit(path).rows == 1


def test_on_a_full_disk_new_keys_are_refused_and_existing_keys_remain_valid(tiny_disk):
    control = ControlStore(tiny_disk / "control.db")
    control.start()
    created = create(control)
    ballast = tiny_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"\0" * 1024)
    with pytest.raises(StorageFaultError, match="check the free space"):
        for number in range(50):
            create(control, f"k{number}")
    assert control.lookup(created.key) is not None
    ballast.unlink()
    after = create(control, "after")
    control.close()
    assert after.record in read_policies(control.path).keys.values()
    assert verify_audit(control.path).ok


def test_a_first_start_on_a_full_disk_names_the_cause(tiny_disk):
    ballast = tiny_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"\0" * 1024)
    with pytest.raises(StorageFaultError, match=r"full|free disk space"):
        ControlStore(tiny_disk / "control.db").start()
