"""Tests of quotas in the request manager: tokens are reserved when a request is accepted, and returned
exactly once."""

from __future__ import annotations

import pytest

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.identity import Identity
from appliance.protocol import LimitUsage
from appliance.traffic.credits import CreditAccount
from engine.rank_messages import Report
from store.policies import Policies, Quota, TenantRecord
from tests.core.simulated_service import SLOTS, TOKENS, FakeFront, SimulatedService
from tests.core.test_quotas import key
from tests.core.test_request_manager import answers, read_all, report


def limited(service: SimulatedService, of_key: Quota = Quota(), **tenant: float) -> None:  # noqa: B008
    record = TenantRecord(name="t", created_at=0.0, quota=Quota(**tenant))  # type: ignore[arg-type]
    service.requests.set_policies(Policies([record], [key("k", "t", quota=of_key)]))


@pytest.fixture
def service() -> SimulatedService:
    """Return a service with a token quota. Each request in a test reserves 8 prompt tokens and 5 output
    tokens, and delivers 3 output tokens."""
    service = SimulatedService()
    limited(service, tokens_per_minute=60.0)
    return service


def usage(service: SimulatedService, scope: str = "tenant", name: str = "t") -> LimitUsage:
    (found,) = service.requests.state.quotas.usage(scope, name)
    return found


def used(service: SimulatedService) -> tuple[int, int]:
    return usage(service).used, usage(service).held


def test_the_maximum_usage_of_a_request_is_reserved_before_it_waits(service: SimulatedService) -> None:
    front = service.new_front()
    for _ in range(5):
        service.ask(front)
    read_all(service)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.status, refused.code) == ("r4", 429, "rate_limit_exceeded")
    assert (refused.kind, refused.retry_after_s, refused.useless) == ("tokens", pytest.approx(5.0), False)
    assert refused.rate_limits is not None and refused.rate_limits.remaining_tokens == 60 - 4 * 13
    assert used(service) == (52, 52)
    assert service.rows.ended[0].quota_tokens == 0


def test_a_request_that_can_never_run_is_refused_as_useless_to_retry(service: SimulatedService) -> None:
    front = service.new_front()
    service.ask(front, tokens=56)
    read_all(service)
    (refused,) = answers(front)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.retry_after_s, refused.useless) == (429, None, True)


def test_undelivered_tokens_are_returned_when_a_request_ends(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front)
    read_all(service)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted) and turn.rate_limits is not None
    assert (turn.rate_limits.limit_tokens, turn.rate_limits.remaining_tokens) == (60, 47)
    assert turn.rate_limits.limit_requests is None and turn.most_tokens is None
    service.settle_everything()
    assert used(service) == (8 + 3, 0)
    assert [row.quota_tokens for row in service.rows.ended] == [11]


def test_a_request_that_left_the_queue_without_running_uses_no_quota(service: SimulatedService) -> None:
    front = service.new_front()
    for _ in range(4):
        service.ask(front)
    read_all(service)
    service.settle(front, "r0", 499)
    read_all(service)
    assert used(service) == (39, 39)
    service.requests.pause_admission(None, "draining", hold=True)
    service.now += 51
    service.requests.expire()
    assert used(service) == (0, 0)
    assert [row.quota_tokens for row in service.rows.ended] == [0] * 4
    service.check_end()


def test_requests_of_a_front_that_dies_are_charged_the_generated_tokens(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front)
    read_all(service)
    service.hear(front)
    service.kill_front(front)
    service.settle_everything()
    assert used(service) == (8 + 5, 0)
    assert (service.rows.ended[0].billed_tokens, service.rows.ended[0].quota_tokens) == (0, 13)


def test_if_replica_and_front_die_the_whole_reservation_is_charged(service: SimulatedService) -> None:
    front, replica = service.new_front(), service.new_replica()
    service.ask(front, tokens=2)
    read_all(service)
    service.hear(front)
    service.kill_replica(replica)
    service.kill_front(front)
    service.settle_everything()
    assert used(service) == (2 + 5, 0)


