"""Tests of drains under load. No accepted request may be lost, and no request may be refused before fronts
have reported "not ready"."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from appliance.client import AdminClient
from appliance.protocol.status import Status
from appliance.settings import demo_model_folder
from tests.system.service import APPLIANCE, CALL_TIMEOUT_S, Service, service

pytestmark = pytest.mark.system

TOKENS = 8
LONG = 30
NOTICE_S = 15.0
FRONTS = 2
PAUSE_S = 0.5
"""Pause of each client between two requests. The notice period contains many requests of each client."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write settings with two models."""
    path = tmp_path_factory.mktemp("drain") / "appliance.toml"
    model = f'folder = "{demo_model_folder()}"\nthreads = 1\nkv_blocks = 400\nmax_num_seqs = 8\n'
    path.write_text(
        # The service must not kill a replica that a test has suspended.
        f"fronts = {FRONTS}\ndrain_notice_s = 0.8\ndrain_grace_s = 60\nhang_timeout_s = 600\n"
        f"[models.demo]\n{model}[models.other]\n{model}"
    )
    return path


@pytest.fixture(scope="module")
def server(settings: Path) -> Iterator[Service]:
    with service("--config", str(settings)) as running:
        yield running


class Answer:
    """A client's response, and the time at which it arrived."""

    def __init__(self, model: str, status: int, code: str, retry_after: str | None, tokens: int) -> None:
        self.model, self.status, self.code = model, status, code
        self.retry_after, self.tokens = retry_after, tokens
        self.at = self.began = time.monotonic()
        self.ended_a_stream = False
        """Whether a stream had begun and ended with an error, which has no headers."""

    @property
    def refused(self) -> bool:
        return self.status == 503


def ask(http: httpx.Client, model: str, *, stream: bool = False, tokens: int = TOKENS) -> Answer:
    """Send one request and read the whole answer. If a stream ends with an error, return the error's
    status."""
    body = {"model": model, "prompt": "import ", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if not stream:
        answer = http.post("/v1/completions", json=body)
        document = answer.json()
        code = document["error"]["code"] if "error" in document else ""
        made = 0 if code else document["usage"]["completion_tokens"]
        return Answer(model, answer.status_code, code, answer.headers.get("retry-after"), made)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body | options) as answer:
        if answer.status_code != 200:
            code = json.loads(answer.read())["error"]["code"]
            return Answer(model, answer.status_code, code, answer.headers.get("retry-after"), 0)
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    errors = [json.loads(event)["error"] for event in events if '"error"' in event]
    if errors:
        assert len(errors) == 1 and events[-1] != "[DONE]"
        ended = Answer(model, 503, errors[0]["code"], None, 0)
        ended.ended_a_stream = True
        return ended
    assert events[-1] == "[DONE]"
    return Answer(model, 200, "", None, json.loads(events[-2])["usage"]["completion_tokens"])


