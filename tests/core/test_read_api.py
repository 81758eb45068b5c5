"""Tests of the admin API's lists on a real core: pages, filters and streams."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from appliance import calls
from appliance.actions.parameters import CreateKey, CreateTenant, ResumeTenant, SuspendTenant
from appliance.admin.streams import MAX_STREAMS
from appliance.admin.usage import MAX_DAILY_ROWS
from appliance.calls import AdminError
from appliance.client import AdminClient, ServiceNotRunningError
from appliance.events.async_client import AsyncAdminClient
from appliance.pages import AuditQuery, LogQuery, NamedRequest, RequestLogQuery, UsageQuery
from tests.core.conftest import Service, read_answer, running_core
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a core that has answered five requests, the third with four tokens."""
    with running_core(tmp_path_factory.mktemp("core")) as service:
        for tokens in (1, 2, 4, 2, 1):
            read_answer(service.connect(f"m {tokens}"))
        wait_until(lambda: [row.state for row in service.rows()] == ["ended"] * 5)
        yield service


def raw(service: Service, path: str, key: str | None = None) -> httpx.Response:
    transport = httpx.HTTPTransport(uds=str(service.run_dir / "admin.sock"), verify=False)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(transport=transport, base_url="http://appliance", timeout=600) as client:
        return client.get(path, headers=headers)


def key(service: Service, *scopes: str) -> str:
    created = service.admin.act(CreateKey(name="k", scopes=scopes))
    return str(created.key)  # type: ignore[attr-defined]


def test_pages_of_the_request_log_join_without_gap_or_repetition(running: Service) -> None:
    whole = running.admin.call(calls.request_log(RequestLogQuery()))
    assert len(whole.rows) == 5 and whole.next is None
    assert [row.created_at for row in whole.rows] == sorted(
        (row.created_at for row in whole.rows), reverse=True
    )
    pages, before = [], None
    while True:
        page = running.admin.call(calls.request_log(RequestLogQuery(limit=2, before=before)))
        pages.append([row.request_id for row in page.rows])
        if (before := page.next) is None:
            break
    assert [len(page) for page in pages] == [2, 2, 1]
    assert [one for page in pages for one in page] == [row.request_id for row in whole.rows]


def test_a_filter_of_the_request_log_is_applied_by_the_service(running: Service) -> None:
    every = running.admin.call(calls.request_log(RequestLogQuery())).rows

    def found(**fields: Any) -> list[str]:
        page = running.admin.call(calls.request_log(RequestLogQuery(**fields)))
        return [row.request_id for row in page.rows]

    assert found(request_id=every[3].request_id) == [every[3].request_id]
    assert found(since=every[1].created_at) == [row.request_id for row in every[:2]]
    assert found(until=every[1].created_at) == [row.request_id for row in every[2:]]
    assert found(tenant="nobody") == found(failed=True) == found(state="open") == []
    assert len(found(model="m", request_class="P1", failed=False, status=200)) == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/request-log?limit=0", "limit='0' is not valid"),
        ("/request-log?limit=1001", "limit='1001' is not valid"),
        ("/request-log?since=nan", "since='nan' is not valid"),
        ("/request-log?class=P4", "class='P4' is not valid"),
        ("/request-log?before=yesterday", "before='yesterday' is not valid: use the 'next' field"),
        ("/request-log?colour=red", "'colour' is not a query parameter of /request-log; available"),
        ("/request-log?limit=1&limit=2", "'limit' is given more than once"),
        ("/audit?before=x", "before='x' is not valid"),
        ("/usage?by=colour", "by='colour' is not valid"),
        ("/usage?since=2026-13-01", "since='2026-13-01' is not valid"),
        ("/logs?level=loud", "level='loud' is not valid"),
    ],
)
def test_a_wrong_query_parameter_is_named_with_its_value(running: Service, path: str, message: str) -> None:
    response = raw(running, path)
    assert response.status_code == 400 and message in response.json()["message"]


def test_a_read_key_sees_every_list_and_changes_nothing(running: Service) -> None:
    secret = key(running, "read")
    reader = AdminClient(running.run_dir, key=secret)
    assert len(reader.call(calls.request_log(RequestLogQuery())).rows) == 5
    assert reader.call(calls.audit(AuditQuery())).rows
    assert reader.call(calls.log_lines(LogQuery())).lines
    for call in (
        calls.STATUS,
        calls.IN_FLIGHT,
        calls.KV_BLOCKS,
        calls.KEYS,
        calls.TENANTS,
        calls.PEERS,
        calls.CONFIGURATION,
    ):
        reader.call(call)
    with pytest.raises(AdminError, match="scope 'admin'"):
        reader.act(CreateTenant(name="never"))
    assert "never" not in [tenant.name for tenant in running.admin.tenants()]


