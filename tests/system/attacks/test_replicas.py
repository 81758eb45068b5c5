"""Tests that replicas that die or stop responding are detected within seconds and replaced, and that their
requests are completed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from appliance.actions import ReloadConfig
from appliance.settings import demo_model_folder
from tests.system.attacks.reading import configured, doctor, no_problem, problem
from tests.system.service import Service
from tests.system.test_deaths import Stream, answer

pytestmark = pytest.mark.system

TOKENS = 120


def begun(running: Service) -> Stream:
    """Start a stream, and return it after its first tokens have been delivered."""
    stream = Stream(running, max_tokens=TOKENS)
    assert stream.begun.wait(60)
    return stream


def test_a_stopped_rank_is_noticed_and_replaced_and_its_streams_go_on() -> None:
    with configured("hang_timeout_s = 9\n", "--tensor-parallel-size", "2") as running:
        undisturbed = Stream(running, max_tokens=TOKENS)
        undisturbed.join(120)
        assert undisturbed.finish_reason == "length", undisturbed.error
        stream, pids = begun(running), running.replica()["pids"]
        stopped_at = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)  # rank 0 waits for this rank in a collective operation
        problem(running, "demo-0", f"rank 1 (pid {pids[1]}) was stopped by a signal")
        assert time.monotonic() - stopped_at < 30
        stream.join(120)
        assert stream.error is None and stream.text == undisturbed.text
        assert running.replica()["pids"] != pids
        no_problem(running)


def test_a_stopped_replica_of_one_rank_is_shown_as_silent_and_replaced() -> None:
    with configured("hang_timeout_s = 600\n") as running:
        stream, pids = begun(running), running.replica()["pids"]
        os.kill(pids[0], signal.SIGSTOP)
        problem(running, "demo-0", "no report")
        status = running.status()
        assert status["state"] == "degraded" and "demo-0 is silent" in status["reason"]
        with running.http() as http:
            assert http.get("/health/ready").status_code == 503
        assert any(
            "demo-0: replica receives no new requests: no report for" in text for text in doctor(running)
        )
        assert running.replica()["pids"] == pids
        Path(running.flags[1]).write_text("hang_timeout_s = 4\n")
        running.act(ReloadConfig())
        stream.join(120)
        assert stream.error is None and stream.finish_reason == "length"
        replica = running.replica()
        assert replica["pids"] != pids and "did not report for" in replica["last_error"]
        no_problem(running)


def test_a_silent_replica_gets_no_new_requests_while_another_one_serves() -> None:
    settings = f'hang_timeout_s = 600\n[models.demo]\nfolder = "{demo_model_folder()}"\nreplicas = 2\n'
    with configured(settings) as running:
        running.wait_until(  # the service is ready when one replica of each model is ready
            lambda: all(one["state"] == "ready" for one in running.status()["models"][0]["replicas"]),
            60,
            "both replicas to be ready",
        )
        stopped, other = running.status()["models"][0]["replicas"]
        os.kill(stopped["pids"][0], signal.SIGSTOP)
        problem(running, stopped["name"], "no report")
        assert running.ready()
        assert all(answer(running) for _ in range(6))
        rows = running.wait_until(
            lambda: (rows := [row for row in running.rows() if row["status"] == 200])[5:] and rows,
            60,
            "the rows of the requests",
        )
        assert {row["replica"] for row in rows} == {other["name"]}
        os.kill(stopped["pids"][0], signal.SIGCONT)
        no_problem(running)
        assert [one["restarts"] for one in running.status()["models"][0]["replicas"]] == [0, 0]