class Load:
    """Clients that each send one request after another, and probes that check readiness on separate
    connections."""

    def __init__(self, running: Service, models: tuple[str, ...] = ("demo",)) -> None:
        self.running, self.models = running, models
        self.answers: list[Answer] = []
        self.cut_off: list[str] = []
        self.not_ready: dict[int, float] = {}
        self.ready_again: dict[int, float] = {}
        self._probed = ""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(6)]

    def probe(self, model: str) -> None:
        """Check this model's readiness on every front. The core assigns connections to the fronts in
        rotation."""
        self._probed = f"?model={model}" if model else ""
        probes = [threading.Thread(target=self._probe, args=(number,)) for number in range(2 * FRONTS)]
        self._threads += probes

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.running.wait_until(lambda: len(self.answers) > 10, 60, "ten answers")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Wait until every client has received its last answer."""
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a client is still waiting"

    def wait_for_a_refusal(self) -> None:
        """Wait until a request is served although every front reports "not ready", and then until a request
        is refused. In between, the replica is suspended, so that its requests keep the drain from ending."""

        def served() -> bool:
            announced = [*self.not_ready.values()]
            return len(announced) == 2 * FRONTS and any(
                answer.began > max(announced) for answer in self.of("demo")
            )

        running = self.running
        rank = psutil.Process(running.replica()["pids"][0])
        running.wait_until(served, 60, "an answer after every front has reported that it is not ready")
        rank.suspend()
        running.wait_until(lambda: status(running).drains[0].state != "announced", 60, "the notice to end")
        with running.http() as http:
            self.answers.append(ask(http, "demo"))
        rank.resume()

    def of(self, model: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.model == model]

    @property
    def refusals(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.refused]

    def _client(self, number: int) -> None:
        model = self.models[number % len(self.models)]
        with self.running.http() as http:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    answer = ask(http, model, stream=number % 3 == 0)
                except httpx.TransportError as error:
                    self.cut_off.append(type(error).__name__)
                    return
                answer.began = began
                self.answers.append(answer)
                self._stop.wait(PAUSE_S)

    def _probe(self, number: int) -> None:
        with self.running.http() as http:
            while not self._stop.is_set():
                try:
                    status = http.get(f"/health/ready{self._probed}").status_code
                except httpx.TransportError:
                    return
                if status == 503:
                    self.not_ready.setdefault(number, time.monotonic())
                elif number in self.not_ready:
                    self.ready_again.setdefault(number, time.monotonic())
                self._stop.wait(0.25)


def check(load: Load, *, broken_connections: bool = False) -> None:
    """Check that every accepted request was answered completely, and that every refusal said when to
    retry."""
    assert {answer.status for answer in load.answers} <= {200, 503}
    assert {answer.tokens for answer in load.answers if not answer.refused} == {TOKENS}
    assert {answer.code for answer in load.refusals} <= {"draining"}
    assert all(int(answer.retry_after or 0) > 0 for answer in load.refusals if not answer.ended_a_stream)
    assert broken_connections or not load.cut_off


def check_order(load: Load) -> None:
    """Check that every front reported "not ready" before any request was refused, and that a request that
    arrived in between was still served."""
    assert len(load.not_ready) == 2 * FRONTS
    announced = max(load.not_ready.values())
    first = min(load.refusals, key=lambda answer: answer.at)
    assert announced < first.at
    came_between = [answer for answer in load.of(first.model) if announced < answer.began < first.began]
    assert any(not answer.refused for answer in came_between)


@contextmanager
def draining(running: Service, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `appliance drain` and capture its output."""
    command = [APPLIANCE, "drain", "--yes", "--run-dir", str(running.run_dir), *options]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def patient(server: Service, settings: Path) -> Iterator[Service]:
    """Return the service with a notice period that is long enough for the probes even on a slow machine."""
    text = settings.read_text()
    settings.write_text(text.replace("drain_notice_s = 0.8", f"drain_notice_s = {NOTICE_S}"))
    server.command("config", "reload")
    yield server
    settings.write_text(text)
    server.command("config", "reload")


def status(running: Service) -> Status:
    with AdminClient(running.run_dir, CALL_TIMEOUT_S) as admin:
        return admin.status()


@contextmanager
def long_request(running: Service, **options: Any) -> Iterator[Future[Answer]]:
    """Send a request that cannot finish during the block, because its replica is suspended."""
    rank = psutil.Process(running.replica()["pids"][0])
    with running.http() as http, ThreadPoolExecutor(1) as pool:
        rank.suspend()
        try:
            answer = pool.submit(ask, http, "demo", tokens=LONG, **options)
            running.wait_until(lambda: status(running).queue.running == 1, 60, "the long request")
            yield answer
        finally:
            rank.resume()


def test_a_drain_under_load_loses_nothing_and_says_not_ready_before_it_refuses(patient: Service) -> None:
    server = patient
    load = Load(server)
    load.probe("")
    with load, draining(server, "--grace", "60s", "--json") as process:
        load.wait_for_a_refusal()
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        looks = [json.loads(line) for line in out.splitlines()]
        assert [looks[0]["state"], looks[-1]["state"]] == ["announced", "drained"]
        assert looks[-1]["ended"] == looks[-1]["running"] == looks[-1]["queued"] == 0
        assert status(server).state == "drained"
        server.command("resume")
        server.wait_until(lambda: len(load.ready_again) == 2 * FRONTS, 60, "ready probes")
        ready_at = time.monotonic()

        def refused_later() -> list[bool]:
            return [answer.refused for answer in load.answers if answer.began > ready_at]

        server.wait_until(lambda: len(refused_later()) > 12, 60, "answers after the drain")
        assert not any(refused_later())
    check(load)
    check_order(load)
    server.wait_until(lambda: status(server).state == "ready", 60, "the service to be ready")


