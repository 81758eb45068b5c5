"""The ledger's decisions, one at a time."""

from __future__ import annotations

import msgspec
import pytest

from appliance.messages import Admitted, Identity, Refused, Rejected, Settle
from appliance.traffic.overload import DROP_BACKGROUND
from appliance.traffic.requests import MOST_DROPPED
from appliance.traffic.rules import QueueRules
from engine.messages import Finished, Report
from tests.core.house import ROWS, TOKENS, FakeFront, House


@pytest.fixture
def house() -> House:
    return House()


def read_all(house: House) -> None:
    """The core reads everything that lies in its channels."""
    for front in house.live_fronts():
        while front.to_core:
            house.core_reads_front(front)
    for replica in house.replicas:
        while replica.to_core:
            house.core_reads_replica(replica)


def answers(front: FakeFront) -> list[Admitted | Refused]:
    return list(front.from_core)


def settle(request_id: str, delivered: int) -> Settle:
    return Settle(
        request_id=request_id,
        submitted=True,
        status=200,
        finish_reason="stop",
        delivered_tokens=delivered,
        e2e_ms=9.0,
    )


def finished(request_id: str, generated: int, cached: int = 0) -> Finished:
    return Finished(request_id, 0, 0, 8, cached, generated, 1, 3, ["stop"], 8)


def report(*ended: Finished, rows: int = ROWS, tokens: int = TOKENS) -> Report:
    return Report(step=1, credit_seqs=rows, credit_tokens=tokens, finished=list(ended))


def test_a_request_is_admitted_while_the_replica_has_rows_and_tokens(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    for _ in range(ROWS + 2):
        house.ask(front, tokens=1)
    read_all(house)
    assert [turn.request_id for turn in answers(front)] == ["r0", "r1", "r2", "r3"]
    house.ledger.report(replica.account, report(finished("r0", 5), rows=ROWS + 1))
    assert [turn.request_id for turn in answers(front)][4:] == ["r4"]


def test_token_credit_lets_one_request_through_whatever_its_size_and_then_waits(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front, tokens=10 * TOKENS)
    house.ask(front, tokens=1)
    read_all(house)
    assert [turn.request_id for turn in answers(front)] == ["r0"]


def test_of_two_replicas_the_one_with_more_credit_takes_the_request(house: House) -> None:
    front = house.new_front()
    house.new_replica(), house.new_replica()
    read_all(house)
    for _ in range(4):
        house.ask(front, tokens=1)
    read_all(house)
    turns = [turn.replica for turn in answers(front) if isinstance(turn, Admitted)]
    assert sorted(turns) == ["m-0", "m-0", "m-1", "m-1"]


def test_batch_requests_wait_behind_interactive_ones(house: House) -> None:
    front = house.new_front()
    for asked_class in ("flex", "", "P0"):
        request_id = house.ask(front)
        admit = front.to_core.pop()
        fields = {field: getattr(admit, field) for field in admit.__struct_fields__}
        front.to_core.append(type(admit)(**fields | {"asked_class": asked_class}))
        assert request_id == admit.request_id
    read_all(house)
    house.new_replica()
    read_all(house)
    assert [(turn.request_id, turn.priority) for turn in answers(front) if isinstance(turn, Admitted)] == [
        ("r1", 1),
        ("r2", 1),
        ("r0", 2),
    ]


def test_requests_wait_while_the_model_loads_and_are_refused_when_it_takes_too_long(house: House) -> None:
    front = house.new_front()
    house.ask(front)
    read_all(house)
    house.ledger.expire()
    assert answers(front) == []
    house.now += 51
    house.ledger.expire()
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (503, "queue_timeout")
    assert refused.retry_after_s is not None and "no replica of the model is ready" in refused.message
    assert house.rows.ended[0].status == 503


@pytest.mark.parametrize("hours", [-1, 1])
def test_who_waits_is_not_touched_when_somebody_sets_the_clock(house: House, hours: int) -> None:
    front = house.new_front()
    house.ask(front)
    house.ask(front)
    front.to_core[-1] = msgspec.structs.replace(front.to_core[-1], deadline_ms=20_000.0)
    house.now += 1  # on its way
    read_all(house)
    house.time_of_day += 3600.0 * hours
    house.now += 18
    house.ledger.expire()
    assert answers(front) == []
    for passed_s, code in ((2, "deadline_unreachable"), (32, "queue_timeout")):
        house.now += passed_s
        house.ledger.expire()
        assert [answer.code for answer in answers(front) if isinstance(answer, Refused)][-1] == code


def test_a_full_queue_refuses_with_retry_after(house: House) -> None:
    front = house.new_front()
    for _ in range(7):
        house.ask(front)
    read_all(house)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.status, refused.code) == ("r6", 503, "queue_full")
    assert refused.retry_after_s == 1.0


def test_an_unknown_model_is_refused_with_404_and_the_names_there_are(house: House) -> None:
    front = house.new_front()
    house.ask(front)
    admit = front.to_core.pop()
    fields = {field: getattr(admit, field) for field in admit.__struct_fields__}
    house.ledger.admit(front.name, type(admit)(**fields | {"model": "gpt"}))
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.message) == (404, "there is no model 'gpt': there are m")


