"""Tests of the admin API's history routes, with a real core."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import httpx
import msgspec
import pytest

from appliance import calls
from appliance.actions.parameters import CreateKey, CreateTenant
from appliance.calls import AdminError
from appliance.client import AdminClient
from appliance.events.async_client import AsyncAdminClient
from appliance.history.pages import AlertLogQuery, SnapshotQuery, StoredQuery, TelemetryQuery
from appliance.history.reader import PastReader, alert_at, logged_request
from appliance.pages import AuditQuery, LogQuery
from appliance.snapshot import Snapshot, with_blocks
from store.alerts import AlertRow
from store.requests import LoggedRequest
from store.telemetry import RESOLUTIONS
from tests.core.conftest import Service, read_answer, running_core
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_core(tmp_path_factory.mktemp("core")) as service:
        yield service


def equal(live: Snapshot, past: Snapshot) -> None:
    """Assert that all values are equal within the precision at which one-second samples are recorded."""

    def compare(one: object, other: object, place: str) -> None:
        if isinstance(one, dict):
            assert isinstance(other, dict) and one.keys() == other.keys(), place
            for name in one:
                compare(one[name], other[name], f"{place}.{name}")
        elif isinstance(one, list):
            assert isinstance(other, list) and len(one) == len(other), place
            for number, (first, second) in enumerate(zip(one, other, strict=True)):
                compare(first, second, f"{place}[{number}]")
        elif isinstance(one, float):
            assert other == pytest.approx(one, rel=1e-6, abs=1e-5), place
        else:
            assert one == other, place

    compare(msgspec.to_builtins(live), msgspec.to_builtins(past), "snapshot")


def test_the_past_equals_what_a_reader_of_one_frame_per_second_has_seen(running: Service) -> None:
    asked = running.connect("m 100000")
    wait_until(lambda: any(one.generated_tokens for one in running.admin.in_flight()))
    live = []
    for _, one in zip(range(6), running.admin.snapshots(1), strict=False):
        live.append(msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Snapshot))
        running.admin.call(calls.KV_BLOCKS)
    assert any(one.requests and one.requests[0].generated_tokens for one in live)
    running.admin.cancel_request(live[-1].requests[0].request_id)
    asked.close()
    wait_until(lambda: _newest(running) > live[-1].at)
    reader = PastReader(running.state_dir / "history.db")
    for one in live:
        answer = running.admin.call(_snapshot(one.at + 0.0005))
        assert (answer.at, answer.resolution_s) == (pytest.approx(one.at, abs=0.001), 1)
        assert answer.details and answer.first <= answer.at <= answer.last
        equal(one, without_blocks(answer.snapshot))
        equal(one, without_blocks(reader.snapshot(SnapshotQuery(at=one.at + 0.0005)).snapshot))
    newest = running.admin.call(_snapshot(live[-1].at + 0.0005)).snapshot
    assert newest.requests[0].blocks == 1


def without_blocks(past: Snapshot) -> Snapshot:
    """Return the snapshot without its KV blocks. The history records them, but the event stream omits
    them."""
    past.kv = [msgspec.structs.replace(one, blocks=None) for one in past.kv]
    return with_blocks(past, {})


def _snapshot(at: float) -> calls.Call:  # type: ignore[type-arg]
    return calls.past_snapshot(SnapshotQuery(at=at))


def _newest(running: Service) -> float:
    """Return the time of the newest sample."""
    return running.admin.call(calls.past_snapshot(SnapshotQuery())).at


def test_links_to_neighbours_lead_through_all_seconds_in_both_directions(running: Service) -> None:
    wait_until(lambda: len(_seconds(running)) >= 5)
    seconds = _seconds(running)
    forward = [running.admin.call(_snapshot(seconds[0])).at]
    while len(forward) < len(seconds):
        forward.append(running.admin.call(_snapshot(forward[-1])).next)
    assert forward == seconds
    backward = [seconds[-1]]
    while (at := running.admin.call(_snapshot(backward[-1])).previous) is not None:
        backward.append(at)
    assert backward[::-1] == seconds


def _seconds(running: Service) -> list[float]:
    seconds, since, until = list[float](), 0.0, time.time() - 1.5
    while True:
        page = running.admin.call(calls.stored_telemetry(StoredQuery(since=since, until=until)))
        seconds += [row.at / 1000 for row in page.rows]
        if page.next is None:
            return seconds
        since = page.next


def test_metrics_over_time_are_selected_by_patterns(running: Service) -> None:
    wait_until(lambda: len(_seconds(running)) >= 3)
    query = TelemetryQuery(
        metrics="queue.running, batches[*].step", since=0, until=time.time(), resolution_s=1
    )
    found = running.admin.call(calls.telemetry(query))
    assert found.resolution_s == 1 and found.at == sorted(found.at)
    assert set(found.metrics) == {"queue.running", "batches[m-0].step"}
    assert all(len(column) == len(found.at) for column in found.metrics.values())
    few = msgspec.structs.replace(query, points=2)
    with pytest.raises(AdminError, match="more than 2 points"):
        running.admin.call(calls.telemetry(few))
    coarse = running.admin.call(calls.telemetry(msgspec.structs.replace(query, resolution_s=60)))
    assert coarse.resolution_s == 60


@pytest.mark.parametrize("pattern", ["*" * 200 + "!", "*e" * 100 + "!"])
def test_a_pattern_with_many_stars_does_not_block_the_service(running: Service, pattern: str) -> None:
    wait_until(lambda: len(_seconds(running)) >= 1)
    found = running.admin.call(calls.telemetry(TelemetryQuery(metrics=pattern, since=0, until=time.time())))
    assert not found.metrics


def test_without_a_time_the_newest_sample_is_returned(running: Service) -> None:
    wait_until(lambda: len(_seconds(running)) >= 2)
    before = _seconds(running)[-1]

    def is_newest() -> bool:
        found = running.admin.call(calls.past_snapshot(SnapshotQuery()))
        assert found.at == found.last >= before
        return found.next is None  # false if a sample was recorded while this one was read

    wait_until(is_newest)


def test_a_time_that_was_not_recorded_is_refused_with_the_recorded_times(running: Service) -> None:
    with pytest.raises(AdminError, match=r"nothing was recorded at 2001-.*choose a time from 20") as refused:
        running.admin.call(_snapshot(1_000_000_000.0))
    assert refused.value.status == 404


def test_a_read_key_may_read_the_past_and_others_may_not(running: Service) -> None:
    wait_until(lambda: len(_seconds(running)) >= 1)
    now = time.time()
    queries = [
        _snapshot(_seconds(running)[0]),
        calls.telemetry(TelemetryQuery(metrics="queue.*", since=now - 9, until=now)),
        calls.stored_telemetry(StoredQuery(since=now - 9, until=now)),
        calls.alert_log(AlertLogQuery(since=0, until=now)),
    ]
    keys = [str(running.admin.act(CreateKey(name="k", scopes=(s,))).key) for s in ("read", "inference")]  # type: ignore[attr-defined]
    for query in queries:
        AdminClient(running.run_dir, key=keys[0]).call(query)
        asyncio.run(AsyncAdminClient(running.run_dir, key=keys[0]).call(query))
        with pytest.raises(AdminError, match="scope"):
            AdminClient(running.run_dir, key=keys[1]).call(query)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/telemetry", "missing required field metrics"),
        ("/telemetry/snapshot?at=nan", "at='nan' is not valid"),
        ("/telemetry?metrics=&since=0&until=9", "metrics='' is not valid"),
        ("/telemetry?metrics=x&since=0&until=9&resolution_s=5", "resolution_s='5' is not valid"),
        ("/telemetry/stored?since=0&until=9&limit=201", "limit='201' is not valid"),
        ("/alert-log?since=0", "missing required field until"),
    ],
)
def test_a_wrong_parameter_is_named(running: Service, path: str, message: str) -> None:
    transport = httpx.HTTPTransport(uds=str(running.run_dir / "admin.sock"), verify=False)
    with httpx.Client(transport=transport, base_url="http://appliance", timeout=600) as client:
        response = client.get(path)
    assert response.status_code == 400 and message in response.json()["message"].replace("`", "")


def test_actions_and_log_lines_are_read_until_a_time(running: Service) -> None:
    running.admin.act(CreateTenant(name="before"))
    read_answer(running.connect("m 1"))
    between = time.time()
    running.admin.act(CreateTenant(name="after"))

    def tenants(until: float | None) -> set[str]:
        rows = running.admin.call(calls.audit(AuditQuery(action="tenants.create", until=until))).rows
        return {row.params["name"] for row in rows}

    assert tenants(None) - tenants(between) == {"after"}
    lines = running.admin.call(calls.log_lines(LogQuery(limit=1000, until=between))).lines
    assert lines and all(line.at <= between for line in lines)
    later = running.admin.call(calls.log_lines(LogQuery(limit=1000))).lines
    assert later[-1].at >= lines[-1].at


def a_row(**fields: object) -> LoggedRequest:
    known: dict[str, object] = {
        "request_id": "req-1",
        "created_at": 100.0,
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "tenant": "t",
        "prompt_tokens": 7,
        "finished_at": 110.0,
        "queue_ms": 2000.0,
        "ttft_ms": 5000.0,
        "generated_tokens": 50,
        "sequence": 1,
        "state": "ended",
        "double_ends": 0,
        **fields,
    }
    return LoggedRequest(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("at", "phase", "queue_s", "ttft_s"),
    [(101.0, "queued", 1.0, None), (103.0, "prefill", 2.0, None), (108.0, "decode", 2.0, 5.0)],
)
def test_a_logged_request_has_the_phase_of_the_time_and_no_invented_tokens(
    at: float, phase: str, queue_s: float, ttft_s: float | None
) -> None:
    found = logged_request(a_row(), at)
    assert (found.phase, found.queue_s, found.ttft_s) == (phase, queue_s, ttft_s)
    assert (found.age_s, found.generated_tokens, found.max_tokens) == (at - 100.0, None, None)
    assert logged_request(a_row(state="open", finished_at=None, queue_ms=None), at).phase is None


def test_a_logged_alert_has_the_state_of_the_time() -> None:
    row = AlertRow(
        id="a",
        rule="r",
        severity="warning",
        subject="m",
        description="w",
        cause="",
        remedy="",
        since=90.0,
        raised_at=100.0,
        acknowledged_by="uid:0",
        acknowledged_at=110.0,
        ended_at=120.0,
    )
    assert [alert_at(row, at).state for at in (105.0, 115.0, 125.0)] == [
        "firing",
        "acknowledged",
        "resolved",
    ]
    assert [alert_at(row, at).ended_at for at in (105.0, 125.0)] == [None, 120.0]


def test_coarse_resolutions_read_requests_from_the_request_log(running: Service, tmp_path: Path) -> None:
    """The test removes the one-second samples from a copy of the database, so only the one-minute samples and
    the request log remain."""
    import sqlite3

    asked = running.connect("m 100000")
    wait_until(lambda: any(row.state == "open" for row in running.rows()))
    wait_until(lambda: len(_seconds(running)) >= 12)
    wait_until(lambda: _coarse(running) > 0)
    name = next(row.request_id for row in running.rows() if row.state == "open")
    target = tmp_path / "history.db"
    with sqlite3.connect(f"file:{running.state_dir / 'history.db'}?mode=ro", uri=True) as source:
        copy = sqlite3.connect(target)
        source.backup(copy)
    copy.execute("DELETE FROM telemetry_1s")
    # The request arrived before the interval began, and the requests of other tests had already ended.
    copy.execute("UPDATE requests SET created_at = 0 WHERE request_id = ?", (name,))
    copy.execute("UPDATE requests SET created_at = 0, finished_at = 1 WHERE request_id != ?", (name,))
    copy.commit()
    copy.close()
    running.admin.cancel_request(name)
    asked.close()
    [row] = PastReader(target).stored(StoredQuery(since=0, until=time.time(), resolution_s=10, limit=1)).rows
    found = PastReader(target).snapshot(SnapshotQuery(at=row.at / 1000 + 5))
    assert found.resolution_s == 10 and not found.details
    assert [one.request_id for one in found.snapshot.requests] == [name]
    assert found.snapshot.requests[0].generated_tokens is None


def _coarse(running: Service) -> int:
    query = StoredQuery(since=0, until=time.time(), resolution_s=RESOLUTIONS[1].seconds)  # type: ignore[arg-type]
    return len(running.admin.call(calls.stored_telemetry(query)).rows)


def test_one_frame_of_the_past_is_printed(running: Service) -> None:
    wait_until(lambda: len(_seconds(running)) >= 2)
    second = _seconds(running)[0]

    def top(*words: str) -> str:
        command = [sys.executable, "-m", "appliance.cli", "top", "--run-dir", str(running.run_dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    at = datetime.fromtimestamp(second + 0.001).isoformat()
    printed = msgspec.json.decode(top("--at", at, "--json"), type=Snapshot)
    assert printed.at == pytest.approx(second, abs=0.001)
    assert "HISTORY " in top("--at", at, "--screen", "models")
