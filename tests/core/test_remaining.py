"""Tests of the predicted duration of a drain and of the predicted wait of a new request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.traffic.remaining import Outstanding
from store.policies import TenantRecord
from tests.core.simulated_server import Shape, SimulatedServer

STEP_S = 0.1


def outstanding(**fields: Any) -> Outstanding:
    """Return one running request that is expected to generate 10 tokens and may generate up to 1,000."""
    known = {
        "request_id": "r",
        "expected_tokens": 10.0,
        "began_at": 0.0,
        "generated_each": 0.0,
        "most_each": 1000.0,
    }
    request: Any = SimpleNamespace(admit=SimpleNamespace(num_seqs=1, prompt_tokens=1), **{**known, **fields})
    found = Outstanding()
    found.wait(request)
    found.begin(request)
    return found


def eta_s(found: Outstanding, now: float) -> float:
    forecast: Any = SimpleNamespace(known=True, step_s=STEP_S)
    seconds = found.remaining(forecast, now).seconds
    assert seconds is not None
    return seconds


def test_a_request_within_its_expected_length_ends_when_that_is_reached() -> None:
    assert eta_s(outstanding(generated_each=4.0), now=99.0) == pytest.approx(6 * STEP_S)


def test_a_request_that_has_outlived_its_expected_length_is_not_about_to_end() -> None:
    assert eta_s(outstanding(generated_each=200.0), now=20.0) == pytest.approx(200 * STEP_S)


def test_nothing_runs_longer_than_it_may() -> None:
    assert eta_s(outstanding(generated_each=900.0), now=90.0) == pytest.approx(100 * STEP_S)


def test_elapsed_time_replaces_token_counts_that_are_not_reported_yet() -> None:
    assert eta_s(outstanding(), now=5 * STEP_S) == pytest.approx(5 * STEP_S)


def test_a_request_that_waits_again_counts_with_its_new_expected_length() -> None:
    request: Any = SimpleNamespace(
        request_id="r", expected_tokens=50.0, admit=SimpleNamespace(num_seqs=1, prompt_tokens=1)
    )
    forecast: Any = SimpleNamespace(known=True, step_s=STEP_S, serving_s=lambda prompts, outputs: 0.0)
    found = Outstanding()
    found.wait(request)
    found.begin(request)
    request.expected_tokens = 20.0
    found.wait(request)
    assert found.remaining(forecast, now=0.0).seconds == pytest.approx(20 * STEP_S)


def test_the_predicted_wait_is_unknown_without_a_replica_and_zero_in_an_empty_queue() -> None:
    server = SimulatedServer(tenants=[TenantRecord(name="t", created_at=0.0)])
    state = server.requests.state
    assert [one.expected_wait_s for one in state.queue_stats().classes] == [None] * 4
    server.add_replica(slots=4)
    server.ask("t", Shape(100, 20, 20))
    server.run(60.0)
    assert not state.waiting and state.ended == 1
    assert [one.expected_wait_s for one in state.queue_stats().classes] == [0.0] * 4