def test_a_failed_model_refuses_what_waits_and_what_comes_with_the_reason(house: House) -> None:
    front = house.new_front()
    house.ask(front)
    read_all(house)
    house.ledger.fail_model("m", "model-2.safetensors is truncated")
    house.ask(front)
    read_all(house)
    assert [(r.status, "truncated" in r.message) for r in answers(front) if isinstance(r, Refused)] == [
        (503, True)
    ] * 2
    house.check_end()


def test_draining_refuses_new_requests_and_finishes_the_others(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.ledger.close(None, "the service is stopping")
    house.ask(front)
    read_all(house)
    admitted, refused = answers(front)
    assert isinstance(admitted, Admitted)
    assert isinstance(refused, Refused) and refused.code == "draining"
    assert refused.message == "the service is stopping" and refused.retry_after_s
    assert replica.account.available_rows == ROWS - 1


def test_a_model_that_is_closed_refuses_and_the_others_do_not(house: House) -> None:
    house.ledger.add_model("other", "v1")
    front = house.new_front()
    house.new_replica()
    house.ledger.close("other", "model 'other' is draining")
    house.ask(front)
    read_all(house)
    assert [type(answer) for answer in answers(front)] == [Admitted]
    house.ledger.close("m", "model 'm' is draining")
    house.ask(front)
    read_all(house)
    assert [type(answer) for answer in answers(front)] == [Admitted, Refused]
    house.ledger.open("m")
    house.ask(front)
    read_all(house)
    assert [type(answer) for answer in answers(front)] == [Admitted, Refused, Admitted]
    house.settle_everything()
    house.check_end()


def test_what_is_held_keeps_its_order_and_is_no_part_of_what_a_drain_waits_for(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front)
    read_all(house)
    house.ledger.close(None, "draining", hold=True)
    for _ in range(3):
        house.ask(front)
    read_all(house)
    ledger = house.ledger
    assert [request.request_id for request in ledger.unfinished()] == ["r0"]
    assert (ledger.held(), ledger.held("m"), ledger.held("other")) == (3, 3, 0)
    assert ledger.figures().waiting == 3
    assert [turn.request_id for turn in answers(front)] == ["r0"]
    house.settle(front, "r2", 499)  # its client left
    read_all(house)
    ledger.open(None)
    assert [turn.request_id for turn in answers(front)] == ["r0", "r1", "r3"]
    house.settle_everything()
    house.check_end()


def test_what_is_held_is_bounded_in_number_and_time_and_refused_when_the_service_stops(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    read_all(house)  # it has room
    house.ledger.close(None, "draining", hold=True)
    for _ in range(7):
        house.ask(front)
    read_all(house)
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)] == ["queue_full"]
    house.now += 51
    house.ledger.expire()
    refused = [answer.code for answer in answers(front) if isinstance(answer, Refused)]
    assert refused == ["queue_full"] + ["queue_timeout"] * 6
    house.ask(front)
    read_all(house)
    assert house.ledger.held() == 1
    house.ledger.close("m", "the model is draining")
    assert house.ledger.held() == 1
    house.ledger.open(None)
    assert house.ledger.held() == 0
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)][7:] == ["draining"]
    house.settle_everything()
    house.check_end()


