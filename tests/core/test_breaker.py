"""Tests of a replica's circuit breaker in a real core."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.actions.parameters import RetryModel
from appliance.client import AdminError
from appliance.monitoring.doctor import examine
from appliance.protocol import ReplicaStatus
from appliance.settings import SettingsError
from tests.core.conftest import Service, read_answer
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


def replica(service: Service, model: int = 0) -> ReplicaStatus:
    return service.admin.status().models[model].replicas[0]


def kill(service: Service) -> None:
    """Kill the first model's replica when it is ready, and wait until the core has noticed."""
    wait_until(lambda: replica(service).state == "ready", description=f"a ready replica ({service.log})")
    before = replica(service)
    os.kill(before.pids[0], signal.SIGKILL)
    wait_until(lambda: replica(service).restarts > before.restarts, description="the core to notice the kill")


def test_the_breaker_opens_after_repeated_deaths_says_why_and_spares_other_models(
    make_service: Make,
) -> None:
    service = make_service(
        "[restarts]\nmax_deaths = 3\nwindow_s = 3600\nretry_s = 3600", models=("m", "other")
    ).start_and_wait()
    for _ in range(3):
        kill(service)
    status = service.admin.status()
    failed = status.models[0]
    assert (failed.state, failed.replicas[0].breaker, failed.replicas[0].deaths) == ("failed", "open", 3)
    assert "exited 3 times within 3600 s" in failed.detail and "was killed by SIGKILL" in failed.detail
    problem = next(one for one in status.current_problems if one.where == "model m")
    assert "appliance models retry m" in problem.remedy
    found = examine(Path(status.run_dir), Path(status.state_dir), SettingsError()).findings
    assert any("exited 3 times" in one.text for one in found if one.level == "problem")
    [shown, _] = service.admin.models()
    assert shown.state == "failed" and "appliance models retry m" in shown.versions[0].detail
    # The service writes the log in a separate thread.
    wait_until(lambda: "exited 3 times" in service.log.read_text(), description="the log line")
    assert "exited 3 times" in read_answer(service.connect("m 2"))[-1]
    assert read_answer(service.connect("other 2"))[-1] == "front-0 length"
    with pytest.raises(AdminError, match="none of its replicas is waiting"):
        service.admin.act(RetryModel(model="other"))

    service.admin.act(RetryModel(model="m"))
    service.wait_ready()
    assert (replica(service).breaker, replica(service).deaths) == ("closed", 0)
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"


def test_an_open_breaker_tries_one_start_after_a_while(make_service: Make) -> None:
    service = make_service("[restarts]\nmax_deaths = 1\nwindow_s = 3600\nretry_s = 1").start_and_wait()
    kill(service)
    wait_until(lambda: replica(service).state == "ready", description="the start of the half-open breaker")
    assert replica(service).breaker == "half-open"
    kill(service)
    assert "exited again" in next(
        one.description for one in service.admin.status().problems if one.where == "m-0"
    )


def test_a_replica_is_tried_again_when_its_files_change(make_service: Make) -> None:
    service = make_service("[restarts]\nmax_deaths = 1\nwindow_s = 3600\nretry_s = 3600").start_and_wait()
    kill(service)
    assert replica(service).breaker == "open"
    fixed = service.folder / "m" / "fixed"

    def starts() -> bool:
        with fixed.open("a") as file:  # the first change may happen before the watch begins
            file.write("fixed\n")
        return replica(service).state != "failed"

    wait_until(starts, description="the start after the change")
    service.wait_ready()
    assert (replica(service).breaker, replica(service).deaths) == ("closed", 0)


def test_kills_further_apart_than_the_window_never_open_the_breaker(make_service: Make) -> None:
    service = make_service("[restarts]\nmax_deaths = 2\nwindow_s = 0.2\nretry_s = 3600").start_and_wait()
    for _ in range(3):
        wait_until(
            lambda: replica(service).state == "ready" and replica(service).deaths == 0,
            description="the end of the window",
        )
        kill(service)
        assert replica(service).breaker == "closed"
    service.wait_ready()
    assert replica(service).restarts == 3
