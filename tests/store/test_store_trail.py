"""Tests of the audit trail: intents and results, chain heads outside the database, and exports."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from store import evidence, heads
from store.audit import Head
from store.control import ControlStore
from store.errors import CorruptDatabaseError, NotWritableError
from store.heads import heads_in, read_key
from tests.audit_trail import ROOT, announced, fill, forge, read_audit, rewrite


def phases(path: Path) -> list[tuple[str, str | None, str]]:
    return [(row.action, row.phase, row.result) for row in read_audit(path)]


def recorded_heads(path: Path) -> list[Head]:
    return [found.head for found in heads_in((path / "audit.heads").read_text().splitlines())]


# ── intents and results ──


def test_an_action_without_a_database_change_has_its_result_once(control):
    actor = announced(control, "requests.cancel", request_id="r")
    for _ in range(2):
        control.trail.conclude(actor, "requests.cancel", {"request_id": "r"}, "ok").result(60)
    assert phases(control.path) == [("requests.cancel", "intent", ""), ("requests.cancel", "result", "ok")]


def test_two_changes_of_one_action_are_both_recorded(control):
    actor = announced(control, "tenants.create")
    for name in ("a", "b"):
        control.create_tenant(actor=actor, name=name, changes={}).result(60)
    assert [row.phase for row in read_audit(control.path)] == ["intent", "result", "result"]


def test_values_of_actions_are_decoded_unless_their_text_was_damaged(tmp_path):
    fill(tmp_path)
    forge(tmp_path, "UPDATE audit SET params = '{' WHERE seq = 2")
    first, second, *_ = evidence.read_actions(tmp_path / "control.db", evidence.ActionFilter(), 10)
    assert (first.params["name"], first.before, second.params) == ("t0", None, "{")


def test_an_intent_left_by_an_ended_service_gets_the_result_unknown(tmp_path):
    first = ControlStore(tmp_path / "control.db")
    first.start()
    announced(first, "models.load", name="demo")
    first.close()
    second = ControlStore(tmp_path / "control.db")
    second.start()
    second.close()
    assert phases(second.path) == [
        ("models.load", "intent", ""),
        ("models.load", "result", "unknown: the service stopped before the result was recorded"),
    ]
    assert evidence.examine_folder(tmp_path).ok


def test_a_view_shows_one_line_per_action(control):
    actor = announced(control, "tenants.create", name="acme")
    control.create_tenant(actor=actor, name="acme", changes={}).result(60)
    announced(control, "requests.cancel", request_id="r")
    control.trail.conclude("uid:7", "keys.create", {}, "refused").result(60)
    with closing(sqlite3.connect(f"file:{control.path}?mode=ro", uri=True)) as connection:
        lines = connection.execute("SELECT actor, action, result, result_seq FROM audit_actions ORDER BY seq")
        assert lines.fetchall() == [
            ("uid:0", "tenants.create", "ok", 2),
            ("uid:0", "requests.cancel", None, None),
            ("uid:7", "keys.create", "refused", None),
        ]


def test_a_disk_that_does_not_respond_does_not_keep_the_trail_from_closing(tmp_path):
    control, responds = ControlStore(tmp_path / "control.db"), threading.Event()
    control.start()
    waiting = control.write(lambda connection: responds.wait(60), lambda _: None)
    control.trail.close(0.1)
    assert not waiting.done()
    responds.set()
    control.close()
    assert evidence.examine_folder(tmp_path).ok


# ── heads ──


def test_signed_heads_are_written_to_a_file_and_the_log_at_start_and_stop_and_after_some_rows(
    tmp_path, caplog
):
    caplog.set_level("INFO", "store.heads")
    control = ControlStore(tmp_path / "control.db")
    control.start()
    for number in range(20):
        control.create_tenant(actor=ROOT, name=f"t{number}", changes={}).result(60)
    control.close()
    again = ControlStore(tmp_path / "control.db")
    again.start()
    again.close()
    found = recorded_heads(tmp_path)
    assert [head.seq for head in found] == [1, 17, 20, 20]
    assert list(heads_in(caplog.messages)) == list(
        heads_in((tmp_path / "audit.heads").read_text().splitlines())
    )
    findings = evidence.examine_folder(tmp_path)
    assert (findings.ok, findings.heads, findings.confirmed_seq, findings.notes) == (True, 4, 20, [])


def test_a_head_is_recorded_only_once_on_request(control, tmp_path):
    for _ in range(2):
        announced(control, "a.b")
    for _ in range(3):
        control.trail.record_head()
    announced(control, "a.b")
    assert [head.seq for head in recorded_heads(tmp_path)] == [1, 2]


def test_the_signing_key_is_readable_only_by_the_service_and_does_not_change(tmp_path):
    for _ in range(2):
        control = ControlStore(tmp_path / "control.db")
        control.start()
        control.close()
        key = tmp_path / "audit.key"
        assert key.stat().st_mode & 0o777 == 0o600
        known = key.read_text()
    assert key.read_text() == known and len(bytes.fromhex(known.strip())) == 32


def test_an_invalid_signing_key_is_named_and_prevents_the_start(tmp_path):
    (tmp_path / "audit.key").write_text("short")
    with pytest.raises(NotWritableError, match=r"audit\.key does not contain a key"):
        ControlStore(tmp_path / "control.db").start()


@pytest.mark.parametrize("how", ["gone", "emptied", "cut"])
def test_a_start_with_fewer_rows_than_the_recorded_heads_confirm_is_reported(tmp_path, caplog, how):
    fill(tmp_path)
    path = tmp_path / "control.db"
    if how == "gone":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        forge(tmp_path, "DELETE FROM audit WHERE seq > 3")
    control = ControlStore(path)
    control.start()
    said = control.trail.state().last_error
    control.close()
    rows = 3 if how == "cut" else 0
    assert said is not None and said in caplog.messages
    assert said.startswith(
        f"the audit chain ends at row {rows}, but {tmp_path / 'audit.heads'} contains the head of row 5, so "
    )


def test_neither_a_complete_chain_nor_a_head_of_another_key_causes_a_report_of_missing_rows(tmp_path, caplog):
    fill(tmp_path)
    with (tmp_path / "audit.heads").open("a") as file:
        file.write(f"audit head seq=99 hash={'0' * 64} at=2026-11-20T23:16:01+00:00 sig={'0' * 64}\n")
    control = ControlStore(tmp_path / "control.db")
    control.start()
    assert control.trail.state().last_error is None
    control.close()
    assert "ends at row" not in caplog.text


@pytest.mark.parametrize("length", [100, 231])
def test_a_head_after_a_partial_line_is_found(tmp_path, length):
    path, key = tmp_path / "audit.heads", heads.SigningKey(b"secret")
    first, second = (key.sign_head(Head(seq, "a" * 64), "2026-01-01T00:00:00+00:00") for seq in (1, 2))
    path.write_text(first.line[:length])
    heads.append_line(path, second.line)
    assert list(heads_in(path.read_text().splitlines()))[-1] == second


def test_a_forged_head_is_detected_by_its_signature(tmp_path):
    fill(tmp_path)
    newest = evidence.read_audit_head(tmp_path / "control.db")
    forged = heads.SigningKey(b"another").sign_head(newest, "2026-01-01T00:00:00+00:00")
    recorded = evidence.recorded_in([f"Nov 20 box appliance[7]: {forged.line}"], "journal")
    assert "is not signed by this service" in evidence.examine_folder(tmp_path, recorded).problems[0]
    assert evidence.examine(tmp_path / "control.db", recorded).ok


def test_a_forged_head_does_not_make_a_row_look_wrong(tmp_path):
    fill(tmp_path)
    forged = heads.SigningKey(b"another").sign_head(Head(2, "0" * 64), "2026-01-01T00:00:00+00:00")
    findings = evidence.examine_folder(tmp_path, evidence.recorded_in([forged.line], "journal"))
    assert not findings.ok and len(findings.problems) == 1 and "not signed" in findings.problems[0]
    assert findings.verdict.ok and findings.heads == len(recorded_heads(tmp_path))


def renew_key(folder: Path) -> list[str]:
    """Replace the signing key as an operator would. Return the lines of the earlier chain heads."""
    lines = (folder / "audit.heads").read_text().splitlines(keepends=True)
    (folder / "audit.key").rename(folder / "audit.key.moved")
    fill_nothing(folder)
    return lines


def fill_nothing(folder: Path) -> None:
    control = ControlStore(folder / "control.db")
    control.start()
    control.close()


def test_a_new_signing_key_is_an_audit_row_and_heads_of_the_old_key_stay_valid(tmp_path):
    fill(tmp_path)
    old = read_key(tmp_path / "audit.key").id
    renew_key(tmp_path)
    fill_nothing(tmp_path)
    key = read_key(tmp_path / "audit.key").id
    *before, named = read_audit(tmp_path / "control.db")
    assert (named.actor, named.action, json.loads(named.params)) == ("service", "audit.key", {"key": key})
    assert key != old and len(before) == 5
    findings = evidence.examine_folder(tmp_path)
    assert findings.ok and findings.confirmed_seq == 6
    assert "signed with an earlier key, which was replaced in row 6" in findings.notes[0]


@pytest.mark.parametrize("row", [1, 4])
def test_a_new_signing_key_does_not_hide_a_rewrite(tmp_path, row):
    """The forger has the rights of the service's user but cannot change the journal."""
    fill(tmp_path)
    journal = evidence.recorded_in(renew_key(tmp_path), "journal")
    rewrite(tmp_path, row)
    assert evidence.examine_folder(tmp_path).ok, "the folder contains no evidence of the rewrite"
    findings = evidence.examine_folder(tmp_path, journal)
    assert not findings.ok and "this row or an earlier one was rewritten" in findings.problems[0]
    assert findings.problems[0].endswith("(according to a head signed with the key used before row 6)")


