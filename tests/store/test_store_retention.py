"""Tests of retention: expired rows are removed in small batches, and the space that they used is freed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial

import pytest

from store import retention
from store.contents import MAX_WAITING_BYTES, Content, ContentLog, read_contents
from store.requests import RequestFilter
from store.schemas import CONTENTS
from store.writer import Writer


@pytest.fixture
def contents(tmp_path):
    writer = Writer(tmp_path / "contents.db", CONTENTS, synchronous="NORMAL")
    writer.start()
    yield writer
    writer.close()


def content(
    request_id: str = "req-1", tenant: str = "t", created_at: float = 0.0, text: str | None = "hello"
) -> Content:
    return Content(
        request_id=request_id,
        part="prompt",
        number=0,
        tenant=tenant,
        created_at=created_at,
        sha256="0" * 64,
        bytes=len(text or ""),
        text=text,
    )


def until_done(writer: Writer, operation: object) -> list[retention.Removed]:
    done = []
    while not done or done[-1].more:
        done.append(writer.call(operation).result(60))  # type: ignore[arg-type]
        assert len(done) < 1000
    return done


def test_expired_requests_are_removed_in_small_batches_and_open_ones_are_kept(history, request_row):
    for number in range(250):
        history.log.end(request_row(f"req-{number}", created_at=float(number), finished_at=number + 1.0))
    history.log.open(request_row("req-open", created_at=0.0))
    history.log.end(request_row("req-new", created_at=1e9, finished_at=1e9 + 1))
    history.writer.flush()
    done = until_done(history.writer, partial(retention.remove_requests, before=200.0))
    assert [batch.rows for batch in done if batch.rows] == [100, 100]
    left = {row.request_id for row in history.reader.query(RequestFilter(), 1000)}
    assert left == {"req-open", "req-new", *(f"req-{number}" for number in range(200, 250))}


def test_the_last_changed_row_is_kept_so_that_clients_that_follow_can_continue(history, request_row):
    for number in range(3):
        history.log.end(request_row(f"req-{number}", created_at=0.0, finished_at=1.0))
    history.writer.flush()
    until_done(history.writer, partial(retention.remove_requests, before=100.0))
    assert [row.request_id for row in history.reader.changes(0)] == ["req-2"]
    assert history.reader.last_sequence() == 3


def test_contents_are_removed_after_the_tenants_retention_time_or_the_default_one(contents):
    log = ContentLog(contents)
    for tenant in ("short", "long", "ever", "gone"):
        for age in (1, 5, 9):
            log.keep([content(f"{tenant}-{age}", tenant, created_at=100.0 - age)])
    contents.flush()
    before = {"short": 98.0, "long": 94.0, "ever": None}
    until_done(contents, partial(retention.remove_contents, before=before, otherwise=92.0))
    with closing(sqlite3.connect(contents.path)) as connection:
        left = sorted(name for (name,) in connection.execute("SELECT request_id FROM contents"))
    assert left == ["ever-1", "ever-5", "ever-9", "gone-1", "gone-5", "long-1", "long-5", "short-1"]


def test_space_is_returned_to_the_disk_in_small_batches(contents):
    log = ContentLog(contents)
    text = "word " * 20_000
    for number in range(100):
        log.keep([content(f"req-{number}", text=text, created_at=float(number))])
        contents.flush()
    pages = contents.call(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0]).result(60)
    done = until_done(contents, partial(retention.remove_contents, before={"t": 90.0}, otherwise=None))
    assert sum(batch.rows for batch in done) == 90
    most = retention.BATCH_BYTES // len(text) + 1
    assert max(batch.rows for batch in done) <= most
    assert max(batch.pages for batch in done) <= retention.BATCH_PAGES
    left = contents.call(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0]).result(60)
    assert left < pages * 0.2
    contents.close()
    assert contents.path.stat().st_size == left * 4096


def test_removed_contents_are_nowhere_in_the_file(contents):
    log = ContentLog(contents)
    log.keep(
        [content("req-1", text="a most secret phrase"), content("req-2", text="another", created_at=50.0)]
    )
    contents.flush()
    until_done(contents, partial(retention.remove_contents, before={"t": 10.0}, otherwise=None))
    contents.close()
    data = contents.path.read_bytes()
    assert b"another" in data and b"secret phrase" not in data


def test_contents_are_read_back_prompts_first_and_only_by_the_services_user(contents):
    log = ContentLog(contents)
    answer = Content(
        request_id="req-1",
        part="answer",
        number=1,
        tenant="t",
        created_at=0.0,
        sha256="1" * 64,
        bytes=9,
        text="[key redacted]",
        truncated=True,
        redactions=1,
    )
    log.keep([answer, content()])
    log.keep([content("other", text=None)])
    contents.flush()
    assert read_contents(contents.path, "req-1") == [content(), answer]
    assert read_contents(contents.path, "other")[0].text is None
    for suffix in ("", "-wal", "-shm"):
        assert contents.path.with_name(f"contents.db{suffix}").stat().st_mode & 0o777 == 0o600, suffix


def test_waiting_texts_take_a_bounded_amount_of_memory(contents):
    contents.close()
    # The writer has not been started, so nothing is committed.
    stuck = Writer(contents.path, CONTENTS, synchronous="NORMAL")
    log = ContentLog(stuck)
    large = "x" * (MAX_WAITING_BYTES // 4)
    kept = [log.keep([content(f"req-{number}", text=large)]) for number in range(6)]
    assert kept == [True, True, True, False, False, False] and log.dropped == 3
    assert stuck.state().dropped_rows == 3, "Status and metrics show this count."
    assert log.keep([content("small")])
    stuck.start()
    stuck.flush()
    assert log.keep([content("again", text=large)])
    stuck.close()


def busy_timeout(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA busy_timeout").fetchone()[0])


def test_emptying_the_log_does_not_wait_for_readers(contents):
    log = ContentLog(contents)
    log.keep([content("req-1", text="a most secret phrase", created_at=1.0)])
    contents.flush()
    wal = contents.path.with_name(contents.path.name + "-wal")
    with closing(sqlite3.connect(contents.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM contents").fetchone()
        until_done(contents, partial(retention.remove_contents, before={}, otherwise=2.0))
        patience = contents.call(busy_timeout).result(60)
        # If the writer waited for the reader, the test would time out.
        contents.call(lambda connection: connection.execute("PRAGMA busy_timeout=60000").fetchone()).result(
            60
        )
        assert not retention.empty_log(contents).result(60).done
    assert b"secret phrase" in wal.read_bytes()
    assert retention.empty_log(contents).result(60).done
    assert b"secret phrase" not in wal.read_bytes()
    assert patience > 0 and contents.call(busy_timeout).result(60) == 60000


def test_removed_contents_are_in_no_file_once_the_log_is_emptied(contents):
    log = ContentLog(contents)
    for number in range(20):
        log.keep([content(f"req-{number}", text="a most secret phrase", created_at=1.0)])
    contents.flush()
    files = [contents.path, contents.path.with_name(contents.path.name + "-wal")]
    until_done(contents, partial(retention.remove_contents, before={}, otherwise=2.0))
    assert any(b"secret phrase" in path.read_bytes() for path in files)
    retention.empty_log(contents).result(60)
    assert not any(b"secret phrase" in path.read_bytes() for path in files)