@pytest.mark.parametrize("path", ["/request-log", "/audit", "/logs", "/request-log?follow=true"])
def test_a_key_without_read_scope_sees_no_list(running: Service, path: str) -> None:
    assert raw(running, path, key(running, "inference")).status_code == 403
    assert raw(running, path, "ak-wrong").status_code == 401


def collected(client: AdminClient, call: calls.Call[Any]) -> tuple[list[Any], threading.Thread]:
    """Follow a stream in a thread. Return the list to which the thread appends the values, and the thread."""
    values: list[Any] = []

    def follow() -> None:
        try:
            for value in client.follow(call):
                values.append(value)
        except ServiceNotRunningError:
            pass  # the service was killed at the end of the tests

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return values, thread


def test_a_client_that_follows_gets_each_request_once_when_it_ends(running: Service) -> None:
    page = running.admin.call(calls.request_log(RequestLogQuery()))
    query = RequestLogQuery(after=page.sequence)
    ended, _ = collected(running.admin, calls.follow_request_log(query))
    opened, _ = collected(
        running.admin, calls.follow_request_log(msgspec.structs.replace(query, state="open"))
    )
    other, _ = collected(
        running.admin, calls.follow_request_log(msgspec.structs.replace(query, model="other"))
    )
    asked = running.connect("m 100000")
    wait_until(lambda: len(opened) == 1, description="the admitted request")
    running.admin.cancel_request(opened[0].request_id)
    read_answer(asked)
    wait_until(lambda: len(ended) == 1, description="the end of the cancelled request")
    read_answer(running.connect("m 2"))
    wait_until(lambda: len(ended) == 2, description="the ended requests")
    assert [row.state for row in ended] == ["ended", "ended"] and other == []
    assert ended[0].request_id == opened[0].request_id


def test_a_client_that_follows_gets_each_action_when_it_begins_and_when_it_ends(running: Service) -> None:
    running.admin.act(CreateTenant(name="followed"))
    after = running.admin.call(calls.audit(AuditQuery())).sequence
    actions, _ = collected(running.admin, calls.follow_audit(AuditQuery(after=after, action="tenants.")))
    running.admin.act(SuspendTenant(name="followed"))
    key(running, "read")
    running.admin.act(ResumeTenant(name="followed"))
    wait_until(lambda: [one.result for one in actions].count("ok") == 2, description="two results")
    named = [one.action for one in actions if one.result == "ok"]
    assert named == ["tenants.suspend", "tenants.resume"] and actions[-1].params == {"name": "followed"}


def test_pages_of_the_audit_trail_join_without_gap_or_repetition(running: Service) -> None:
    whole = running.admin.call(calls.audit(AuditQuery(limit=1000))).rows
    first = running.admin.call(calls.audit(AuditQuery(limit=1)))
    assert first.next is not None
    rest = running.admin.call(calls.audit(AuditQuery(limit=1000, before=first.next))).rows
    assert [one.seq for one in first.rows + rest] == [one.seq for one in whole]


def test_the_log_lines_of_the_core_can_be_read_filtered_and_followed(running: Service) -> None:
    page = running.admin.call(calls.log_lines(LogQuery(text="IS READY")))
    assert [line.message for line in page.lines] == ["front-0 is ready"]
    lines, _ = collected(running.admin, calls.follow_log(LogQuery(after=page.number, text="tenants.create")))
    running.admin.act(CreateTenant(name="logged"))
    wait_until(lambda: bool(lines), description="the new line")
    assert "tenants.create by uid:" in lines[0].message and lines[0].level == "info"


def test_the_asynchronous_client_reads_the_same(running: Service) -> None:
    async def read() -> tuple[list[NamedRequest], NamedRequest]:
        client = AsyncAdminClient(running.run_dir)
        page = await client.call(calls.request_log(RequestLogQuery()))
        stream = client.follow(calls.follow_request_log(RequestLogQuery(after=page.sequence)))
        following = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(lambda: read_answer(running.connect("m 3")))
        row = await asyncio.wait_for(following, 60)
        await stream.aclose()
        with pytest.raises(AdminError, match="already exists"):
            await client.call(calls.act(CreateTenant(name="local")))
        with pytest.raises(AdminError, match="limit"):
            await anext(client.follow(calls.follow_request_log(RequestLogQuery(limit=0))))
        return page.rows, row

    rows, row = asyncio.run(read())
    again = running.admin.call(calls.request_log(RequestLogQuery()))
    assert [row, *rows] == again.rows