@pytest.mark.parametrize("left", [2, 4])
def test_a_new_signing_key_does_not_hide_rows_removed_before_it(tmp_path, left):
    fill(tmp_path)
    lines = (tmp_path / "audit.heads").read_text().splitlines(keepends=True)
    forge(
        tmp_path,
        f"DELETE FROM audit WHERE seq > {left}; UPDATE sqlite_sequence SET seq = {left} WHERE name = 'audit'",
    )
    (tmp_path / "audit.heads").unlink()
    renew_key_without_heads(tmp_path)
    assert evidence.examine_folder(tmp_path).ok
    findings = evidence.examine_folder(tmp_path, evidence.recorded_in(lines, "journal"))
    assert not findings.ok and "is not signed by this service" in findings.problems[-1]


def renew_key_without_heads(folder: Path) -> None:
    (folder / "audit.heads").write_text("")
    renew_key(folder)


def test_heads_signed_with_a_key_that_no_row_names_are_refused(tmp_path):
    fill(tmp_path)
    newest = evidence.read_audit_head(tmp_path / "control.db")
    other = heads.SigningKey(b"another").sign_head(newest, "2026-01-01T00:00:00+00:00")
    renew_key(tmp_path)
    later = heads.SigningKey(b"another").sign_head(
        evidence.read_audit_head(tmp_path / "control.db"), "2026-01-01T00:00:00+00:00"
    )
    assert evidence.examine_folder(tmp_path, evidence.recorded_in([other.line], "journal")).ok
    findings = evidence.examine_folder(tmp_path, evidence.recorded_in([later.line], "journal"))
    assert "it was signed with another key, or it was forged" in findings.problems[0]


