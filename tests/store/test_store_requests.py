from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from store.database import integrity_problems
from store.errors import MissingDatabaseError, SlowQueryError
from store.requests import LoggedRequest, RequestFilter, RequestPosition, RequestReader, RequestRow
from store.usage import UsageFilter, read_usage

ROOT = Path(__file__).resolve().parents[2]

FULL_END = {
    "finished_at": 1_000_002.5,
    "tenant": "acme",
    "key_id": "key_1",
    "peer": "uid:1000",
    "model": "demo",
    "version": "sha256:ab",
    "request_class": "P2",
    "stream": True,
    "prompt_tokens": 20,
    "cached_tokens": 16,
    "generated_tokens": 7,
    "billed_tokens": 6,
    "queue_ms": 1.25,
    "ttft_ms": 30.0,
    "itl_ms": 4.5,
    "e2e_ms": 2500.0,
    "finish_reason": "stop",
    "status": 200,
    "error": None,
    "batch_size_at_start": 3,
    "replica": "demo-0",
    "devices": "cpu",
    "preemptions": 1,
    "resubmissions": 2,
    "quota_tokens": 26,
    "retry": "anew",
    "retry_of": "req-0",
    "user": "user-42",
}


def plain(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


def test_a_request_is_open_from_its_admission_and_ends_with_all_values(history, request_row):
    history.log.open(request_row())
    assert history.writer.flush()
    [opened] = history.reader.changes(0)
    assert (opened.state, opened.finished_at, opened.status) == ("open", None, None)

    ended = request_row(**FULL_END)
    history.log.end(ended)
    assert history.writer.flush()
    [logged] = history.reader.changes(0)
    assert logged.state == "ended"
    assert {name: getattr(logged, name) for name in RequestRow.__struct_fields__} == msgspec.structs.asdict(
        ended
    )
    assert logged.sequence > opened.sequence
    assert history.reader.double_ends() == 0


def test_the_struct_and_the_table_have_the_same_columns(history):
    columns = [row[1] for row in plain(history.path, "PRAGMA table_xinfo(requests)")]
    assert sorted(columns) == sorted(LoggedRequest.__struct_encode_fields__)


def test_the_json_of_a_row_has_the_columns_names(history, request_row):
    history.log.end(request_row(**FULL_END))
    history.writer.flush()
    found = json.loads(msgspec.json.encode(history.reader.changes(0)[0]))
    assert (found["class"], found["state"], found["ttft_ms"], found["stream"]) == ("P2", "ended", 30.0, True)


def test_an_end_without_an_opening_is_kept(history, request_row):
    history.log.end(request_row(**FULL_END))
    assert history.writer.flush()
    assert [row.state for row in history.reader.changes(0)] == ["ended"]


def test_a_second_end_changes_nothing_and_is_counted(history, request_row, caplog):
    history.log.open(request_row())
    history.log.end(request_row(finished_at=1_000_001.0, status=200, finish_reason="stop"))
    history.writer.flush()
    history.log.end(request_row(finished_at=1_000_009.0, status=500, finish_reason="error"))
    history.log.end(request_row(finished_at=1_000_010.0, status=500, finish_reason="error"))
    assert history.writer.flush()
    [row] = history.reader.changes(0)
    assert (row.finished_at, row.status, row.finish_reason, row.double_ends) == (1_000_001.0, 200, "stop", 2)
    assert history.reader.double_ends() == 2
    assert "ended twice" in caplog.text


def test_an_opening_after_the_end_does_not_reopen_the_request(history, request_row, caplog):
    history.log.end(request_row(**FULL_END))
    history.log.open(request_row())
    assert history.writer.flush()
    assert [row.state for row in history.reader.changes(0)] == ["ended"]
    assert "opened twice" in caplog.text


def test_rows_passed_to_the_wrong_method_are_refused(history, request_row):
    with pytest.raises(ValueError, match=r"req-1 has finished_at 5\.0: pass the row"):
        history.log.open(request_row(finished_at=5.0))
    with pytest.raises(ValueError, match="req-1 has no finished_at"):
        history.log.end(request_row())


def test_malicious_text_loses_no_row(history, request_row):
    history.log.end(request_row("req-\udc80", finished_at=1.0, model="\ud800 model", error="x" * 1_000_000))
    history.log.end(request_row("req-\udc80", finished_at=2.0))
    assert history.writer.flush()
    [row] = history.reader.changes(0)
    assert (row.request_id, row.model, row.double_ends) == ("req-\\udc80", "\\ud800 model", 1)
    assert row.error is not None and len(row.error) == 2000
    assert history.writer.state().rejected_rows == 0
    assert history.reader.query(RequestFilter(model="\ud800 model"), 10) == [row]


def test_a_start_after_a_crash_closes_the_open_rows_and_no_others(tmp_path, open_history, request_row):
    first = open_history(tmp_path)
    first.log.end(request_row("done", **FULL_END))
    for number in range(3):
        first.log.open(request_row(f"lost-{number}"))
    first.close()

    second = open_history(tmp_path)
    sealed = second.log.seal_open_rows("the service was killed")
    second.log.open(request_row("new"))
    assert sealed.result(60) == 3
    assert second.writer.flush()
    rows = {row.request_id: row for row in second.reader.changes(0)}
    for number in range(3):
        row = rows[f"lost-{number}"]
        assert (row.state, row.status, row.finish_reason) == ("ended", 500, "interrupted")
        assert row.error == "the service was killed"
        assert row.finished_at is not None and abs(row.finished_at - time.time()) < 60
    assert (rows["done"].status, rows["new"].state) == (200, "open")
    assert second.log.seal_open_rows("again").result(60) == 1
    assert second.reader.double_ends() == 0


def test_followers_see_each_opening_and_each_end_in_order(history, request_row):
    start = history.reader.last_sequence()
    history.log.open(request_row("a"))
    history.log.open(request_row("b"))
    history.writer.flush()
    seen = history.reader.changes(start)
    assert [(row.request_id, row.state) for row in seen] == [("a", "open"), ("b", "open")]
    history.log.end(request_row("a", finished_at=2.0))
    history.writer.flush()
    seen = history.reader.changes(seen[-1].sequence)
    assert [(row.request_id, row.state) for row in seen] == [("a", "ended")]
    assert history.reader.changes(seen[-1].sequence) == []


def test_following_continues_across_a_restart(tmp_path, open_history, request_row):
    first = open_history(tmp_path)
    first.log.end(request_row("a", finished_at=2.0))
    first.close()
    last = first.reader.last_sequence()
    second = open_history(tmp_path)
    second.log.end(request_row("b", finished_at=3.0))
    second.writer.flush()
    assert [row.request_id for row in second.reader.changes(last)] == ["b"]


def test_queries_return_the_newest_matching_rows_oldest_first(history, request_row):
    for number in range(10):
        history.log.end(
            request_row(
                f"r{number}",
                created_at=1000.0 + number,
                finished_at=2000.0,
                tenant="acme" if number % 2 else "umbrella",
                model="demo",
                status=503 if number == 5 else 200,
                request_class="P3" if number == 7 else "P1",
            )
        )
    history.log.open(request_row("running", created_at=1010.0, tenant="acme"))
    history.writer.flush()

    def found(limit: int = 100, **wanted: object) -> list[str]:
        filter_ = RequestFilter(**wanted)  # type: ignore[arg-type]
        return [row.request_id for row in history.reader.query(filter_, limit)]

    assert found(tenant="acme", limit=3) == ["r7", "r9", "running"]
    assert found(since=1003.0, until=1005.0) == ["r3", "r4"]
    assert found(failed=True) == ["r5"]
    assert "running" not in found(failed=False) and len(found(failed=False)) == 9
    assert found(state="open") == ["running"]
    assert found(status=503, tenant="acme", model="demo") == ["r5"]
    assert found(request_class="P3") == ["r7"]
    assert found(request_id="r2") == ["r2"]
    assert found(tenant="nobody") == []
    assert len(found()) == 11
    with pytest.raises(ValueError, match="limit is 0"):
        found(limit=0)


def test_common_queries_use_an_index(history):
    for where, index in (
        ("WHERE sequence > 5 ORDER BY sequence", "requests_sequence"),
        ("WHERE created_at >= 5", "requests_created_at"),
        ("WHERE tenant = 'a' ORDER BY created_at", "requests_tenant"),
        ("WHERE model = 'a' ORDER BY created_at", "requests_model"),
        ("WHERE finished_at IS NULL", "requests_open"),
        ("WHERE double_ends > 0", "requests_double_ends"),
    ):
        plan = str(plain(history.path, f"EXPLAIN QUERY PLAN SELECT * FROM requests {where}"))
        assert index in plan and "TEMP B-TREE" not in plan


def test_the_views_show_times_usage_and_failures(history, request_row):
    day = 86_400.0
    history.log.end(request_row("a", **{**FULL_END, "created_at": day, "finished_at": day + 1.5}))
    history.log.end(request_row("b", **{**FULL_END, "created_at": day + 10, "finished_at": day + 11}))
    failed = {"status": 500, "error": "the replica died", "finish_reason": "error"}
    history.log.end(
        request_row("c", **{**FULL_END, **failed, "created_at": 2 * day, "finished_at": 2 * day + 1})
    )
    history.log.open(request_row("d", created_at=2 * day, tenant="acme", model="demo"))
    history.writer.flush()
    assert plain(
        history.path, "SELECT created_utc, finished_utc, state FROM request_summary WHERE request_id = 'a'"
    ) == [("1970-01-02 00:00:00.000", "1970-01-02 00:00:01.500", "ended")]
    usage = "SELECT day_utc, tenant, model, requests, failed_requests, billed_tokens FROM tenant_daily_usage"
    assert plain(history.path, usage) == [
        ("1970-01-02", "acme", "demo", 2, 0, 12),
        ("1970-01-03", "acme", "demo", 1, 1, 6),
    ]
    assert plain(history.path, "SELECT request_id, status, error FROM failed_requests") == [
        ("c", 500, "the replica died")
    ]


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(MissingDatabaseError, match=r"history\.db does not exist"):
        RequestReader(tmp_path / "history.db").changes(0)


def test_an_auditor_without_write_permission_can_follow_the_log_of_a_running_service(
    public_folder, open_history, request_row, run_unprivileged
):
    (public_folder / "history.db").touch(0o644)
    history = open_history(public_folder)
    history.log.end(request_row("a", finished_at=2.0))
    history.writer.flush()
    source = "print(store.requests.RequestReader(Path(sys.argv[1])).changes(0)[-1].request_id)"
    assert run_unprivileged(source, history.path) == "a"


def test_kill_9_loses_no_visible_row_and_a_restart_closes_the_open_ones(tmp_path, open_history, eventually):
    source = """
import sys, time; from pathlib import Path
import msgspec
from store.requests import RequestLog, RequestRow
from store.schemas import HISTORY
from store.writer import Writer
writer = Writer(Path(sys.argv[1]), HISTORY, synchronous="NORMAL"); writer.start()
log = RequestLog(writer)
print("started", flush=True)
streams = []
for number in range(10**9):
    row = RequestRow(request_id=f"r{number}", created_at=time.time(), endpoint="/v1/completions")
    log.open(row)
    streams.append(row)
    if len(streams) > 64:
        row = msgspec.structs.replace(streams.pop(0), finished_at=time.time(), status=200)
        log.end(row)
    time.sleep(0.001)
"""
    command = [sys.executable, "-c", source, tmp_path / "history.db"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    reader = RequestReader(tmp_path / "history.db")
    eventually(lambda: len(reader.query(RequestFilter(state="ended"), 10**6)) > 500)
    seen = reader.changes(0, 10**6)
    process.kill()
    process.communicate()

    history = open_history(tmp_path)
    assert integrity_problems(history.path) == []
    rows = {row.request_id: row for row in history.reader.changes(0, 10**6)}
    assert set(rows) == {f"r{number}" for number in range(len(rows))}
    for row in seen:
        assert row.state == "open" or rows[row.request_id].state == "ended"
    assert len(rows) >= len(seen)
    still_open = sum(row.state == "open" for row in rows.values())
    assert still_open >= 64
    assert history.log.seal_open_rows("killed").result(60) == still_open
    assert history.reader.query(RequestFilter(state="open"), 1) == []


def test_a_query_that_takes_too_long_is_interrupted(history, request_row):
    for number in range(2000):
        history.log.end(request_row(f"req-{number}", finished_at=1_000_001.0))
    history.writer.flush()
    reader = RequestReader(history.path, limit_s=0.0)
    with pytest.raises(SlowQueryError, match="longer than the limit of 0 s: select fewer rows"):
        for _ in range(100):
            reader.query(RequestFilter(failed=True), 1)


def test_a_page_ends_with_the_row_whose_texts_exceed_its_size(history, request_row):
    for number in range(5):
        history.log.end(
            request_row(f"req-{number}", finished_at=1_000_001.0, created_at=float(number), error="x" * 1000)
        )
    history.writer.flush()
    rows = RequestReader(history.path, limit_bytes=1500).query(RequestFilter(), 5)
    assert [row.request_id for row in rows] == ["req-3", "req-4"]
    older = RequestReader(history.path).query(RequestFilter(), 5, RequestPosition(3.0, "req-3"))
    assert [row.request_id for row in older] == ["req-0", "req-1", "req-2"]


def test_the_usage_of_a_day_outlives_the_rows_of_its_requests(history, request_row):
    day = 1_000_000 // 86400 * 86400.0
    ended = {"finished_at": day + 5, "version": "v", "model": "m", "tenant": "t", "key_id": "k"}
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "billed_tokens": 3, "quota_tokens": 13, "status": 200}
    for number in range(3):
        history.log.end(request_row(f"req-{number}", **ended, **counts))
    history.log.end(request_row("req-2", **ended, **counts))  # A request is counted only once.
    history.log.end(request_row("refused", **{**ended, "status": 429}, prompt_tokens=10))
    history.log.open(request_row("open"))
    history.writer.flush()
    history.writer.call(lambda connection: connection.execute("DELETE FROM requests")).result(60)
    (row,) = read_usage(history.path, UsageFilter(), 10, None)
    assert row == ("1970-01-12", "t", "k", "m", 4, 1, 30, 12, 9)
    assert read_usage(history.path, UsageFilter(since_day="1970-01-13"), 10, None) == []
    assert read_usage(history.path, UsageFilter(until_day="1970-01-12", tenant="t"), 10, None) == [row]


def test_requests_that_were_unfinished_at_a_given_time_are_found(history, request_row, monkeypatch):
    for number in range(6):
        row = request_row(f"req-{number}", created_at=100.0 + number)
        history.log.open(row)
        if number % 2:
            history.log.end(msgspec.structs.replace(row, finished_at=104.5))
    history.writer.flush()

    def found(at: float, limit: int = 10) -> list[str]:
        return [row.request_id for row in history.reader.unfinished(at, limit)]

    assert found(103.5) == ["req-0", "req-1", "req-2", "req-3"]
    assert found(104.5) == ["req-0", "req-2", "req-4"]
    assert found(104.5, limit=2) == ["req-0", "req-2"]
    monkeypatch.setattr("store.requests.MAX_EXAMINED", 2)
    assert found(104.5) == ["req-4"]
