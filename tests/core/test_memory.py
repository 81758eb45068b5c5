"""Tests that the core's memory does not grow with its running time.

The core runs the garbage collector only at intervals of many minutes
(`appliance.core.process.COLLECT_AFTER`), so repeated work must create no cyclic garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.admin.status import service_version
from appliance.traffic.request import Request
from tests.core.simulated_service import SimulatedService


@contextmanager
def no_collection() -> Iterator[Callable[[], int]]:
    """Stop automatic garbage collection. Yield a function that returns the number of objects that only a
    garbage collection can free."""
    while gc.collect():
        pass  # Finalizers may create more garbage.
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()


def run_requests(service: SimulatedService, count: int, every_s: float = 0.1) -> None:
    """Run requests one after another, from their arrival to their end."""
    (front,) = service.live_fronts()
    for _ in range(count):
        service.ask(front)
        service.settle_everything()
        service.now += every_s
        service.requests.expire()


def test_reading_the_version_again_creates_no_cyclic_garbage() -> None:
    service_version()
    with no_collection() as garbage:
        for _ in range(100):
            service_version()
        assert garbage() == 0


def test_requests_create_no_cyclic_garbage() -> None:
    service = SimulatedService()
    service.new_front()
    run_requests(service, 10)
    with no_collection() as garbage:
        run_requests(service, 200)
        assert garbage() == 0


def test_the_core_keeps_few_objects_of_requests_that_have_ended() -> None:
    service = SimulatedService()
    service.new_front()
    # All of these requests end long before their timeout of 50 s.
    run_requests(service, 400)
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is Request]
    assert service.requests.state.in_flight == {}
    assert len(kept) < 20
