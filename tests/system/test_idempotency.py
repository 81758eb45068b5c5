"""Tests of retries with an Idempotency-Key on a service with two real fronts. The request runs only once,
whichever front receives the retry."""

from __future__ import annotations

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


def test_64_duplicates_on_two_fronts_run_only_once_although_their_replica_dies(running: Service) -> None:
    rank = psutil.Process(running.replica()["pids"][0])
    rank.suspend()  # so that the first request ends only after all duplicates have arrived
    with ThreadPoolExecutor(64) as pool:
        sent = [pool.submit(post, running, "burst") for _ in range(64)]
        running.wait_until(
            lambda: sum(front["busy_connections"] for front in running.status()["fronts"]) == 64,
            60,
            "64 busy connections",
        )
        rank.kill()
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


def test_a_retry_runs_again_after_the_death_of_the_front_that_kept_the_answer(running: Service) -> None:
    first = post(running, "lost")
    for front in running.status()["fronts"]:
        running.kill_front(front["pid"])
    again = post(running, "lost")
    (row,) = rows_of(running, again.headers["x-request-id"])
    assert again.json()["choices"] == first.json()["choices"]
    assert (row["retry"], row["retry_of"]) == ("anew", first.headers["x-request-id"])
