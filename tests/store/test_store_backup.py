"""Tests that backups are consistent and verified, and that a failed backup leaves no file."""

from __future__ import annotations

import json
import sqlite3
import tarfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from store import backup
from store.audit import Head
from store.contents import Content, ContentLog, read_contents
from store.control import ControlStore, read_policies
from store.errors import CorruptDatabaseError, StorageFaultError, StoreError
from store.evidence import Recorded, examine_folder, read_audit_head
from store.requests import RequestFilter, RequestReader
from store.schemas import CONTENTS
from store.writer import Writer


@pytest.fixture
def running(history, request_row):
    """Return the state directory of a running service. It contains one key, and one request with its
    prompt."""
    folder = history.path.parent
    control = ControlStore(folder / "control.db")
    control.start()
    control.create_key(actor="uid:0", name="k", tenant="default").result(60)
    history.log.end(request_row("req-1", finished_at=1_000_001.0))
    history.writer.flush()
    writer = Writer(folder / "contents.db", CONTENTS, synchronous="NORMAL")
    writer.start()
    ContentLog(writer).keep(
        [
            Content(
                request_id="req-1",
                part="prompt",
                number=0,
                tenant="t",
                created_at=1.0,
                sha256="0" * 64,
                bytes=2,
                text="hi",
            )
        ]
    )
    writer.flush()
    yield folder
    writer.close()
    control.close()


def take(state: Path, target: Path, **options: object) -> backup.Backup:
    return backup.back_up(state, target, others={}, **options)  # type: ignore[arg-type]


def test_a_backup_of_a_running_service_is_complete_and_readable_only_by_its_owner(running, tmp_path_factory):
    settings = running / "appliance.toml"
    settings.write_text("fronts = 2\n")
    target = tmp_path_factory.mktemp("backups") / "one"
    done = backup.back_up(
        running, target, others={"settings/appliance.toml": settings, "settings/conf.d/a.toml": settings}
    )
    assert done.path == target and done.audit_rows == 1
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert names == {
        *("audit.heads", "audit.key", "backup.json", "contents.db", "control.db", "history.db"),
        *("settings/appliance.toml", "settings/conf.d/a.toml"),
    }
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert [key.name for key in read_policies(target / "control.db").keys.values()] == ["k"]
    assert [row.request_id for row in RequestReader(target / "history.db").query(RequestFilter(), 10)] == [
        "req-1"
    ]
    assert read_contents(target / "contents.db", "req-1")[0].text == "hi"
    assert examine_folder(target).ok
    manifest = json.loads((target / "backup.json").read_text())
    assert {file["name"] for file in manifest["files"]} == names - {"backup.json"}
    assert manifest["audit_head"] == done.audit_head
    with closing(sqlite3.connect(f"file:{target / 'control.db'}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_service_started_from_a_backup_continues_the_audit_chain(running, tmp_path):
    target = tmp_path / "restored"
    take(running, target)
    control = ControlStore(target / "control.db")
    control.start()
    control.create_key(actor="uid:0", name="later", tenant="default").result(60)
    control.close()
    findings = examine_folder(target)
    assert findings.ok and findings.verdict.rows == 2


def test_a_backup_into_an_existing_folder_is_named_by_the_time(running, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    done = take(running, place)
    assert done.path.parent == place and done.path.name.startswith("appliance-2")
    assert [path.name for path in place.iterdir()] == [done.path.name]


@pytest.mark.parametrize("name", ["state.tar", "state.tar.gz", "state.tgz"])
def test_an_archive_contains_one_folder_and_is_readable_only_by_its_owner(running, tmp_path, name):
    done = take(running, tmp_path / name, contents=False)
    assert done.path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(done.path) as archive:
        assert sorted(archive.getnames()) == [
            "state",
            *(
                f"state/{file}"
                for file in ("audit.heads", "audit.key", "backup.json", "control.db", "history.db")
            ),
        ]


def test_an_existing_file_is_not_overwritten(running, tmp_path):
    taken = tmp_path / "there.tar"
    taken.write_text("mine")
    with pytest.raises(StoreError, match=r"there\.tar already exists: choose another path"):
        take(running, taken)
    assert taken.read_text() == "mine"


def test_an_inaccessible_target_is_named(running, tmp_path, monkeypatch):
    # Accessing another user's folder raises this error for every user except root.
    def refuse(*asked, **options):
        raise PermissionError(13, "Permission denied", str(tmp_path / "theirs"))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(backup.tempfile, "mkdtemp", refuse)
    with pytest.raises(StoreError, match=r"theirs cannot be opened \(Permission denied\)"):
        take(running, tmp_path / "theirs" / "copy")


def test_a_broken_chain_makes_the_backup_fail_and_leaves_no_files(running, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(CorruptDatabaseError, match=r"row 2: rows 2 to 9 are missing"):
        take(running, place / "b", recorded=[Recorded(Head(9, "1" * 64), "somewhere")])
    assert list(place.iterdir()) == []


def test_a_damaged_database_makes_the_backup_fail_and_leaves_no_files(running, tmp_path, history):
    history.close()
    with (running / "history.db").open("r+b") as file:
        file.seek(4096 * 2)
        file.write(b"\xff" * 4096)
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(CorruptDatabaseError, match=r"history\.db"):
        take(running, place / "b")
    assert list(place.iterdir()) == []


def test_a_file_removed_during_the_backup_is_named_without_the_remedy_for_a_lost_database(
    running, tmp_path_factory, monkeypatch
):
    target = tmp_path_factory.mktemp("backups") / "x"

    def removed(*_: object) -> None:
        (running / "audit.heads").unlink()

    monkeypatch.setattr(backup, "read_audit_head", lambda path: removed() or read_audit_head(path))
    with pytest.raises(
        StoreError, match=r"audit\.heads was removed during the backup: start the backup again"
    ) as caught:
        take(running, target)
    assert "restore" not in str(caught.value) and not [*target.parent.iterdir()]


def test_a_full_target_disk_is_reported_and_no_files_are_left(running, tiny_disk):
    (tiny_disk / "ballast").write_bytes(b"\0" * (900 << 10))
    with pytest.raises(StorageFaultError, match=r"free (disk )?space"):
        take(running, tiny_disk / "b")
    assert [path.name for path in tiny_disk.iterdir()] == ["ballast"]


def test_a_backup_is_a_consistent_snapshot_and_does_not_delay_the_writer(
    history, request_row, tmp_path, eventually
):
    folder = history.path.parent
    control = ControlStore(folder / "control.db")
    control.start()
    stop = threading.Event()
    written = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            # Every copy must contain either both rows or neither of them.
            for half in ("a", "b"):
                history.log.end(request_row(f"req-{number}-{half}", finished_at=2_000_000.0))
            number += 1
            control.create_tenant(actor="uid:0", name=f"t{number}", changes={}).result(60)
            written.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(3):
            before = len(written)
            target = tmp_path / f"backup-{number}"
            done = take(folder, target)
            assert len(written) >= before
            assert examine_folder(target).ok
            assert done.audit_rows >= before
            rows = RequestReader(target / "history.db").query(RequestFilter(), 10**6)
            assert {row.state for row in rows} <= {"ended"}
        eventually(lambda: len(written) > 3)
    finally:
        stop.set()
        thread.join()
    control.close()
    assert history.writer.state().last_error is None
