"""Tests of shadow requests (copies) in the request manager, and of the totals of their results."""

from __future__ import annotations

import msgspec
import pytest

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.front_messages import Admit, ShadowDone, ShadowMeasure
from appliance.channel.identity import SHADOW_IDENTITY, Identity
from appliance.traffic.shadows import ShadowResults
from tests.core.simulated_service import SLOTS, FakeFront, FakeReplica, SimulatedService
from tests.core.test_request_manager import finished, report, settle


@pytest.fixture
def service() -> SimulatedService:
    return SimulatedService()


def started(service: SimulatedService) -> tuple[FakeFront, FakeReplica]:
    front, replica = service.new_front(), service.new_replica()
    service.core_reads_replica(replica)
    return front, replica


def copied(service: SimulatedService, front: FakeFront) -> Admit:
    """Return the first attempt of a copy. The identity in the copy must have no effect."""
    identity = Identity(tenant="t", highest_class=0, default_class=0)
    service.ask(front, unit="m", shadow_of="t", asked_class="P0", identity=identity)
    sent: Admit = front.to_core.pop()
    return sent


def test_a_copy_runs_in_the_lowest_class_and_is_neither_logged_nor_billed(service: SimulatedService) -> None:
    front, replica = started(service)
    copy = copied(service, front)
    service.requests.admit(front.name, copy)
    [admitted] = front.from_core
    assert isinstance(admitted, Admitted) and admitted.cache_salt == "salt of t"
    [request] = service.requests.state.in_flight.values()
    assert request.request_class == 3 and request.tenant == SHADOW_IDENTITY.tenant
    assert request.reservation is None
    service.requests.report(replica.account, report(finished(copy.request_id, 5), slots=SLOTS + 1))
    service.requests.settle(front.name, settle(copy.request_id))
    assert not service.requests.state.in_flight and not service.rows.opened and not service.rows.ended
    assert service.requests.state.tenants.of("t").service == 0


@pytest.mark.parametrize("load", ["no replica", "no slot", "waiting", "paused", "failed", "gone"])
def test_a_copy_is_dropped_if_it_cannot_start_at_once(service: SimulatedService, load: str) -> None:
    front, _ = started(service) if load != "no replica" else (service.new_front(), None)
    requests, copy = service.requests, copied(service, front)
    if load in ("no slot", "waiting"):
        for _ in range(SLOTS + (load == "waiting")):
            service.ask(front, tokens=1)
            service.core_reads_front(front)
    elif load == "paused":
        requests.pause_admission("m", "model 'm' is draining", hold=True)
    elif load == "failed":
        requests.fail_model("m", "the weights are broken")
    elif load == "gone":
        copy = msgspec.structs.replace(copy, unit="gone")
    front.from_core.clear()
    before = set(requests.state.in_flight)
    requests.admit(front.name, copy)
    [refused] = front.from_core
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "shadow_dropped")
    assert set(requests.state.in_flight) == before
    assert copy.request_id not in service.rows.opened and not service.rows.ended


def test_a_copy_is_dropped_while_a_request_of_another_model_waits(service: SimulatedService) -> None:
    front, _ = started(service)
    service.requests.add_model("busy", "v2")
    service.ask(front, model="busy", unit="busy")
    service.core_reads_front(front)
    assert service.requests.state.waiting == 1 and not front.from_core
    service.requests.admit(front.name, copied(service, front))
    [refused] = front.from_core
    assert isinstance(refused, Refused) and refused.code == "shadow_dropped"


def test_a_copy_whose_front_dies_leaves_nothing(service: SimulatedService) -> None:
    front, replica = started(service)
    copy = copied(service, front)
    service.requests.admit(front.name, copy)
    service.requests.lose_front(front.name)
    service.requests.report(replica.account, report(finished(copy.request_id, 2), slots=SLOTS + 1))
    assert not service.requests.state.in_flight and not service.rows.ended


def test_the_results_are_summed_for_each_name_and_unit() -> None:
    results = ShadowResults()
    for outcome in ("dropped", "dropped", "failed"):
        results.add(ShadowDone(name="chat", unit="chat@2", outcome=outcome))  # type: ignore[arg-type]
    for equal in (8, None):
        results.add(
            ShadowDone(
                name="chat",
                unit="chat@2",
                outcome="compared",
                original=ShadowMeasure(0.1, 0.5, 10),
                copy=ShadowMeasure(0.2, 0.9, 12),
                equal_tokens=equal,
            )
        )
    sums = results.of("chat", "chat@2")
    assert (sums.compared, sums.dropped, sums.failed) == (2, 2, 1)
    assert (sums.originals.ttft_s, sums.copies.e2e_s, sums.copies.tokens) == (0.2, 1.8, 24)
    assert (sums.greedy, sums.equal_tokens, sums.greedy_tokens) == (1, 8, 12)
    assert results.of("chat", "chat@3").compared == 0
    results.end("chat")
    assert not list(results)