def test_the_prompts_of_what_is_held_are_bounded_together(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    read_all(house)
    house.ledger.set_rules(QueueRules(limit=100, tokens=20))
    house.ledger.close("m", "draining", hold=True)
    for _ in range(3):
        house.ask(front)  # 8 tokens each
    read_all(house)
    assert [answer.code for answer in answers(front) if isinstance(answer, Refused)] == ["queue_full"]
    assert (house.ledger.held(), house.ledger.figures().waiting_tokens) == (2, 16)
    house.ledger.open("m")
    house.settle_everything()
    house.check_end()
    assert house.ledger.figures().waiting_tokens == 0


def test_an_overload_drops_what_waits_of_the_background_a_part_at_a_look() -> None:
    house = House(queue_limit=10_000)
    front = house.new_front()
    for _ in range(MOST_DROPPED + 1):
        house.ask(front)
        front.to_core[-1] = msgspec.structs.replace(front.to_core[-1], asked_class="P3")
    read_all(house)
    house.ledger._models["m"].ladder.step = DROP_BACKGROUND
    house.ledger.expire()
    refused = [answer.code for answer in answers(front) if isinstance(answer, Refused)]
    assert refused == ["overloaded"] * MOST_DROPPED
    house.ledger.expire()
    assert len(answers(front)) == MOST_DROPPED + 1
    house.settle_everything()
    house.check_end()


def test_a_retired_replica_finishes_what_it_has_and_gets_nothing_more(house: House) -> None:
    front, old = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    new = house.new_replica()
    house.ledger.retire_replica(old.account)
    house.ask(front)
    read_all(house)
    assert [turn.replica for turn in answers(front)] == ["m-0", "m-1"]
    assert house.ledger.occupied(old.account)
    house.settle_everything()
    assert not house.ledger.occupied(old.account)
    assert new.account.available_rows == old.account.available_rows == ROWS


def test_a_removed_model_refuses_what_waits_for_it_and_what_comes(house: House) -> None:
    house.ledger.add_model("other", "v1")
    front = house.new_front()
    house.ask(front)
    house.ledger.close("m", "draining", hold=True)
    house.ask(front)
    read_all(house)
    house.ledger.remove_model("m")
    house.ask(front)
    read_all(house)
    assert [(answer.status, answer.code) for answer in answers(front)] == [(404, "model_not_found")] * 3
    assert len(house.ledger) == 0


@pytest.mark.parametrize("order", ["settle first", "finished first"])
def test_the_row_ends_with_what_the_front_delivered_and_the_engine_counted(house: House, order: str) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.now += 2
    words = [
        lambda: house.ledger.settle(front.name, settle("r0", 7)),
        lambda: house.ledger.report(replica.account, report(finished("r0", 9, cached=4), rows=5, tokens=48)),
    ]
    for word in words if order == "settle first" else reversed(words):
        assert house.rows.ended == []
        word()
    (row,) = house.rows.ended
    assert (row.billed_tokens, row.generated_tokens, row.cached_tokens, row.prompt_tokens) == (7, 9, 4, 8)
    assert (row.status, row.finish_reason, row.replica, row.devices) == (200, "stop", "m-0", "cpu")
    assert (row.batch_size_at_start, row.preemptions, row.resubmissions) == (3, 1, 0)
    assert (row.version, row.request_class, row.key_id) == ("v1", "P1", None)
    house.check_end()


def test_a_request_whose_replica_died_goes_on_elsewhere_ahead_of_others(house: House) -> None:
    front, first = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.hear(front)
    for _ in range(5):
        house.ask(front, tokens=TOKENS)
    read_all(house)
    house.kill_replica(first)
    # The front reads the death before the core does: the core must not hand the request back to the dead one.
    house.ask_again(front, "r0")
    read_all(house)
    assert all(turn.request_id != "r0" for turn in answers(front))
    house.core_reads_replica(first)
    second = house.new_replica()
    read_all(house)
    turns = [turn for turn in answers(front) if isinstance(turn, Admitted) and turn.replica == "m-1"]
    assert [(turn.request_id, turn.attempt) for turn in turns] == [("r0", 1), ("r2", 0)]
    house.ledger.settle(front.name, settle("r0", 6))
    house.ledger.report(second.account, report(finished("r0", 2)))
    row = house.rows.ended[-1]
    # The dead replica's count is lost; what was delivered was generated.
    assert (row.generated_tokens, row.billed_tokens, row.resubmissions) == (6, 6, 1)


def test_the_row_of_a_dead_fronts_request_says_so_and_bills_nothing(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.kill_front(front)
    house.bury_front(front)
    assert house.rows.ended == [], "the replica has not said that it is rid of it"
    replica.take(front.name)
    replica.report()
    read_all(house)
    (row,) = house.rows.ended
    assert (row.status, row.finish_reason, row.error) == (499, "cancelled", "the front process died")
    assert row.billed_tokens == 0
    house.check_end()


def test_a_withdrawn_second_attempt_leaves_the_first_one_to_its_replica(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.hear(front)
    # The front's channel broke; the replica lives, and will say what it did.
    house.ask_again(front, "r0")
    house.settle(front, "r0", 499)
    read_all(house)
    assert house.rows.ended == []
    house.ledger.report(replica.account, report(finished("r0", 4), rows=ROWS + 1, tokens=TOKENS + 8))
    (row,) = house.rows.ended
    assert (row.status, row.generated_tokens) == (499, 4)
    house.check_end()


def test_nothing_is_dispatched_for_a_front_that_the_replica_has_lost(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    read_all(house)
    house.ask(front)
    house.kill_front(front)
    replica.take(front.name)
    replica.report()
    house.core_reads_replica(replica)
    house.core_reads_front(front)
    assert answers(front) == []
    house.core_reads_front(front)
    assert house.rows.ended[0].status == 499
    house.check_end()


def test_tenants_never_share_a_cache_salt(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front)
    read_all(house)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted) and turn.cache_salt == "salt of t"


def test_a_request_that_the_front_refused_is_one_row(house: House) -> None:
    house.ledger.reject(
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
    (row,) = house.rows.ended
    assert (row.status, row.error, row.key_id, row.finished_at) == (400, "too long", "key_1", 1000.0)


def test_a_second_request_with_an_id_in_flight_is_refused_and_leaves_the_first_alone(house: House) -> None:
    front, other = house.new_front(), house.new_front()
    house.new_replica()
    house.ask(front)
    admit = front.to_core[0]
    read_all(house)
    house.ledger.admit(other.name, admit)
    (refused,) = answers(other)
    assert isinstance(refused, Refused) and refused.status == 409
    house.settle_everything()
    house.check_end()
