"""Tests that a real service is shared fairly between tenants. `python -m tests.system.fairness` runs longer
and checks stricter bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.fairness import FLAGS, quiet, shares
from tests.system.service import Service, service


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service(*FLAGS) as started:
        yield started


def test_tenants_of_a_real_service_are_served_by_their_weights(running: Service) -> None:
    measurements = shares(running, least_service=6000.0, warm_up_service=3000.0)
    # There are about 55 requests. All three tenants keep about the same number of requests waiting, so
    # serving them in order of arrival would result in a fairness index of 0.6.
    assert measurements["jain"] >= 0.85, measurements


def test_a_flood_hardly_delays_the_first_tokens_of_a_quiet_tenant_of_a_real_service(running: Service) -> None:
    running.wait_until(lambda: not running.rows(state="open"), 60, "the earlier requests to end")
    measurements = quiet(running, requests=10)
    # If the requests were served in order of arrival, the quiet tenant would wait for about 250 steps: 64
    # prompts of 512 tokens, at 128 tokens per step.
    assert measurements["delay_in_full_steps"] <= 15.0, measurements
