"""Tests of the spool, which stores audit entries while they cannot be written to the database."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from store import evidence, heads
from store.audit import AuditRow, outcome
from store.control import ControlStore
from store.errors import StorageFaultError
from store.spool import RESERVED_BYTES, Spool, read_spool
from tests.audit_trail import ROOT, announced, fill, read_audit


class FullDatabase:
    """Context manager in which every write to `control.db` fails, as it would on a full disk."""

    def __init__(self, control: ControlStore) -> None:
        self._writer = control._writer

    def __enter__(self) -> None:
        # Limit the database to its current number of pages. The next row does not fit in the free space of
        # the last page.
        self._writer.call(
            lambda connection: connection.execute(
                f"PRAGMA max_page_count={connection.execute('PRAGMA page_count').fetchone()[0]}"
            ).fetchone()
        ).result(60)

    def __exit__(self, *_: object) -> None:
        self._writer.call(
            lambda connection: connection.execute("PRAGMA max_page_count=1073741823").fetchone()
        ).result(60)


LONG = "x" * 5000


def test_entries_that_the_database_refuses_are_spooled_and_reach_the_chain_in_order(
    control, tmp_path, caplog
):
    control.create_tenant(actor=ROOT, name="before", changes={}).result(60)
    with FullDatabase(control):
        actors = []
        for number in range(3):
            actors.append(announced(control, "requests.cancel", number=number, reason=LONG))
            control.trail.conclude(
                actors[-1], "requests.cancel", {"number": number, "reason": LONG}, "ok"
            ).result(60)
        state = control.trail.state()
        assert (state.spool.rows, state.spool.in_memory) == (6, 0)
        assert state.spool.path == tmp_path / "audit.spool"
        assert "full" in (state.last_error or "")
        assert len(read_audit(control.path)) == 1
        waiting = evidence.spooled_entries(tmp_path)
        assert [entry.phase for entry in waiting] == ["intent", "result"] * 3
        assert "6 entries since" in evidence.examine_folder(tmp_path).notes[-1]
    control.trail.retry()
    control.create_tenant(actor=ROOT, name="after", changes={}).result(60)
    rows = read_audit(control.path)[1:]
    assert [row.act for row in rows[:6]] == [actor.act for actor in actors for _ in range(2)]
    assert [row.at for row in rows[:6]] == [entry.at for entry in waiting]
    assert all(row.note and row.note.startswith("spooled; written to the chain at ") for row in rows[:6])
    assert (rows[6].action, rows[6].note) == ("tenants.create", None)
    state = control.trail.state()
    assert (state.spool.rows, state.spool.path, state.last_error) == (0, None, None)
    assert (tmp_path / "audit.spool").read_bytes().strip(b"\0") == b""
    assert "6 audit entries were moved from the spool to the audit chain" in caplog.text
    assert evidence.examine_folder(tmp_path).ok


def test_a_change_refused_for_lack_of_space_is_still_audited(control):
    with FullDatabase(control):
        actor = announced(control, "keys.create", name=LONG)
        with pytest.raises(StorageFaultError) as raised:
            control.change(
                actor=actor, action="keys.create", params={"name": LONG}, apply=lambda connection: None
            ).result(60)
        control.trail.conclude(actor, "keys.create", {}, f"failed: {raised.value}").result(60)
    control.trail.retry()
    announced(control, "a.b")
    assert [(row.phase, row.result[:7]) for row in read_audit(control.path)][:2] == [
        ("intent", ""),
        ("result", "failed:"),
    ]


def test_waiting_entries_survive_the_end_of_the_service(tmp_path):
    first = ControlStore(tmp_path / "control.db")
    first.start()
    with FullDatabase(first):
        actor = announced(first, "requests.cancel", reason=LONG)
        first.trail.conclude(actor, "requests.cancel", {"reason": LONG}, "ok").result(60)
        # Save the spool as it would be if the process were killed here.
        kept = (tmp_path / "audit.spool").read_bytes()
    first.close()
    (tmp_path / "audit.spool").write_bytes(kept)
    before = len(read_audit(first.path))
    second = ControlStore(tmp_path / "control.db")
    second.start()
    second.close()
    # The spool also contained an entry that was already in the chain. This entry appears only once.
    assert before == 2
    assert [row.phase for row in read_audit(first.path)] == ["intent", "result"]
    assert not (tmp_path / "audit.spool").exists()


def test_a_spool_line_that_was_changed_is_marked(tmp_path):
    first = ControlStore(tmp_path / "control.db")
    first.start()
    with FullDatabase(first):
        for number in range(3):
            announced(first, "requests.cancel", number=number, reason=LONG)
        kept = (tmp_path / "audit.spool").read_bytes()
    first.close()
    os.unlink(tmp_path / "control.db")
    lines = kept.rstrip(b"\0").splitlines(keepends=True)
    assert b"uid:0" in lines[1]
    lines[1] = lines[1].replace(b"uid:0", b"uid:9")
    (tmp_path / "audit.spool").write_bytes(b"".join(lines) + b'{"entry": "half a li')
    second = ControlStore(tmp_path / "control.db")
    second.start()
    second.close()
    rows = [row for row in read_audit(second.path) if row.phase == "intent"]
    marked = [row.actor for row in rows if "spool line of this entry" in (row.note or "")]
    assert [row.actor for row in rows] == ["uid:0", "uid:9", "uid:0"]
    assert marked == ["uid:9"]


def test_an_unreadable_spool_line_is_recorded(tmp_path):
    fill(tmp_path)
    (tmp_path / "audit.spool").write_bytes(b"not a line\n")
    control = ControlStore(tmp_path / "control.db")
    control.start()
    control.close()
    row: AuditRow = read_audit(control.path)[-1]
    assert (row.action, row.result) == ("unreadable", "line 1 of the spool could not be read")


def fill_up(disk: Path) -> None:
    with suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
        while True:
            ballast.write(b"\0" * 4096)


def entry(number: int, size: int = 100) -> object:
    return outcome(ROOT, "a.b", {"number": number, "filler": "x" * size}, "ok")


def test_on_a_full_disk_entries_go_into_the_reserved_space(tiny_disk):
    key = heads.make_or_read_key(tiny_disk)
    spool = Spool(tiny_disk / "audit.spool", key)
    spool.start()
    fill_up(tiny_disk)
    for number in range(100):
        spool.put(entry(number))
    state = spool.state()
    assert (state.rows, state.in_memory, state.path) == (100, 0, tiny_disk / "audit.spool")
    assert read_spool(tiny_disk / "audit.spool", key).entries == spool.waiting()


def test_entries_beyond_the_reserved_space_wait_in_memory_until_the_disk_has_space(tiny_disk, caplog):
    key = heads.make_or_read_key(tiny_disk)
    path = tiny_disk / "audit.spool"
    spool = Spool(path, key)
    spool.start()
    fill_up(tiny_disk)
    entries = [entry(number, 20_000) for number in range(20)]
    for one in entries:
        spool.put(one)
    in_memory = spool.state().in_memory
    assert 0 < in_memory < 20 and spool.waiting() == entries
    assert read_spool(path, key).entries == entries[: 20 - in_memory]
    assert "this audit entry is only in memory: {" in caplog.text and '"action":"a.b"' in caplog.text
    (tiny_disk / "ballast").unlink()
    spool.retry()
    assert spool.state().in_memory == 0
    again = Spool(path, key)
    again.start()
    assert again.waiting() == entries
    again.drop(20)
    assert again.state().rows == 0
    assert path.stat().st_size == RESERVED_BYTES
    assert path.read_bytes().strip(b"\0") == b""


def test_entries_wait_in_memory_while_the_file_cannot_be_created(tmp_path):
    spool = Spool(tmp_path / "missing" / "audit.spool", heads.make_or_read_key(tmp_path))
    spool.put(entry(1))
    assert (spool.state().in_memory, spool.state().path) == (1, None)
    (tmp_path / "missing").mkdir()
    spool.retry()
    assert (spool.state().in_memory, spool.state().path) == (0, tmp_path / "missing" / "audit.spool")


def test_the_size_of_the_spool_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("store.spool.MAX_ENTRIES", 2)
    spool = Spool(tmp_path / "audit.spool", heads.make_or_read_key(tmp_path))
    for number in range(3):
        spool.put(entry(number))
    assert (spool.state().rows, spool.state().dropped) == (2, 1)
    assert "so this log has the only copy of this entry" in caplog.text
