"""Quotas around the ledger: held from a request's acceptance to its end, given back once whatever happens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.messages import Admitted, Identity, Refused
from appliance.protocol import LimitUsage
from appliance.traffic.credits import CreditAccount
from engine.messages import Report
from store.policies import KeyRecord, Policies, Quota, TenantRecord
from tests.core.house import ROWS, TOKENS, FakeFront, House
from tests.core.test_ledger import answers, read_all, report


def limited(house: House, key: Quota = Quota(), **tenant: float) -> None:  # noqa: B008
    keys = [KeyRecord(id="k", name="k", tenant="t", prefix="", sha256="", created_at=0.0, quota=key)]
    house.ledger.set_policies(
        Policies([TenantRecord(name="t", created_at=0.0, quota=Quota(**tenant))], keys)  # type: ignore[arg-type]
    )


@pytest.fixture
def house() -> House:
    """Each request of a test reserves 8 tokens of prompt and 5 of output; it delivers 3."""
    house = House()
    limited(house, tokens_per_minute=60.0)
    return house


def usage(house: House, scope: str = "tenant", name: str = "t") -> LimitUsage:
    (found,) = house.ledger.quotas.usage(scope, name)
    return found


def used(house: House) -> tuple[int, int]:
    return usage(house).used, usage(house).held


def ask_with(house: House, front: FakeFront, **changes: object) -> str:
    """Ask with another `Admit`."""
    request_id = house.ask(front)
    front.asks[request_id].admit = msgspec.structs.replace(front.to_core.pop(), **changes)
    front.to_core.append(front.asks[request_id].admit)
    return request_id


def test_what_a_request_may_need_is_reserved_before_it_waits(house: House) -> None:
    front = house.new_front()
    for _ in range(5):
        house.ask(front)
    read_all(house)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.status, refused.code) == ("r4", 429, "rate_limit_exceeded")
    assert (refused.kind, refused.retry_after_s, refused.useless) == ("tokens", pytest.approx(5.0), False)
    assert refused.rate_limits is not None and refused.rate_limits.remaining_tokens == 60 - 4 * 13
    assert used(house) == (52, 52)
    assert house.rows.ended[0].quota_tokens == 0


def test_a_request_that_can_never_run_is_told_that_trying_again_is_useless(house: House) -> None:
    front = house.new_front()
    house.ask(front, tokens=56)
    read_all(house)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.retry_after_s, refused.useless) == (429, None, True)


def test_what_was_not_delivered_comes_back_with_the_end(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front)
    read_all(house)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted) and turn.rate_limits is not None
    assert (turn.rate_limits.limit_tokens, turn.rate_limits.remaining_tokens) == (60, 47)
    assert turn.rate_limits.limit_requests is None and turn.most_tokens is None
    house.settle_everything()
    assert used(house) == (8 + 3, 0)
    assert [row.quota_tokens for row in house.rows.ended] == [11]


def test_what_left_the_queue_without_a_turn_used_nothing(house: House) -> None:
    front = house.new_front()
    for _ in range(4):
        house.ask(front)
    read_all(house)
    house.settle(front, "r0", 499)
    read_all(house)
    assert used(house) == (39, 39)
    house.ledger.close(None, "draining", hold=True)
    house.now += 51
    house.ledger.expire()
    assert used(house) == (0, 0)
    assert [row.quota_tokens for row in house.rows.ended] == [0] * 4
    house.check_end()


def test_what_a_drain_held_and_then_refused_used_nothing(house: House) -> None:
    front = house.new_front()
    house.ledger.close(None, "draining", hold=True)
    house.ask(front)
    read_all(house)
    assert used(house) == (13, 13)
    house.ledger.close(None, "stopping")
    assert used(house) == (0, 0)


def test_a_front_that_dies_is_charged_what_was_generated(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front)
    read_all(house)
    house.hear(front)
    house.kill_front(front)
    house.settle_everything()
    assert used(house) == (8 + 5, 0)
    assert (house.rows.ended[0].billed_tokens, house.rows.ended[0].quota_tokens) == (0, 13)


def test_where_the_count_dies_too_all_that_was_reserved_is_charged(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front, tokens=2)
    read_all(house)
    house.hear(front)
    house.kill_replica(replica)
    house.kill_front(front)
    house.settle_everything()
    assert used(house) == (2 + 5, 0)


def test_a_lost_replica_keeps_the_reservation_and_the_answer_is_charged_once(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.hear(front)
    house.kill_replica(replica)
    house.core_reads_replica(replica)
    assert used(house) == (13, 13)
    house.ask_again(front, "r0")
    read_all(house)
    assert used(house) == (13, 13)
    house.new_replica()
    house.settle_everything()
    assert used(house) == (11, 0)


def test_a_resubmission_that_is_refused_is_billed_what_its_client_had(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    house.ask(front)
    read_all(house)
    house.hear(front)
    house.kill_replica(replica)
    house.core_reads_replica(replica)
    house.ask_again(front, "r0")
    read_all(house)
    house.ledger.fail_model("m", "the files are gone")
    house.hear(front)
    read_all(house)
    (row,) = house.rows.ended
    assert (row.status, row.billed_tokens, row.quota_tokens) == (503, 3, 11)
    house.check_end()


def test_without_max_tokens_no_more_may_be_produced_than_is_left(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    ask_with(house, front, max_tokens=1000, may_lower=True, rows=2)
    read_all(house)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted)
    assert turn.most_tokens == (60 - 8) // 2
    assert used(house) == (60, 60)


def test_a_keys_limit_holds_beside_its_tenants(house: House) -> None:
    limited(house, Quota(requests_per_minute=1.0), tokens_per_minute=60.0)
    front = house.new_front()
    house.new_replica()
    for key_id in ("k", "k", ""):
        ask_with(house, front, identity=Identity(tenant="t", key_id=key_id))
    read_all(house)
    first, second, third = sorted(answers(front), key=lambda answer: answer.request_id)
    assert isinstance(first, Admitted) and isinstance(third, Admitted)
    assert isinstance(second, Refused) and (second.status, second.kind) == (429, "requests")
    assert "requests per minute of key 'k': limit 1, used 1" in second.message
    assert usage(house, "key", "k").held == 1
    assert first.rate_limits is not None and first.rate_limits.remaining_requests == 0
    assert third.rate_limits is not None and third.rate_limits.limit_requests is None


def test_a_limit_that_is_changed_holds_for_the_next_request(house: House) -> None:
    front = house.new_front()
    house.new_replica()
    house.ask(front)
    read_all(house)
    limited(house, tokens_per_minute=12.0)
    house.ask(front)
    read_all(house)
    limited(house)
    house.ask(front)
    read_all(house)
    told = sorted(answers(front), key=lambda answer: answer.request_id)
    assert [type(answer) for answer in told] == [Admitted, Refused, Admitted]


def running(front: FakeFront) -> list[str]:
    return sorted(answer.request_id for answer in answers(front) if isinstance(answer, Admitted))


def test_who_lost_a_replica_keeps_its_place_among_those_that_may_run(house: House) -> None:
    limited(house, concurrent_requests=1)
    front, replica = house.new_front(), house.new_replica()
    house.new_replica()
    house.ask(front), house.ask(front)
    read_all(house)
    assert running(front) == ["r0"]
    (turn,) = answers(front)
    assert isinstance(turn, Admitted)
    house.hear(front)
    replica = next(one for one in house.replicas if one.account.replica == turn.replica)
    house.kill_replica(replica)
    house.core_reads_replica(replica)
    assert running(front) == []
    house.ask_again(front, "r0")
    read_all(house)
    assert running(front) == ["r0"]
    house.settle_everything()
    assert [row.status for row in house.rows.ended] == [200, 200]
    house.check_end()


def test_who_lost_a_replica_and_leaves_makes_place(house: House) -> None:
    limited(house, concurrent_requests=1)
    front, replica = house.new_front(), house.new_replica()
    house.ask(front), house.ask(front)
    read_all(house)
    house.hear(front)
    house.kill_replica(replica)
    house.core_reads_replica(replica)
    house.new_replica()
    assert running(front) == []
    house.settle(front, "r0", 499)
    read_all(house)
    assert running(front) == ["r1"]


def test_a_keys_requests_wait_for_each_other_over_all_models(house: House) -> None:
    limited(house, Quota(concurrent_requests=1))
    house.ledger.add_model("other", "v1")
    account = CreditAccount("o-0", "other", "cpu")
    house.ledger.add_replica(account)
    house.ledger.report(account, report())
    front = house.new_front()
    house.new_replica()
    identity = Identity(tenant="t", key_id="k")
    ask_with(house, front, identity=identity)
    read_all(house)
    ask_with(house, front, identity=identity, model="other")
    read_all(house)
    assert running(front) == ["r0"]
    (usage,) = house.ledger.usage("key", "k")
    assert (usage.limit, usage.used, usage.capacity) == ("concurrent_requests", 1, 1)
    house.settle(front, "r0", 499)
    read_all(house)
    assert running(front) == ["r0", "r1"]


def test_rotating_a_key_gives_no_second_share(house: House) -> None:
    def key(key_id: str, **fields: Any) -> KeyRecord:
        return KeyRecord(id=key_id, name="k", tenant="t", prefix="", sha256=key_id, created_at=0.0, **fields)

    quota = Quota(concurrent_requests=1, requests_per_minute=60.0)
    keys = [key("old", quota=quota, replaced_by="new"), key("new", quota=quota)]
    house.ledger.set_policies(Policies([TenantRecord(name="t", created_at=0.0)], keys))
    front = house.new_front()
    house.new_replica()
    for key_id in ("old", "new"):
        ask_with(house, front, identity=Identity(tenant="t", key_id=key_id))
    read_all(house)
    assert running(front) == ["r0"]
    assert [one.used for one in house.ledger.usage("key", "old")] == [2, 1]
    house.settle_everything()
    assert [row.key_id for row in house.rows.ended] == ["old", "new"]


def test_what_a_key_has_in_the_house_when_it_is_rotated_counts_for_its_successor(house: House) -> None:
    def key(key_id: str, successor: str | None = None) -> KeyRecord:
        quota = Quota(concurrent_requests=1)
        return KeyRecord(
            id=key_id, name="k", tenant="t", prefix="", sha256=key_id, created_at=0.0, quota=quota,
            replaced_by=successor,
        )  # fmt: skip

    tenant = TenantRecord(name="t", created_at=0.0)
    house.ledger.set_policies(Policies([tenant], [key("old")]))
    front = house.new_front()
    house.new_replica()
    for _ in range(2):
        ask_with(house, front, identity=Identity(tenant="t", key_id="old"))
    read_all(house)
    house.ledger.set_policies(Policies([tenant], [key("old", "new"), key("new")]))
    ask_with(house, front, identity=Identity(tenant="t", key_id="new"))
    read_all(house)
    assert running(front) == ["r0"]
    assert [one.used for one in house.ledger.usage("key", "new")] == [1]
    for number in range(2):
        house.settle(front, f"r{number}", 499)
        read_all(house)
        assert running(front)[-1] == f"r{number + 1}"
    house.settle_everything()
    house.check_end()
    assert [one.used for one in house.ledger.usage("key", "new")] == [0]


def test_a_share_of_the_kv_blocks_is_held_by_the_most_that_requests_may_keep(house: House) -> None:
    front, replica = house.new_front(), house.new_replica()
    read_all(house)
    room = Report(step=1, credit_seqs=ROWS, credit_tokens=TOKENS, blocks_total=16)
    house.ledger.report(replica.account, room)
    limited(house, kv_share=0.2)
    for _ in range(4):
        house.ask(front)
    read_all(house)
    assert running(front) == ["r0", "r1"]  # 8 + 5 + 64 tokens each, of a fifth of 1,024
    (usage,) = house.ledger.usage("tenant", "t")
    assert (usage.limit, usage.used, usage.capacity) == ("kv_share", 154, 204)
    house.settle_everything()
    assert len(house.rows.ended) == 4
