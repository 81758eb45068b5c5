"""Tests of individual decisions of the request manager."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.front_messages import Rejected, Settle
from appliance.channel.identity import Identity
from appliance.traffic.checks import MAX_VOID
from appliance.traffic.load_shedder import DROP_BACKGROUND
from appliance.traffic.request_manager import MAX_DROPPED
from appliance.traffic.rules import QueueRules
from engine.rank_messages import Finished, Report
from tests.core.simulated_service import SLOTS, TOKENS, FakeFront, SimulatedService


@pytest.fixture
def service() -> SimulatedService:
    return SimulatedService()


def read_all(service: SimulatedService) -> None:
    """Let the core read all messages that are waiting."""
    for front in service.live_fronts():
        while front.to_core:
            service.core_reads_front(front)
    for replica in service.replicas:
        while replica.to_core:
            service.core_reads_replica(replica)


def answers(front: FakeFront) -> list[Admitted | Refused]:
    return list(front.from_core)


def settle(request_id: str, delivered: int = 0, **changes: Any) -> Settle:
    """Return the settlement of an answered request, with the given fields changed."""
    answered = Settle(
        request_id=request_id,
        submitted=True,
        status=200,
        finish_reason="stop",
        delivered_tokens=delivered,
        e2e_ms=9.0,
    )
    return msgspec.structs.replace(answered, **changes)


def finished(request_id: str, generated: int, cached: int = 0) -> Finished:
    return Finished(request_id, 0, 0, 8, cached, generated, 1, 3, ["stop"], 8)


def report(*ended: Finished, slots: int = SLOTS, tokens: int = TOKENS) -> Report:
    return Report(step=1, credit_seqs=slots, credit_tokens=tokens, finished=list(ended))


def test_a_request_is_admitted_while_the_replica_has_rows_and_tokens(service: SimulatedService) -> None:
    front, replica = service.new_front(), service.new_replica()
    for _ in range(SLOTS + 2):
        service.ask(front, tokens=1)
    read_all(service)
    assert [turn.request_id for turn in answers(front)] == ["r0", "r1", "r2", "r3"]
    service.requests.report(replica.account, report(finished("r0", 5), slots=SLOTS + 1))
    assert [turn.request_id for turn in answers(front)][4:] == ["r4"]


def test_token_credit_lets_one_request_of_any_size_through_and_then_waits(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.new_replica()
    for tokens in (10 * TOKENS, 1, 10 * TOKENS):
        service.ask(front, tokens=tokens)
    read_all(service)
    assert [turn.request_id for turn in answers(front)] == ["r0", "r1"], "a shorter prompt has its own credit"


def test_of_two_replicas_the_one_with_more_credit_takes_the_request(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica(), service.new_replica()
    read_all(service)
    for _ in range(4):
        service.ask(front, tokens=1)
    read_all(service)
    turns = [turn.replica for turn in answers(front) if isinstance(turn, Admitted)]
    assert sorted(turns) == ["m-0", "m-0", "m-1", "m-1"]


@pytest.mark.parametrize(("ahead", "chosen"), [(0, "m-1"), (2, "m-1"), (3, "m-0")])
def test_a_prompt_returns_to_the_replica_that_computed_its_beginning_unless_that_is_busier(
    service: SimulatedService, ahead: int, chosen: str
) -> None:
    """With 16 slots, a prompt goes to the replica that computed its beginning unless that replica has more
    than two sequences more than the other one."""
    front, replicas = service.new_front(), [service.new_replica(), service.new_replica()]
    read_all(service)
    for replica in replicas:
        service.requests.report(replica.account, report(slots=16, tokens=1000))
    service.ask(front, tokens=1)  # by m-0
    service.ask(front, tokens=1, prefixes=(b"a", b"b"))  # by m-1
    read_all(service)
    for _ in range(ahead):
        service.ask(front, tokens=1, prefixes=(b"a", b"b", b"other"))
    service.ask(front, tokens=1, prefixes=(b"a", b"b", b"c"))
    read_all(service)
    turns = [turn.replica for turn in answers(front) if isinstance(turn, Admitted)]
    assert turns == ["m-0", "m-1", *["m-1"] * ahead, chosen]


def test_batch_requests_wait_behind_interactive_ones(service: SimulatedService) -> None:
    front = service.new_front()
    for asked_class in ("flex", "", "P0"):
        service.ask(front, asked_class=asked_class)
    read_all(service)
    service.new_replica()
    read_all(service)
    assert [(turn.request_id, turn.priority) for turn in answers(front) if isinstance(turn, Admitted)] == [
        ("r1", 1),
        ("r2", 1),
        ("r0", 2),
    ]


def test_requests_wait_while_the_model_loads_and_are_refused_when_it_takes_too_long(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.ask(front)
    read_all(service)
    service.requests.expire()
    assert answers(front) == []
    service.now += 51
    service.requests.expire()
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (503, "queue_timeout")
    assert refused.retry_after_s is not None and "no replica of the model is ready" in refused.message
    assert service.rows.ended[0].status == 503


@pytest.mark.parametrize("hours", [-1, 1])
def test_setting_the_clock_does_not_affect_waiting_requests(service: SimulatedService, hours: int) -> None:
    front = service.new_front()
    service.ask(front)
    service.ask(front, deadline_ms=20_000.0)
    service.now += 1  # on its way
    read_all(service)
    service.time_of_day += 3600.0 * hours
    service.now += 18
    service.requests.expire()
    assert answers(front) == []
    for passed_s, code in ((2, "deadline_unreachable"), (32, "queue_timeout")):
        service.now += passed_s
        service.requests.expire()
        assert [answer.code for answer in answers(front) if isinstance(answer, Refused)][-1] == code


def test_a_full_queue_refuses_with_retry_after(service: SimulatedService) -> None:
    front = service.new_front()
    for _ in range(7):
        service.ask(front)
    read_all(service)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.status, refused.code) == ("r6", 503, "queue_full")
    assert refused.retry_after_s == 1.0


def test_an_unknown_model_is_refused_with_404_and_the_names_of_the_known_models(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.ask(front, model="gpt")
    read_all(service)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.message) == (404, "there is no model 'gpt'; available models: m")


def test_a_failed_model_refuses_waiting_and_new_requests_with_the_reason(service: SimulatedService) -> None:
    front = service.new_front()
    service.ask(front)
    read_all(service)
    service.requests.fail_model("m", "model-2.safetensors is truncated")
    service.ask(front)
    read_all(service)
    assert [(r.status, "truncated" in r.message) for r in answers(front) if isinstance(r, Refused)] == [
        (503, True)
    ] * 2
    service.check_end()


def test_draining_refuses_new_requests_and_finishes_the_others(service: SimulatedService) -> None:
    front, replica = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.requests.pause_admission(None, "the service is stopping")
    service.ask(front)
    read_all(service)
    admitted, refused = answers(front)
    assert isinstance(admitted, Admitted)
    assert isinstance(refused, Refused) and refused.code == "draining"
    assert refused.message == "the service is stopping" and refused.retry_after_s
    assert replica.account.available_slots == SLOTS - 1


def test_only_a_model_with_paused_admission_refuses_requests(service: SimulatedService) -> None:
    service.requests.add_model("other", "v1")
    front = service.new_front()
    service.new_replica()
    service.requests.pause_admission("other", "model 'other' is draining")
    service.ask(front)
    read_all(service)
    assert [type(answer) for answer in answers(front)] == [Admitted]
    service.requests.pause_admission("m", "model 'm' is draining")
    service.ask(front)
    read_all(service)
    assert [type(answer) for answer in answers(front)] == [Admitted, Refused]
    service.requests.resume_admission("m")
    service.ask(front)
    read_all(service)
    assert [type(answer) for answer in answers(front)] == [Admitted, Refused, Admitted]
    service.settle_everything()
    service.check_end()


def test_held_requests_keep_their_order_and_a_drain_does_not_wait_for_them(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front)
    read_all(service)
    service.requests.pause_admission(None, "draining", hold=True)
    for _ in range(3):
        service.ask(front)
    read_all(service)
    requests = service.requests
    assert [request.request_id for request in requests.state.unfinished()] == ["r0"]
    assert (requests.state.held(), requests.state.held("m"), requests.state.held("other")) == (3, 3, 0)
    assert requests.state.queue_stats().waiting == 3
    assert [turn.request_id for turn in answers(front)] == ["r0"]
    service.settle(front, "r2", 499)  # the client has disconnected
    read_all(service)
    requests.resume_admission(None)
    assert [turn.request_id for turn in answers(front)] == ["r0", "r1", "r3"]
    service.settle_everything()
    service.check_end()


def test_held_requests_are_bounded_in_number_and_time_and_refused_when_the_service_stops(
    service: SimulatedService,
) -> None:
    front = service.new_front()
    service.new_replica()
    read_all(service)  # the core has been informed that the replica has free slots
    service.requests.pause_admission(None, "draining", hold=True)
    for _ in range(7):
        service.ask(front)
    read_all(service)
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)] == ["queue_full"]
    service.now += 51
    service.requests.expire()
    refused = [answer.code for answer in answers(front) if isinstance(answer, Refused)]
    assert refused == ["queue_full"] + ["queue_timeout"] * 6
    service.ask(front)
    read_all(service)
    assert service.requests.state.held() == 1
    service.requests.pause_admission("m", "the model is draining")
    assert service.requests.state.held() == 1
    service.requests.resume_admission(None)
    assert service.requests.state.held() == 0
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)][7:] == ["draining"]
    service.settle_everything()
    service.check_end()


def test_the_total_length_of_the_prompts_of_held_requests_is_bounded(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    read_all(service)
    service.requests.set_rules(QueueRules(limit=100, tokens=20))
    service.requests.pause_admission("m", "draining", hold=True)
    for _ in range(3):
        service.ask(front)  # 8 tokens each
    read_all(service)
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)] == ["queue_full"]
    assert (service.requests.state.held(), service.requests.state.queue_stats().waiting_tokens) == (2, 16)
    service.requests.resume_admission("m")
    service.settle_everything()
    service.check_end()
    assert service.requests.state.queue_stats().waiting_tokens == 0


def test_an_overload_drops_waiting_background_requests_a_few_at_a_time() -> None:
    service = SimulatedService(queue_limit=10_000)
    front = service.new_front()
    for _ in range(MAX_DROPPED + 1):
        service.ask(front, asked_class="P3")
    read_all(service)
    service.requests.state.models["m"].shedder.step = DROP_BACKGROUND
    service.requests.expire()
    refused = [answer.code for answer in answers(front) if isinstance(answer, Refused)]
    assert refused == ["overloaded"] * MAX_DROPPED
    service.requests.expire()
    assert len(answers(front)) == MAX_DROPPED + 1
    service.settle_everything()
    service.check_end()


def test_a_retired_replica_finishes_its_requests_and_gets_no_more(service: SimulatedService) -> None:
    front, old = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    new = service.new_replica()
    service.requests.retire_replica(old.account)
    service.ask(front)
    read_all(service)
    assert [turn.replica for turn in answers(front)] == ["m-0", "m-1"]
    assert service.requests.state.occupied(old.account)
    service.settle_everything()
    assert not service.requests.state.occupied(old.account)
    assert new.account.available_slots == old.account.available_slots == SLOTS


def test_a_removed_model_refuses_waiting_and_new_requests(service: SimulatedService) -> None:
    service.requests.add_model("other", "v1")
    front = service.new_front()
    service.ask(front)
    service.requests.pause_admission("m", "draining", hold=True)
    service.ask(front)
    read_all(service)
    service.requests.remove_model("m")
    service.ask(front)
    read_all(service)
    assert [(answer.status, answer.code) for answer in answers(front)] == [(404, "model_not_found")] * 3
    assert len(service.requests.state.in_flight) == 0


@pytest.mark.parametrize("order", ["settle first", "finished first"])
def test_the_row_contains_the_counts_of_the_front_and_of_the_engine(
    service: SimulatedService, order: str
) -> None:
    front, replica = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.now += 2
    words = [
        lambda: service.requests.settle(front.name, settle("r0", 7)),
        lambda: service.requests.report(
            replica.account, report(finished("r0", 9, cached=4), slots=5, tokens=48)
        ),
    ]
    for word in words if order == "settle first" else reversed(words):
        assert service.rows.ended == []
        word()
    (row,) = service.rows.ended
    assert (row.billed_tokens, row.generated_tokens, row.cached_tokens, row.prompt_tokens) == (7, 9, 4, 8)
    assert (row.status, row.finish_reason, row.replica, row.devices) == (200, "stop", "m-0", "cpu")
    assert (row.batch_size_at_start, row.preemptions, row.resubmissions) == (3, 1, 0)
    assert (row.version, row.request_class, row.key_id) == ("v1", "P1", None)
    service.check_end()


def test_a_request_whose_replica_died_continues_on_another_replica_ahead_of_others(
    service: SimulatedService,
) -> None:
    front, first = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.hear(front)
    for _ in range(5):
        service.ask(front, tokens=TOKENS)
    read_all(service)
    service.kill_replica(first)
    # The front notices the replica's death before the core does. The core must not dispatch the request to
    # the dead replica again.
    service.ask_again(front, "r0")
    read_all(service)
    assert all(turn.request_id != "r0" for turn in answers(front))
    service.core_reads_replica(first)
    second = service.new_replica()
    read_all(service)
    turns = [turn for turn in answers(front) if isinstance(turn, Admitted) and turn.replica == "m-1"]
    assert [(turn.request_id, turn.attempt) for turn in turns] == [("r0", 1), ("r2", 0)]
    service.requests.settle(front.name, settle("r0", 6))
    service.requests.report(second.account, report(finished("r0", 2)))
    row = service.rows.ended[-1]
    # The dead replica can no longer report a count, but it generated at least the tokens that were delivered.
    assert (row.generated_tokens, row.billed_tokens, row.resubmissions) == (6, 6, 1)


def test_the_row_of_a_request_whose_front_died_names_the_cause_and_bills_nothing(
    service: SimulatedService,
) -> None:
    front, replica = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.kill_front(front)
    service.bury_front(front)
    assert service.rows.ended == [], "the replica has not reported the request's end"
    replica.take(front.name)
    replica.report()
    read_all(service)
    (row,) = service.rows.ended
    assert (row.status, row.finish_reason, row.error) == (499, "cancelled", "the front process died")
    assert row.billed_tokens == 0
    service.check_end()


def test_a_withdrawn_second_attempt_leaves_the_first_one_to_its_replica(service: SimulatedService) -> None:
    front, replica = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.hear(front)
    # Only the front's channel broke. The replica is alive and will report the tokens that it generated.
    service.ask_again(front, "r0")
    service.settle(front, "r0", 499)
    read_all(service)
    assert service.rows.ended == []
    service.requests.report(replica.account, report(finished("r0", 4), slots=SLOTS + 1, tokens=TOKENS + 8))
    (row,) = service.rows.ended
    assert (row.status, row.generated_tokens) == (499, 4)
    service.check_end()


def test_nothing_is_dispatched_for_a_front_that_the_replica_has_lost(service: SimulatedService) -> None:
    front, replica = service.new_front(), service.new_replica()
    read_all(service)
    service.ask(front)
    service.kill_front(front)
    replica.take(front.name)
    replica.report()
    service.core_reads_replica(replica)
    service.core_reads_front(front)
    assert answers(front) == []
    service.core_reads_front(front)
    assert service.rows.ended[0].status == 499
    service.check_end()


def test_tenants_never_share_a_cache_salt(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front)
    read_all(service)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted) and turn.cache_salt == "salt of t"


def test_a_request_refused_by_the_front_has_one_row(service: SimulatedService) -> None:
    service.requests.reject(
        Rejected(
            request_id="x",
            identity=Identity(tenant="t", key_id="key_1"),
            peer="10.0.0.1:5",
            endpoint="/v1/completions",
            model="m",
            stream=False,
            status=400,
            error="too long",
            prompt_tokens=9000,
            arrived_at=999.0,
            e2e_ms=2.0,
        )
    )
    (row,) = service.rows.ended
    assert (row.status, row.error, row.key_id, row.finished_at) == (400, "too long", "key_1", 1000.0)


def test_a_second_request_with_the_id_of_a_running_one_is_refused_and_the_first_continues(
    service: SimulatedService,
) -> None:
    front, other = service.new_front(), service.new_front()
    service.new_replica()
    service.ask(front)
    admit = front.to_core[0]
    read_all(service)
    service.requests.admit(other.name, admit)
    (refused,) = answers(other)
    assert isinstance(refused, Refused) and refused.status == 409
    service.settle_everything()
    service.check_end()


def test_changed_rules_do_not_add_checks_of_waiting_requests(service: SimulatedService) -> None:
    service.requests.set_rules(QueueRules(limit=2000))
    front = service.new_front()
    for _ in range(600):
        service.ask(front)
    read_all(service)
    for _ in range(10):
        service.requests.set_rules(QueueRules(limit=2000))
    assert len(service.requests._lifecycle._checks._heap) <= 2 * 600 + MAX_VOID
