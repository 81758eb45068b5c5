"""Tests that a scrape only reads counters. Its cost therefore does not depend on the number of requests."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from appliance.monitoring.metrics.scrape import SHARED_S
from store.policies import TenantRecord
from tests.monitoring.parts import Parts
from tests.monitoring.test_metrics import row, values


class Unwalkable(OrderedDict[Any, Any]):
    """A mapping that permits only lookups and `len`."""

    def _walked(self) -> NoReturn:
        raise AssertionError("a scrape must not iterate over requests")

    __iter__ = keys = values = items = _walked  # type: ignore[assignment]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path, TenantRecord(name="local", created_at=0.0))
    yield made
    made.close()


def test_a_scrape_does_not_iterate_over_requests(parts: Parts) -> None:
    requests: Any = parts.serving.requests
    parts.counted.end(row(tenant="local"))
    for number in range(30):
        parts.ask(number, "local", asked_class="P0" if number % 3 == 0 else "P1")
    requests.state.in_flight = Unwalkable(requests.state.in_flight)
    requests.state.pauses._held = Unwalkable(requests.state.pauses._held)
    (model,) = requests.state.models.values()
    model._running, model.resumed = Unwalkable(model._running), Unwalkable(model.resumed)
    text = parts.scrape()
    waiting = values(text, "appliance_queue_requests")
    assert waiting == {("demo", "P0"): 10, ("demo", "P1"): 20, ("demo", "P2"): 0, ("demo", "P3"): 0}
    assert values(text, "appliance_tenant_queue_requests") == {("local",): 30}
    assert values(text, "vllm:num_requests_waiting") == {("demo",): 30}
    # Without a ready replica, the KV cache is reported as full, so that gateways send no requests here.
    assert values(text, "vllm:kv_cache_usage_perc") == {("demo",): 1.0}


def test_the_text_is_cached_for_a_moment_and_shared_by_concurrent_scrapes(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(
        "appliance.monitoring.metrics.scrape.time", SimpleNamespace(monotonic=lambda: now, time=time.time)
    )
    first = parts.scrape()
    parts.counted.end(row(tenant="local"))
    assert parts.scrape() is first
    now += 1.1 * SHARED_S
    assert values(parts.scrape(), "appliance_tenant_requests_total") == {("local", "ok"): 1}