def front_of_a_failed_replica(service: SimulatedService) -> FakeFront:
    """Return a front whose only request was running on a replica that has died."""
    front, replica = service.new_front(), service.new_replica()
    service.ask(front)
    read_all(service)
    service.hear(front)
    service.kill_replica(replica)
    service.core_reads_replica(replica)
    return front


def test_a_lost_replica_keeps_the_reservation_and_the_answer_is_charged_once(
    service: SimulatedService,
) -> None:
    front = front_of_a_failed_replica(service)
    assert used(service) == (13, 13)
    service.ask_again(front, "r0")
    read_all(service)
    assert used(service) == (13, 13)
    service.new_replica()
    service.settle_everything()
    assert used(service) == (11, 0)


def test_a_refused_resubmission_is_billed_the_tokens_that_its_client_received(
    service: SimulatedService,
) -> None:
    front = front_of_a_failed_replica(service)
    service.ask_again(front, "r0")
    read_all(service)
    service.requests.fail_model("m", "the files are gone")
    service.hear(front)
    read_all(service)
    (row,) = service.rows.ended
    assert (row.status, row.billed_tokens, row.quota_tokens) == (503, 3, 11)
    service.check_end()


def test_without_max_tokens_the_output_is_limited_to_the_remaining_quota(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front, max_tokens=1000, may_lower=True, num_seqs=2)
    read_all(service)
    (turn,) = answers(front)
    assert isinstance(turn, Admitted)
    assert turn.most_tokens == (60 - 8) // 2
    assert used(service) == (60, 60)


def test_the_limits_of_a_key_and_of_its_tenant_both_apply(service: SimulatedService) -> None:
    limited(service, Quota(requests_per_minute=1.0), tokens_per_minute=60.0)
    front = service.new_front()
    service.new_replica()
    for key_id in ("k", "k", ""):
        service.ask(front, identity=Identity(tenant="t", key_id=key_id))
    read_all(service)
    first, second, third = sorted(answers(front), key=lambda answer: answer.request_id)
    assert isinstance(first, Admitted) and isinstance(third, Admitted)
    assert isinstance(second, Refused) and (second.status, second.kind) == (429, "requests")
    assert "requests per minute of key 'k': limit 1, used 1" in second.message
    assert usage(service, "key", "k").held == 1
    assert first.rate_limits is not None and first.rate_limits.remaining_requests == 0
    assert third.rate_limits is not None and third.rate_limits.limit_requests is None


def test_a_changed_limit_applies_to_the_next_request(service: SimulatedService) -> None:
    front = service.new_front()
    service.new_replica()
    service.ask(front)
    read_all(service)
    limited(service, tokens_per_minute=12.0)
    service.ask(front)
    read_all(service)
    limited(service)
    service.ask(front)
    read_all(service)
    told = sorted(answers(front), key=lambda answer: answer.request_id)
    assert [type(answer) for answer in told] == [Admitted, Refused, Admitted]


def running(front: FakeFront) -> list[str]:
    return sorted(answer.request_id for answer in answers(front) if isinstance(answer, Admitted))


def test_a_request_that_lost_its_replica_keeps_its_place_among_the_concurrent_requests(
    service: SimulatedService,
) -> None:
    limited(service, concurrent_requests=1)
    front, replica = service.new_front(), service.new_replica()
    service.new_replica()
    service.ask(front), service.ask(front)
    read_all(service)
    assert running(front) == ["r0"]
    (turn,) = answers(front)
    assert isinstance(turn, Admitted)
    service.hear(front)
    replica = next(one for one in service.replicas if one.account.replica == turn.replica)
    service.kill_replica(replica)
    service.core_reads_replica(replica)
    assert running(front) == []
    service.ask_again(front, "r0")
    read_all(service)
    assert running(front) == ["r0"]
    service.settle_everything()
    assert [row.status for row in service.rows.ended] == [200, 200]
    service.check_end()