@pytest.mark.parametrize("key", [None, "no key"])
def test_a_missing_signing_key_is_reported(tmp_path, key):
    fill(tmp_path)
    (tmp_path / "audit.key").unlink()
    if key is not None:
        (tmp_path / "audit.key").write_text(key)
    assert "signatures of recorded heads were not checked" in evidence.examine_folder(tmp_path).problems[0]


@pytest.mark.parametrize("left", [0, 1])
def test_heads_removed_from_their_file_are_reported(control, tmp_path, left):
    """Without chain heads, a rewritten chain cannot be distinguished from the original."""
    for number in range(40):
        control.create_tenant(actor=ROOT, name=f"t{number}", changes={}).result(60)
    assert evidence.examine_folder(tmp_path).ok
    lines = (tmp_path / "audit.heads").read_text().splitlines(keepends=True)
    (tmp_path / "audit.heads").write_text("".join(lines[:left]))
    assert f"confirms the last {40 - left} rows" in evidence.examine_folder(tmp_path).problems[0]


def test_a_missing_file_of_heads_is_reported(tmp_path):
    fill(tmp_path)
    (tmp_path / "audit.heads").unlink()
    assert (
        "the recorded heads of the audit chain cannot be read"
        in evidence.examine_folder(tmp_path).problems[0]
    )