def test_the_asynchronous_client_says_that_no_service_runs(tmp_path: Path) -> None:
    with pytest.raises(ServiceNotRunningError, match="appliance serve"):
        asyncio.run(AsyncAdminClient(tmp_path).call(calls.STATUS))


def test_streams_leave_capacity_for_calls_and_end_when_the_service_stops(
    make_service: Callable[..., Service],
) -> None:
    service = make_service().start_and_wait()
    call = calls.follow_log(LogQuery(after=0))
    streams = [collected(service.admin, call) for _ in range(MAX_STREAMS)]
    wait_until(lambda: all(values for values, _ in streams), description="every stream to begin")
    with pytest.raises(AdminError, match=f"{MAX_STREAMS} streams are open") as refused:
        next(service.admin.follow(call))
    assert refused.value.status == 503
    assert service.admin.status().state == "ready"
    assert service.stop() == 0
    for _, thread in streams:
        thread.join(60)
        assert not thread.is_alive()


def test_an_unfinished_request_shows_its_age_class_phase_and_tokens_so_far(
    make_service: Callable[..., Service],
) -> None:
    service = make_service().start_and_wait()
    assert service.admin.in_flight() == []
    asked = service.connect("m 100000")
    lines = asked.makefile()

    def decoding() -> bool:
        (one,) = service.admin.in_flight() or [None]
        return one is not None and one.phase == "decode" and (one.generated_tokens or 0) > 2

    wait_until(decoding, description="the first tokens")
    (one,) = service.admin.in_flight()
    assert lines.readline() == "1\n"
    assert (one.class_name, one.tenant, one.front, one.replica) == ("P1", "t", "front-0", "m-0")
    assert one.age_s > 0 and one.queue_s is not None and one.ttft_s is not None
    before = one.generated_tokens or 0
    wait_until(
        lambda: (service.admin.in_flight()[0].generated_tokens or 0) > before, description="more tokens"
    )
    service.admin.cancel_request(one.request_id)
    wait_until(lambda: service.admin.in_flight() == [])
    lines.close()
    asked.close()


def test_a_report_of_too_many_daily_rows_is_refused_with_advice(running: Service) -> None:
    day = (datetime.now(UTC) - timedelta(days=100)).date().isoformat()
    with closing(sqlite3.connect(running.state_dir / "history.db", timeout=600)) as history, history:
        history.executemany(
            "INSERT INTO usage VALUES (?, ?, '', 'm', 1, 0, 2, 0, 3)",
            ((day, f"t{number}") for number in range(MAX_DAILY_ROWS)),
        )
        history.execute("INSERT INTO usage VALUES (?, 'one', '', 'm', 1, 0, 2, 0, 3)", (day,))

    def total(**wanted: Any) -> int:
        report = running.admin.call(calls.usage(UsageQuery(since=day, until=day, by="model", **wanted)))
        return report.total.requests

    with pytest.raises(AdminError, match=r"more than 50,000 daily rows: select fewer days, or one tenant"):
        total()
    assert total(tenant="one") == 1
    with closing(sqlite3.connect(running.state_dir / "history.db", timeout=600)) as history, history:
        history.execute("DELETE FROM usage WHERE tenant = 'one'")
    assert total() == MAX_DAILY_ROWS


def test_usage_sums_the_tokens_of_ended_requests_and_prices_them(
    make_service: Callable[..., Service],
) -> None:
    prices = "[prices.m]\nprompt = 2.0\noutput = 10.0\n[prices.gone]\nprompt = 1.0\n"
    service = make_service(prices).start_and_wait()
    assert service.admin.call(calls.usage(UsageQuery())).rows == []
    for tokens in (3, 5):
        read_answer(service.connect(f"m {tokens}"))
    read_answer(service.connect("unknown 5"))

    def counted() -> bool:
        return service.admin.call(calls.usage(UsageQuery())).total.requests == 3

    wait_until(counted, description="three ended requests")
    (row,) = service.admin.call(calls.usage(UsageQuery())).rows
    assert (row.tenant, row.key_id, row.model, row.requests, row.failed) == ("t", "", None, 3, 1)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (8, 0, 8)
    assert row.cost == pytest.approx((8 * 2 + 8 * 10) / 1e6)
    by_model = service.admin.call(calls.usage(UsageQuery(by="model")))
    assert [(one.model, one.requests, one.cost) for one in by_model.rows] == [
        ("", 1, None),
        ("m", 2, row.cost),
    ]
    assert by_model.total.cost == row.cost and by_model.unpriced_models == []
    assert service.admin.call(calls.usage(UsageQuery(tenant="other"))).rows == []