def test_a_drain_of_one_model_leaves_the_other_alone(patient: Service) -> None:
    server = patient
    load = Load(server, ("demo", "other"))
    load.probe("demo")
    with load, draining(server, "--model", "demo", "--grace", "60s") as process:
        load.wait_for_a_refusal()
        assert process.wait(600) == 0
        with server.http() as http:
            for path, code in (("", 200), ("?model=other", 200), ("?model=demo", 503)):
                assert http.get(f"/health/ready{path}").status_code == code
        seen = len(load.of("other"))
        server.wait_until(lambda: len(load.of("other")) > seen + 10, 60, "answers of the other model")
        server.command("resume", "--model", "demo")
        server.wait_until(lambda: len(load.ready_again) == 2 * FRONTS, 60, "ready probes")
    check(load)
    check_order(load)
    assert not any(answer.refused for answer in load.of("other"))


def test_a_cancelled_drain_restores_service_and_running_requests_continue(server: Service) -> None:
    with server.http() as http:
        with long_request(server) as long, draining(server, "--grace", "600s") as process:
            server.wait_until(lambda: status(server).state == "draining", 60, "the drain")
            server.wait_until(lambda: status(server).drains[0].state == "draining", 60, "its notice to end")
            assert ask(http, "demo").refused
            server.command("resume")
            out, errors = process.communicate(timeout=600)
            assert not long.done()
        assert (process.returncode, out) == (1, "")
        assert errors.endswith("the service: the drain was cancelled by another operator\n")
        assert ask(http, "demo").status == 200
        assert (long.result(300).status, long.result().tokens) == (200, LONG)


def test_with_the_queue_option_new_requests_wait_until_service_resumes(server: Service) -> None:
    with ThreadPoolExecutor(5) as pool, server.http() as http:
        with draining(server, "--queue") as process:
            assert process.wait(600) == 0
        waiting = [pool.submit(ask, http, "demo", stream=number % 2 == 0) for number in range(5)]
        server.wait_until(lambda: status(server).drains[0].held == 5, 60, "five that wait")
        assert not any(future.done() for future in waiting)
        assert status(server).state == "drained"
        server.command("resume")
        assert [(future.result(120).status, future.result().tokens) for future in waiting] == [
            (200, TOKENS)
        ] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_outlast_the_grace_period_end_with_one_clear_error(
    server: Service, stream: bool
) -> None:
    with ExitStack() as stack:
        with long_request(server, stream=stream) as long:
            process = stack.enter_context(draining(server, "--grace", "0s"))
            server.wait_until(lambda: [one.ended for one in status(server).drains] == [1], 60, "its end")
        out, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    assert "1 requests did not finish within the grace period and were stopped" in out
    assert (long.result().status, long.result().code) == (503, "aborted")
    server.wait_until(lambda: status(server).queue.running == 0, 60, "an idle engine")
    (row,) = server.wait_until(lambda: [row for row in server.rows()[-1:] if row["error"]], 60, "its row")
    assert row["error"] == "the service is draining, and this request did not finish within the grace period"
    server.command("resume")


def outcomes(running: Service) -> dict[tuple[str, int], int]:
    with sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True) as database:
        return {
            (row[0], row[1]): row[2]
            for row in database.execute("select state, status, count(*) from requests group by 1, 2")
        }


def test_sigterm_under_load_drains_the_service_and_leaves_nothing_behind(
    settings: Path, tmp_path: Path
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(settings.read_text().replace("drain_notice_s = 0.8", f"drain_notice_s = {NOTICE_S}"))
    with service("--config", str(config)) as running:
        processes = running.descendants()
        load = Load(running)
        load.probe("")
        with load:
            running.process.send_signal(signal.SIGTERM)
            load.wait_for_a_refusal()
            assert running.process.wait(600) == 0
        check(load, broken_connections=True)
        check_order(load)
        # Requests whose connections were closed before an answer had not been accepted, because the clients
        # received every answer in the log.
        answered = sum(not answer.refused for answer in load.answers)
        found = outcomes(running)
        assert found.pop(("ended", 200)) == answered
        assert set(found) <= {("ended", 503)}
        assert not any(process.is_running() for process in processes)


def test_a_second_sigterm_ends_the_running_requests(settings: Path) -> None:
    with service("--config", str(settings)) as running:
        with long_request(running, stream=True) as long:
            running.process.send_signal(signal.SIGTERM)
            running.wait_until(lambda: status(running).state == "draining", 60, "the drain")
            running.process.send_signal(signal.SIGTERM)
            running.wait_until(lambda: "were stopped" in running.log_path.read_text(), 60, "its end")
        assert running.process.wait(600) == 0
        assert (long.result().status, long.result().code) == (503, "aborted")
        assert outcomes(running) == {("ended", 503): 1}
