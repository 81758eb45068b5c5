"""Tests that the service detects dead and hanging replicas within seconds, replaces them, and completes their
requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from appliance.actions.parameters import ReloadConfig
from appliance.settings import demo_model_folder
from tests.system.attacks.reading import configured, doctor, no_problem, past_problem, problem
from tests.system.service import Service
from tests.system.test_deaths import Stream, answer

pytestmark = pytest.mark.system

TOKENS = 120
TWO_REPLICAS = f'[models.demo]\nfolder = "{demo_model_folder()}"\nreplicas = 2\n'


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[Service]:
    """Start a service with two replicas, in which the core does not kill a replica that stops responding."""
    with configured(f"hang_timeout_s = 600\n{TWO_REPLICAS}") as running:
        running.wait_until(  # the service is ready when one replica of each model is ready
            lambda: all(one["state"] == "ready" for one in replicas(running)),
            120,
            "both replicas to be ready",
        )
        yield running


def replicas(running: Service) -> list[dict[str, Any]]:
    """Return the replicas of the model."""
    found: list[dict[str, Any]] = running.status()["models"][0]["replicas"]
    return found


def begun(running: Service, max_tokens: int = TOKENS) -> Stream:
    """Start a stream, and return it after its first tokens have been delivered."""
    stream = Stream(running, max_tokens=max_tokens)
    assert stream.begun.wait(120)
    return stream


def test_a_stopped_rank_is_noticed_and_replaced_and_its_streams_continue() -> None:
    with configured("hang_timeout_s = 600\n", "--tensor-parallel-size", "2") as running:
        undisturbed = Stream(running, max_tokens=TOKENS)
        undisturbed.join(180)
        assert undisturbed.finish_reason == "length", undisturbed.error
        pids, stream = running.replica()["pids"], begun(running)
        os.kill(pids[1], signal.SIGSTOP)
        # Rank 0 waits for this rank in a collective operation, at the latest in that of the second stream.
        streams = [stream, Stream(running, max_tokens=TOKENS)]
        told = f"rank 1 (pid {pids[1]}) was stopped by a signal"
        past_problem(running, "demo-0", told)
        assert any(told in text for text in doctor(running, "warning"))
        for stream in streams:
            stream.join(180)
            assert stream.error is None and stream.text == undisturbed.text
        assert running.replica()["pids"] != pids
        no_problem(running)


def test_a_step_that_takes_longer_than_the_deadline_is_not_taken_for_a_hang() -> None:
    """A single step computes most prompts. The replica sends no reports during the step, which takes seconds
    on the slowest machine and is extended by stopping the process until the deadline has passed. Short steps
    are not announced, so the deadline is long enough for them on a busy machine. `tests/core/test_service.py`
    tests that an announced step does not make the replica silent."""
    deadline_s = 4.0
    tokens = ["--max-num-batched-tokens", "12288", "--kv-blocks", "300"]
    with configured(f"hang_timeout_s = {deadline_s}\n", *tokens) as running, ThreadPoolExecutor(1) as thread:
        prompts = [[100 + prompt] * 2000 for prompt in range(6)]
        body = {"model": "demo", "prompt": prompts, "max_tokens": 1}
        before = running.replica()
        (pid,) = before["pids"]

        def silent_s() -> float:
            return running.replica()["last_report_s"]

        with running.http() as http:
            asked = thread.submit(http.post, "/v1/completions", json=body)
            running.wait_until(lambda: running.status()["queue"]["running"], 60, "the request to run")
            running.wait_until(lambda: silent_s() > 0.7, 60, "a step without reports")
            os.kill(pid, signal.SIGSTOP)
            running.wait_until(lambda: silent_s() > 1.1 * deadline_s, 60, "the deadline to pass")
            os.kill(pid, signal.SIGCONT)
            assert asked.result().status_code == 200, asked.result().text
        after = running.replica()
        assert (after["restarts"], after["pids"]) == (0, before["pids"])


def test_a_silent_replica_gets_no_new_requests_while_another_one_serves(two_replicas: Service) -> None:
    running = two_replicas
    stopped, other = replicas(running)
    os.kill(stopped["pids"][0], signal.SIGSTOP)
    problem(running, stopped["name"], "no report")
    running.wait_until(running.ready, 60, "the service to be ready")
    assert all(answer(running) for _ in range(6))
    rows = running.wait_until(
        lambda: (rows := [row for row in running.rows() if row["status"] == 200])[5:] and rows,
        60,
        "the rows of the requests",
    )
    assert {row["replica"] for row in rows} == {other["name"]}
    os.kill(stopped["pids"][0], signal.SIGCONT)
    no_problem(running)
    assert [one["restarts"] for one in replicas(running)] == [0, 0]


def test_a_silent_front_is_reported(two_replicas: Service) -> None:
    running = two_replicas
    (front,) = running.status()["fronts"]
    os.kill(front["pid"], signal.SIGSTOP)
    problem(running, front["name"], "no report for")
    assert any(f"{front['name']}: no report for" in text for text in doctor(running))
    os.kill(front["pid"], signal.SIGCONT)
    no_problem(running)
    assert answer(running)
    assert running.status()["fronts"][0]["restarts"] == 0


def test_silent_replicas_are_reported_and_replaced_and_their_streams_continue(two_replicas: Service) -> None:
    running = two_replicas
    before, stream = replicas(running), begun(running, 600)
    for one in before:
        os.kill(one["pids"][0], signal.SIGSTOP)
    for one in before:
        problem(running, one["name"], "no report")
    status = running.status()
    assert status["state"] == "degraded" and "demo-0 is silent, demo-1 is silent" in status["reason"]
    with running.http() as http:
        running.wait_until(
            lambda: http.get("/health/ready").status_code == 503,
            60,
            "the front to know that nothing is ready",
        )
    found = doctor(running)
    for one in before:
        told = f"{one['name']}: replica receives no new requests: no report for"
        assert any(told in text for text in found), found
    assert [one["pids"] for one in replicas(running)] == [one["pids"] for one in before]
    Path(running.flags[1]).write_text(f"hang_timeout_s = 10\n{TWO_REPLICAS}")
    running.act(ReloadConfig())
    stream.join(180)
    assert stream.error is None and stream.finish_reason == "length"
    no_problem(running)
    for one, former in zip(replicas(running), before, strict=True):
        assert one["pids"] != former["pids"] and "did not report for" in one["last_error"]
