"""Tests of retries with an Idempotency-Key over two real fronts. There is only one run, whichever front
receives the retry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import openai
import psutil
import pytest

from appliance.client import AdminClient
from tests.system.service import Service, service

pytestmark = pytest.mark.system

ASK = {"model": "demo", "prompt": "import ", "temperature": 0, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service("--fronts", "2") as started:
        yield started


def post(running: Service, key: str, **changes: Any) -> httpx.Response:
    """Send a request on a new connection, which the core assigns to the next front."""
    with running.http() as client:
        return client.post("/v1/completions", json=ASK | changes, headers={"Idempotency-Key": key})


def text(response: httpx.Response) -> str:
    answer: str = response.json()["choices"][0]["text"]
    return answer


def rows_of(running: Service, *request_ids: str) -> list[dict[str, Any]]:
    """Wait until all requests have ended, and return their rows."""

    def found() -> list[dict[str, Any]] | None:
        rows = {row["request_id"]: row for row in running.rows() if row["state"] == "ended"}
        return [rows[request_id] for request_id in request_ids] if set(request_ids) <= set(rows) else None

    return running.wait_until(found, 60, "rows of the requests")  # type: ignore[no-any-return]


class Streamed(threading.Thread):
    """Reads a stream to its end, or until it has received `leave_after` characters."""

    def __init__(self, running: Service, key: str, leave_after: int | None = None, **changes: Any) -> None:
        super().__init__(daemon=True)
        self.running, self.key, self.leave_after = running, key, leave_after
        self.body = {**ASK, "stream": True, "max_tokens": 300, **changes}
        self.text, self.request_id = "", ""
        self.headers: Any = {}
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        body = dict(self.body)
        extra = {"ignore_eos": body.pop("ignore_eos")}
        try:
            with self.running.client(timeout=60) as client:
                raw = client.completions.with_raw_response.create(
                    **body, extra_body=extra, extra_headers={"Idempotency-Key": self.key}
                )
                self.headers, self.request_id = raw.headers, raw.headers["x-request-id"]
                stream = raw.parse()
                for chunk in stream:
                    self.text += chunk.choices[0].text if chunk.choices else ""
                    if len(self.text) > 30:
                        self.begun.set()
                    if self.leave_after is not None and len(self.text) > self.leave_after:
                        stream.close()
                        break
        except Exception as error:
            self.error = error
        finally:
            self.begun.set()


def test_64_duplicates_at_once_on_two_fronts_are_one_run(running: Service) -> None:
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: post(running, "burst"), range(64)))
    assert [answer.status_code for answer in answers] == [200] * 64
    assert len({answer.content for answer in answers}) == 1
    rows = rows_of(running, *(answer.headers["x-request-id"] for answer in answers))
    (first,) = [row for row in rows if row["retry"] is None]
    others = [row for row in rows if row is not first]
    assert {row["retry"] for row in others} <= {"joined", "repeated"}
    assert {row["retry_of"] for row in others} == {first["request_id"]}
    assert first["billed_tokens"] == 60
    assert sum(row["billed_tokens"] + row["generated_tokens"] for row in others) == 0


def test_a_retry_repeats_the_answer_on_either_front(running: Service) -> None:
    answers = [post(running, "either") for _ in range(4)]
    assert len({answer.content for answer in answers}) == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, *["true"] * 3]
    rows = rows_of(running, *(answer.headers["x-request-id"] for answer in answers))
    assert [row["retry"] for row in rows] == [None, *["repeated"] * 3]
    assert post(running, "either", max_tokens=61).status_code == 422
    assert post(running, "either", max_tokens=61).status_code == 422
    assert post(running, "either", stream=True).status_code == 422


def test_openais_client_that_times_out_joins_its_own_first_attempt(running: Service) -> None:
    with running.client(timeout=60) as patient:
        expected = patient.completions.create(
            model="demo", prompt="import ", temperature=0, max_tokens=300, extra_body={"ignore_eos": True}
        )
    with running.client().with_options(max_retries=20, timeout=0.2) as client:
        answer = client.completions.create(
            model="demo",
            prompt="import ",
            temperature=0,
            max_tokens=300,
            extra_body={"ignore_eos": True},
            extra_headers={"Idempotency-Key": "impatient"},
        )
    assert answer.choices[0].text == expected.choices[0].text
    request_id = answer.id.removeprefix("cmpl-")
    retries = running.wait_until(
        lambda: [row for row in running.rows() if row["retry_of"] == request_id], 60, "rows of its retries"
    )
    (ran,) = rows_of(running, request_id)
    assert ran["billed_tokens"] == 300
    assert sum(row["billed_tokens"] for row in retries) == 0


def test_a_run_and_its_retries_continue_after_the_replica_is_killed(running: Service) -> None:
    expected = Streamed(running, "unkilled", max_tokens=600)
    expected.join(120)
    streams = [Streamed(running, "killed-replica", max_tokens=600) for _ in range(4)]
    for stream in streams:
        assert stream.begun.wait(60)
    pid = running.replica()["pids"][0]
    psutil.Process(pid).kill()
    for stream in streams:
        stream.join(120)
    assert [(stream.error, stream.text) for stream in streams] == [(None, expected.text)] * 4
    rows = rows_of(running, *(stream.request_id for stream in streams))
    assert sorted(row["retry"] or "" for row in rows) == ["", "joined", "joined", "joined"]
    assert sum(row["billed_tokens"] for row in rows) == 600


def test_a_retry_of_a_run_that_ended_with_its_front_is_logged_as_anew(running: Service) -> None:
    streams = [Streamed(running, "killed-front", max_tokens=600) for _ in range(4)]
    for stream in streams:
        assert stream.begun.wait(60)
    with AdminClient(running.run_dir) as admin:
        (lost,) = admin.in_flight()
        (owner,) = [front for front in admin.status().fronts if front.name == lost.front]
    assert owner.pid is not None
    running.kill_front(owner.pid)
    for stream in streams:
        stream.join(120)
        # All connections had been moved to the front that died.
        assert isinstance(stream.error, openai.APIConnectionError | httpx2.HTTPError), stream.error
    again = Streamed(running, "killed-front", max_tokens=600)
    again.join(120)
    assert again.error is None and len(again.text) > 30
    first, second = rows_of(running, lost.request_id, again.request_id)
    assert (first["status"], first["error"]) == (499, "the front process died")
    assert (second["retry"], second["retry_of"]) == ("anew", lost.request_id)
    assert second["billed_tokens"] == 600

    # Responses are stored only in memory, so a retry after a restart is handled like any other request.
    running.stop()
    running.start()
    anew = Streamed(running, "killed-front", max_tokens=600)
    anew.join(120)
    assert anew.text == again.text
    (row,) = rows_of(running, anew.request_id)
    assert (row["retry"], row["billed_tokens"]) == (None, 600)
