from __future__ import annotations

import hashlib
import json
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store import audit
from store.control_schema import CONTROL
from tests.examples import examples


def chain(length: int) -> sqlite3.Connection:
    """Return an in-memory audit chain without the triggers that protect it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for migration in CONTROL.migrations:
        for statement in migration.statements:
            connection.execute(statement)
    for number in range(1, length + 1):
        append(connection, number)
    connection.execute("DROP TRIGGER audit_rows_do_not_change")
    connection.execute("DROP TRIGGER audit_rows_do_not_go")
    return connection


def entry(number: int) -> audit.Entry:
    actor = audit.Actor("uid:0", "box", f"act{number}")
    return audit.outcome(
        actor, "keys.create", {"name": f"n{number}", "id": number}, "ok", None, {"id": number}
    )


def append(connection: sqlite3.Connection, number: int) -> audit.Head:
    connection.execute("BEGIN")
    head = audit.append(connection, entry(number))
    connection.execute("COMMIT")
    return head


def forge(connection: sqlite3.Connection, first: int) -> None:
    """Recompute every hash from row `first` on, as a forger who knows the format would."""
    for row in [row for row in audit.all_rows(connection) if row.seq >= first]:
        before = connection.execute(
            "SELECT hash FROM audit WHERE seq < ? ORDER BY seq DESC", (row.seq,)
        ).fetchone()
        row = row._replace(previous_hash=before[0] if before else audit.GENESIS_HASH)
        connection.execute(
            "UPDATE audit SET previous_hash = ?, hash = ? WHERE seq = ?",
            (row.previous_hash, audit.row_hash(row), row.seq),
        )


def test_an_intact_chain_passes_verification():
    connection = chain(20)
    verdict = audit.verify(connection, [audit.head(connection)])
    assert verdict.ok and verdict.rows == 20 and verdict.head == audit.head(connection)
    assert audit.verify(chain(0)) == audit.Verdict(0, audit.Head(0, audit.GENESIS_HASH))


def test_anybody_can_check_a_hash_with_the_documented_recipe():
    connection = chain(2)
    connection.row_factory = sqlite3.Row
    row = dict(connection.execute("SELECT * FROM audit WHERE seq = 2").fetchone())
    previous, found = row.pop("previous_hash"), row.pop("hash")
    text = json.dumps(
        {name: value for name, value in row.items() if value is not None},
        sort_keys=True,
        separators=(",", ":"),
    )
    assert hashlib.sha256((previous + text).encode()).hexdigest() == found
    assert row["params"] == '{"id":2,"name":"n2"}'


def test_rows_written_before_intents_existed_keep_their_hashes():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    *before, phases = CONTROL.migrations
    for migration in before:
        for statement in migration.statements:
            connection.execute(statement)
    content = {"seq": 1, "at": "2026", "actor": "uid:0", "action": "a", "params": "{}", "result": "ok"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256((audit.GENESIS_HASH + text).encode()).hexdigest()
    connection.execute(
        "INSERT INTO audit (seq, at, actor, action, params, result, previous_hash, hash) "
        "VALUES (1, '2026', 'uid:0', 'a', '{}', 'ok', ?, ?)",
        (audit.GENESIS_HASH, digest),
    )
    for statement in phases.statements:
        connection.execute(statement)
    append(connection, 2)
    verdict = audit.verify(connection, [audit.Head(1, digest)])
    assert verdict.ok and verdict.rows == 2
    connection.execute("DROP TRIGGER audit_rows_do_not_change")
    connection.execute("UPDATE audit SET host = 'elsewhere' WHERE seq = 1")
    assert audit.verify(connection).broken_seq == 1


@given(data=st.data())
@examples(150)
def test_one_changed_byte_anywhere_is_found_at_its_row(data):
    connection = chain(5)
    seq = data.draw(st.integers(1, 5))
    column = data.draw(
        st.sampled_from(
            [
                "at",
                "actor",
                "host",
                "act",
                "phase",
                "action",
                "params",
                "result",
                "after",
                "previous_hash",
                "hash",
            ]
        )
    )
    text = connection.execute(f"SELECT {column} FROM audit WHERE seq = ?", (seq,)).fetchone()[0]
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda character: character != text[place]))
    changed = text[:place] + other + text[place + 1 :]
    connection.execute(f"UPDATE audit SET {column} = ? WHERE seq = ?", (changed, seq))
    verdict = audit.verify(connection)
    assert not verdict.ok
    assert verdict.broken_seq == seq
    assert "rewritten" in (verdict.problem or "")


@pytest.mark.parametrize("value", [b"uid:0", b"\xff"], ids=["no text", "no UTF-8"])
def test_a_value_that_is_no_longer_text_is_found_at_its_row(value):
    connection = chain(3)
    cast = "?" if value == b"uid:0" else "CAST(? AS TEXT)"
    connection.execute(f"UPDATE audit SET actor = {cast} WHERE seq = 2", (value,))
    assert audit.verify(connection).broken_seq == 2


@pytest.mark.parametrize("column", ["host", "act", "phase", "after"])
def test_a_removed_or_added_value_is_found_at_its_row(column):
    connection = chain(3)
    connection.execute(f"UPDATE audit SET {column} = NULL WHERE seq = 2")
    assert audit.verify(connection).broken_seq == 2
    connection = chain(3)
    connection.execute("UPDATE audit SET note = '' WHERE seq = 3")
    assert audit.verify(connection).broken_seq == 3


_RENUMBER = "".join(f"UPDATE audit SET seq = {seq - 1} WHERE seq = {seq};" for seq in range(6, 11))


@pytest.mark.parametrize(
    ("removal", "broken_seq", "problem"),
    [
        ("DELETE FROM audit WHERE seq = 5", 5, "missing: row 4 is followed by row 6"),
        ("DELETE FROM audit WHERE seq = 1", 1, "missing: the chain begins with row 2"),
        ("DELETE FROM audit", 1, "rows 1 to 10 are missing: the chain is empty"),
        (
            f"DELETE FROM audit WHERE seq = 5; {_RENUMBER} UPDATE sqlite_sequence SET seq = 9",
            5,
            "rewritten: its previous_hash is not the hash of row 4",
        ),
        ("DELETE FROM audit WHERE seq > 7", 8, "rows 8 to 10 are missing from the end of the chain"),
    ],
    ids=["middle", "first", "all", "renumbered", "end"],
)
def test_removed_rows_are_detected_without_a_recorded_head(removal, broken_seq, problem):
    connection = chain(10)
    connection.executescript(removal)
    verdict = audit.verify(connection)
    assert (verdict.broken_seq, verdict.problem) == (broken_seq, problem)


def test_a_first_row_with_a_previous_hash_does_not_name_a_row_0():
    connection = chain(2)
    connection.execute("UPDATE audit SET previous_hash = ? WHERE seq = 1", ("1" * 64,))
    verdict = audit.verify(connection)
    assert verdict.broken_seq == 1
    assert verdict.problem == "rewritten: its previous_hash is not that of a chain's first row (64 zeros)"


@pytest.mark.parametrize(
    ("removal", "broken_seq"),
    [
        ("DELETE FROM audit WHERE seq > 7; UPDATE sqlite_sequence SET seq = 7", 8),
        ("DELETE FROM audit; DELETE FROM sqlite_sequence", 1),
    ],
)
def test_rows_removed_from_the_end_without_a_trace_are_detected_only_with_a_recorded_head(
    removal, broken_seq
):
    connection = chain(10)
    recorded = audit.head(connection)
    connection.executescript(removal)
    assert audit.verify(connection).ok
    assert audit.verify(connection, [recorded]).broken_seq == broken_seq


def test_a_chain_rewritten_with_new_hashes_is_detected_with_a_recorded_head():
    connection = chain(10)
    recorded = audit.head(connection)
    connection.execute("UPDATE audit SET actor = 'uid:1000' WHERE seq = 4")
    forge(connection, 4)
    assert audit.verify(connection).ok
    verdict = audit.verify(connection, [recorded])
    assert verdict.broken_seq == 10 and "but a recorded head has" in (verdict.problem or "")


def test_the_recorded_heads_show_from_which_row_on_a_chain_was_rewritten():
    connection = chain(10)
    recorded = [audit.Head(row.seq, row.hash) for row in audit.all_rows(connection) if row.seq in (2, 6, 10)]
    connection.execute("UPDATE audit SET actor = 'uid:1000' WHERE seq = 4")
    forge(connection, 4)
    verdict = audit.verify(connection, recorded)
    assert verdict.broken_seq == 6
    assert "an earlier one was rewritten (rows up to 2 are correct)" in (verdict.problem or "")


def test_two_recorded_heads_of_one_row_that_differ_are_a_fault():
    connection = chain(3)
    good = audit.head(connection)
    assert audit.verify(connection, [good, good]).ok
    assert audit.verify(connection, [good, audit.Head(3, "1" * 64)]).broken_seq == 3


def test_an_intent_is_listed_as_unfinished_until_it_has_a_result():
    connection = chain(2)
    actor = audit.Actor("uid:0", None, "open")
    for made in (audit.intent(actor, "models.load", {}), audit.intent(actor._replace(act="x"), "a.b", {})):
        connection.execute("BEGIN")
        audit.append(connection, made)
        connection.execute("COMMIT")
    assert [row.act for row in audit.unfinished(connection, 100)] == ["open", "x"]
    assert [row.act for row in audit.unfinished(connection, 1)] == ["x"]
    connection.execute("BEGIN")
    audit.append(connection, audit.outcome(actor, "models.load", {}, "ok"))
    connection.execute("COMMIT")
    assert [row.act for row in audit.unfinished(connection, 100)] == ["x"]


def test_a_chain_that_lost_its_end_does_not_hide_the_gap_when_it_grows():
    connection = chain(5)
    connection.execute("DELETE FROM audit WHERE seq > 3")
    assert append(connection, 9).seq == 6
    assert audit.verify(connection).broken_seq == 4


def test_an_audit_row_can_be_appended_only_within_a_transaction():
    connection = chain(1)
    with pytest.raises(ValueError, match=r"keys\.create was appended outside a transaction"):
        audit.append(connection, entry(1))


def test_values_that_are_not_json_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        audit.outcome("uid:0", "b", {"x": float("nan")}, "ok")
    with pytest.raises(TypeError):
        audit.outcome("uid:0", "b", {"x": object()}, "ok")
    with pytest.raises(TypeError):
        audit.outcome("uid:0", "b", {}, "ok", before=object())
