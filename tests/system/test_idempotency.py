"""Tests of retries with an Idempotency-Key on a service with two real fronts. The request runs only once,
whichever front receives the retry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.system.service import Service, service

pytestmark = pytest.mark.system

ASK = {"model": "demo", "prompt": "import ", "temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text("hang_timeout_s = 600\n")  # longer than a test suspends the replica
    with service("--config", str(config), "--fronts", "2") as started:
        yield started


def post(running: Service, key: str, **changes: Any) -> httpx.Response:
    """Send a request on a new connection. The core assigns the connection to the next front."""
    with running.http() as client:
        return client.post("/v1/completions", json=ASK | changes, headers={"Idempotency-Key": key})


def rows_of(running: Service, *request_ids: str) -> list[dict[str, Any]]:
    """Wait until all requests have finished, and return their rows."""

    def found() -> list[dict[str, Any]] | None:
        rows = {row["request_id"]: row for row in running.rows() if row["state"] == "ended"}
        return [rows[request_id] for request_id in request_ids] if set(request_ids) <= set(rows) else None

    return running.wait_until(found, 60, "rows of the requests")  # type: ignore[no-any-return]


def stream(running: Service, begun: threading.Event) -> tuple[str, str]:
    """Send a streamed request for 400 tokens, and set `begun` after its first tokens. Returns the text and
    the request id."""
    body = ASK | {"max_tokens": 400, "stream": True}
    key = {"Idempotency-Key": "streamed"}
    with running.client(timeout=180) as client:
        raw = client.completions.with_raw_response.create(
            model="demo", prompt="import ", stream=True, extra_body=body, extra_headers=key
        )
        answer = ""
        for chunk in raw.parse():
            answer += chunk.choices[0].text if chunk.choices else ""
            if len(answer) > 30:
                begun.set()
    return answer, raw.headers["x-request-id"]


def test_64_concurrent_duplicates_on_two_fronts_run_only_once(running: Service) -> None:
    rank = psutil.Process(running.replica()["pids"][0])
    rank.suspend()  # so that the first request ends only after all duplicates have arrived
    with ThreadPoolExecutor(64) as pool:
        sent = [pool.submit(post, running, "burst") for _ in range(64)]
        running.wait_until(
            lambda: sum(front["busy_connections"] for front in running.status()["fronts"]) == 64,
            60,
            "64 busy connections",
        )
        rank.resume()
        answers = [future.result() for future in sent]
    answers += [post(running, "burst") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200] * 66
    assert len({answer.content for answer in answers}) == 1
    rows = rows_of(running, *(answer.headers["x-request-id"] for answer in answers))
    (first,) = [row for row in rows if row["retry"] is None]
    others = [row for row in rows if row is not first]
    assert sorted(row["retry"] for row in others) == ["joined"] * 63 + ["repeated"] * 2
    assert {row["retry_of"] for row in others} == {first["request_id"]}
    assert first["billed_tokens"] == 60
    assert sum(row["billed_tokens"] + row["generated_tokens"] for row in others) == 0
    assert [post(running, "burst", max_tokens=61).status_code for _ in range(2)] == [422, 422]


def test_a_run_survives_the_death_of_its_replica_but_not_of_its_front(running: Service) -> None:
    with ThreadPoolExecutor() as pool:
        begun = threading.Event()
        rank = psutil.Process(running.replica()["pids"][0])
        first = pool.submit(stream, running, begun)
        assert begun.wait(60)
        rank.kill()
        retries = [pool.submit(stream, running, begun) for _ in range(3)]
        text, request_id = first.result(120)
        assert [retry.result(120)[0] for retry in retries] == [text] * 3
    rows = rows_of(running, request_id, *(retry.result()[1] for retry in retries))
    assert [row["retry"] for row in rows] == [None, "joined", "joined", "joined"]
    assert [row["billed_tokens"] for row in rows] == [400, 0, 0, 0]

    for front in running.status()["fronts"]:
        running.kill_front(front["pid"])
    again, again_id = stream(running, begun)
    (row,) = rows_of(running, again_id)
    assert (again, row["retry"], row["retry_of"], row["billed_tokens"]) == (text, "anew", request_id, 400)