def test_a_request_that_lost_its_replica_and_is_cancelled_frees_its_place(service: SimulatedService) -> None:
    limited(service, concurrent_requests=1)
    front, replica = service.new_front(), service.new_replica()
    service.ask(front), service.ask(front)
    read_all(service)
    service.hear(front)
    service.kill_replica(replica)
    service.core_reads_replica(replica)
    service.new_replica()
    assert running(front) == []
    service.settle(front, "r0", 499)
    read_all(service)
    assert running(front) == ["r1"]


def test_the_concurrency_limit_of_a_key_covers_all_models(service: SimulatedService) -> None:
    limited(service, Quota(concurrent_requests=1))
    service.requests.add_model("other", "v1")
    account = CreditAccount("o-0", "other", "cpu")
    service.requests.add_replica(account)
    service.requests.report(account, report())
    front = service.new_front()
    service.new_replica()
    identity = Identity(tenant="t", key_id="k")
    service.ask(front, identity=identity)
    read_all(service)
    service.ask(front, identity=identity, model="other")
    read_all(service)
    assert running(front) == ["r0"]
    (usage,) = service.requests.state.usage("key", "k")
    assert (usage.limit, usage.used, usage.capacity) == ("concurrent_requests", 1, 1)
    service.settle(front, "r0", 499)
    read_all(service)
    assert running(front) == ["r0", "r1"]


def test_rotating_a_key_does_not_double_its_limits(service: SimulatedService) -> None:
    quota = Quota(concurrent_requests=1, requests_per_minute=60.0)
    keys = [key("old", "t", quota=quota, replaced_by="new"), key("new", "t", quota=quota)]
    service.requests.set_policies(Policies([TenantRecord(name="t", created_at=0.0)], keys))
    front = service.new_front()
    service.new_replica()
    for key_id in ("old", "new"):
        service.ask(front, identity=Identity(tenant="t", key_id=key_id))
    read_all(service)
    assert running(front) == ["r0"]
    assert [one.used for one in service.requests.state.usage("key", "old")] == [2, 1]
    service.settle_everything()
    assert [row.key_id for row in service.rows.ended] == ["old", "new"]


def test_running_requests_of_a_rotated_key_count_for_the_new_key(
    service: SimulatedService,
) -> None:
    tenant, quota = TenantRecord(name="t", created_at=0.0), Quota(concurrent_requests=1)
    service.requests.set_policies(Policies([tenant], [key("old", "t", quota=quota)]))
    front = service.new_front()
    service.new_replica()
    for _ in range(2):
        service.ask(front, identity=Identity(tenant="t", key_id="old"))
    read_all(service)
    keys = [key("old", "t", quota=quota, replaced_by="new"), key("new", "t", quota=quota)]
    service.requests.set_policies(Policies([tenant], keys))
    service.ask(front, identity=Identity(tenant="t", key_id="new"))
    read_all(service)
    assert running(front) == ["r0"]
    assert [one.used for one in service.requests.state.usage("key", "new")] == [1]
    for number in range(2):
        service.settle(front, f"r{number}", 499)
        read_all(service)
        assert running(front)[-1] == f"r{number + 1}"
    service.settle_everything()
    service.check_end()
    assert [one.used for one in service.requests.state.usage("key", "new")] == [0]


def test_the_maximum_kv_blocks_of_a_request_count_against_the_tenants_share(
    service: SimulatedService,
) -> None:
    front, replica = service.new_front(), service.new_replica()
    read_all(service)
    capacity = Report(step=1, credit_seqs=SLOTS, credit_tokens=TOKENS, blocks_total=16)
    service.requests.report(replica.account, capacity)
    limited(service, kv_share=0.2)
    for _ in range(4):
        service.ask(front)
    read_all(service)
    # Each request needs 8 + 5 + 64 = 77 tokens, and the limit is a fifth of 1,024.
    assert running(front) == ["r0", "r1"]
    (usage,) = service.requests.state.usage("tenant", "t")
    assert (usage.limit, usage.used, usage.capacity) == ("kv_share", 154, 204)
    service.settle_everything()
    assert len(service.rows.ended) == 4
