"""Tests of the request manager with requests that are answered by their model's fallback."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.front_messages import Admit
from appliance.traffic.credits import CreditAccount
from appliance.traffic.rules import QueueRules
from engine.rank_messages import Report
from tests.core.simulated_service import SLOTS, TOKENS, FakeFront, SimulatedService
from tests.core.test_request_manager import finished, report, settle


@pytest.fixture
def service() -> SimulatedService:
    """A service with the models "m", which has no replica, and "small", which has one."""
    made = SimulatedService()
    made.requests.add_model("small", "v2")
    account = CreditAccount("small-0", "small", "cpu")
    made.requests.add_replica(account)
    made.requests.report(account, Report(step=1, credit_seqs=SLOTS, credit_tokens=TOKENS))
    return made


def admit(service: SimulatedService, front: FakeFront, **changed: Any) -> Admit:
    """Return the first attempt of a request for model "m" that may use the fallback."""
    service.ask(front, **{"may_fall_back": True, **changed})
    sent: Admit = front.to_core.pop()
    return sent


def again(first: Admit, model: str = "small") -> Admit:
    """Return the request's first attempt on the fallback model."""
    return msgspec.structs.replace(
        first, model=model, unit=model, fallback_of=first.model, may_fall_back=False, prompt_tokens=9
    )


def answer(front: FakeFront) -> Any:
    [message] = front.from_core
    front.from_core.clear()
    return message


def fall_back(service: SimulatedService, front: FakeFront, first: Admit) -> None:
    service.requests.admit(front.name, first)
    refused = answer(front)
    assert isinstance(refused, Refused) and refused.falls_back and refused.status == 503
    assert not service.rows.ended


def test_a_request_whose_model_has_no_ready_replica_is_answered_by_the_fallback(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    first = admit(service, front)
    fall_back(service, front, first)
    service.requests.admit(front.name, again(first))
    admitted = answer(front)
    assert isinstance(admitted, Admitted) and (admitted.attempt, admitted.replica) == (0, "small-0")
    small = service.requests.state.models["small"].accounts[0]
    service.requests.report(small, report(finished(first.request_id, 5), slots=SLOTS + 1))
    service.requests.settle(front.name, settle(first.request_id))
    [row] = service.rows.ended
    assert (row.model, row.unit, row.version, row.fallback_of) == ("small", "small", "v2", "m")
    assert (row.status, row.prompt_tokens, row.resubmissions) == (200, 9, 0)
    assert service.rows.opened == [first.request_id] and not service.requests.state.in_flight
    assert service.requests.state.finished("m") and service.requests.state.finished("small")


@pytest.mark.parametrize("cause", ["failed", "draining", "timeout"])
def test_overload_and_failure_lead_to_the_fallback_and_the_row_is_opened_once(
    service: SimulatedService, cause: str
) -> None:
    front, requests = service.new_front(), service.requests
    replica = service.new_replica()
    requests.report(replica.account, Report(step=1, credit_seqs=0, credit_tokens=0))
    first = admit(service, front)
    if cause == "failed":
        requests.fail_model("m", "the weights are broken")
    elif cause == "draining":
        requests.pause_admission("m", "model 'm' is draining")
    else:
        requests.set_rules(QueueRules(limit=7, timeout_s=3.0))
        requests.admit(front.name, first)
        assert service.rows.opened == [first.request_id] and not front.from_core
        service.now += 4.0
        requests.expire()
    if cause == "timeout":
        assert answer(front).falls_back
    else:
        fall_back(service, front, first)
    requests.admit(front.name, again(first))
    assert isinstance(answer(front), Admitted)
    assert service.rows.opened == [first.request_id] and not service.rows.ended


@pytest.mark.parametrize("cause", ["client", "front"])
def test_a_request_that_ends_between_two_models_is_closed_once(service: SimulatedService, cause: str) -> None:
    front = service.new_front()
    first = admit(service, front)
    fall_back(service, front, first)
    if cause == "client":
        left = settle(first.request_id, submitted=False, status=499, finish_reason="cancelled")
        service.requests.settle(front.name, left)
    else:
        service.requests.lose_front(front.name)
    [row] = service.rows.ended
    assert (row.status, row.model, row.fallback_of) == (499, "m", None)
    assert not service.requests.state.in_flight


def test_the_fallback_itself_has_no_fallback(service: SimulatedService) -> None:
    front = service.new_front()
    first = admit(service, front)
    fall_back(service, front, first)
    service.requests.fail_model("small", "the weights are broken")
    service.requests.admit(front.name, again(first))
    refused = answer(front)
    assert (refused.status, refused.falls_back) == (503, False)
    [row] = service.rows.ended
    assert (row.status, row.fallback_of) == (503, "m")


def test_unknown_models_and_requests_that_forbid_the_fallback_are_refused(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.requests.fail_model("m", "the weights are broken")
    service.requests.admit(front.name, admit(service, front, may_fall_back=False))
    assert not answer(front).falls_back
    service.requests.admit(front.name, admit(service, front, unit="gone"))
    refused = answer(front)
    assert (refused.status, refused.falls_back) == (404, False)
    assert [row.status for row in service.rows.ended] == [503, 404]