def test_rows_not_confirmed_by_a_head_are_counted(control, tmp_path):
    for number in range(18):
        control.create_tenant(actor=ROOT, name=f"t{number}", changes={}).result(60)
    findings = evidence.examine_folder(tmp_path)
    assert findings.ok and findings.confirmed_seq == 17 and "the last row is" in findings.notes[0]


@pytest.mark.parametrize(
    "text", ["", "audit head seq=1 hash=0 at=x sig=y", "audit head seq=", "\x00\xff" * 50]
)
def test_text_that_is_not_a_head_is_ignored(text):
    assert list(heads_in([text])) == []


# ── exports ──


def test_an_export_shows_by_itself_whether_it_is_complete(tmp_path):
    from store import exports

    fill(tmp_path)
    key = read_key(tmp_path / "audit.key")
    lines = list(exports.lines_of(read_audit(tmp_path / "control.db"), key))
    path = tmp_path / "audit.jsonl"

    def problems(text: str, known: heads.SigningKey | None = key) -> list[str]:
        path.write_text(text)
        return evidence.examine(path, key=known).problems

    assert problems("".join(lines)) == []
    assert problems("".join(lines[:-1])) == [
        "the export is incomplete: its last line, the trailer, is missing"
    ]
    assert problems("".join(lines[1:]))[0].startswith("row 1: missing")
    assert problems("".join(lines[:4] + lines[5:]))[0].startswith("row 5: row 5 is missing")
    assert "row 3" in problems("".join(lines).replace("t2", "t9"))[0]
    assert "the export was changed" in problems("".join([*lines, lines[-2]]))[0]
    with pytest.raises(
        CorruptDatabaseError, match=r"line 2 of .* \(seq is \[2\] instead of a whole number\)"
    ):
        problems("".join(lines).replace('"seq":2}', '"seq":[2]}'))
    other = heads.SigningKey(b"another")
    assert problems("".join(exports.lines_of(read_audit(tmp_path / "control.db"), other))) == [
        "the export is not signed by this service: it was signed with another key, or it was forged"
    ]
    assert problems("".join(exports.lines_of(read_audit(tmp_path / "control.db"), None)), None) == []


def test_the_documented_recipe_for_checking_a_signature_works(tmp_path):
    fill(tmp_path)
    line = (tmp_path / "audit.heads").read_text().splitlines()[-1]
    seq, digest, at, _, signature = (part.partition("=")[2] for part in line.split()[2:])
    key = bytes.fromhex((tmp_path / "audit.key").read_text().strip())
    done = subprocess.run(
        ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{key.hex()}"],
        input=f"audit head\n{seq} {digest} {at}",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == signature
