"""Tests of the what-if forecast for quotas. Its predictions are compared with a run of the same load under
the new limits, on a server with the real request manager and the real scheduler in virtual time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from appliance import calls
from appliance.actions.parameters import CreateKey, CreateTenant, SetTenant
from appliance.calls import AdminError
from appliance.client import AdminClient
from appliance.traffic.credits import CreditAccount
from appliance.traffic.recent import KEPT_S, MAX_RECENT, PastRequest
from appliance.traffic.simulated_replica import (
    ReplicaSpeed,
    SimulatedReplica,
    SimulatedSubmission,
    speed_of,
)
from appliance.traffic.what_if import ReplayInput, replay, replay_apart
from appliance.traffic.what_if_outcomes import Comparison, RequestResult, tenant_forecast
from engine.rank_messages import Report
from store.policies import Quota, TenantRecord
from tests.core.conftest import Service, read_answer
from tests.core.simulated_clients import percentile
from tests.core.simulated_server import Asked, Shape, SimulatedServer
from tests.waiting import wait_until

SECONDS = 60.0
_EPOCH = 1_790_000_000.0
"""Start of the load, in Unix seconds. At this time, the resolution of a float64 clock is 0.24 µs."""


def tenants(limit: float | None) -> list[TenantRecord]:
    return [
        TenantRecord(name="limited", created_at=0.0, quota=Quota(tokens_per_minute=limit)),
        TenantRecord(name="other", created_at=0.0),
    ]


def served(limit: float | None, seconds: float = SECONDS, *, cut_off: bool = False) -> SimulatedServer:
    """Return a server that has answered the load under this limit. The load itself does not depend on the
    limit. If `cut_off`, each answer is as long as its client allows."""
    server = SimulatedServer(tenants=tenants(limit))
    server.add_replica(slots=48)
    draw, at = random.Random(5), 0.0
    while at < seconds:
        at += draw.expovariate(16.0)
        tenant = "limited" if draw.random() < 0.6 else "other"
        output = draw.randint(100, 500)
        shape = Shape(draw.randint(200, 1500), output, output if cut_off else 600)
        server.at(at, lambda t=tenant, s=shape: server.ask(t, s))  # type: ignore[misc]
    server.run(seconds + 120.0)
    return server


shared = cache(served)
"""Like `served`, for servers that several tests read and none changes."""


def past(server: SimulatedServer, one: Asked) -> PastRequest:
    """Return a finished request in the form in which the service records it."""
    refused = one.refused
    return PastRequest(
        arrived_at=_EPOCH + one.arrived_at,
        tenant=one.tenant,
        key_id="",
        unit="m",
        request_class=1,
        submissions=1,
        num_seqs=1,
        prompt_tokens=one.shape.prompt,
        max_tokens=one.shape.max_tokens,
        may_lower=False,
        output_tokens=None if refused else one.tokens,
        status=refused.status if refused else 200,
        ttft_ms=None if refused else 1e3 * one.ttft_s,
        e2e_ms=0.3 if refused else None if one.ended_at is None else 1e3 * (one.ended_at - one.arrived_at),
    )


def given(server: SimulatedServer, changed: float | None) -> ReplayInput:
    """Return the input for the forecast, built from the requests that the server has handled."""
    [account] = [replica.account for replica in server.replicas]
    speed = speed_of(account)
    assert speed is not None
    state = server.requests.state
    before = list(state.quotas._policies.tenants.values())
    return ReplayInput(
        since=_EPOCH,
        until=_EPOCH + server.now,
        requests=[past(server, one) for one in server.asked],
        replicas=[speed],
        rules=server.rules,
        tenants=before,
        keys=[],
        levels=[],
        changed_tenants=[one for one in tenants(changed) if one.name == "limited"],
    )


@pytest.mark.parametrize(
    ("before", "after", "cut_off"),
    [(150_000.0, 450_000.0, False), (450_000.0, 150_000.0, False), (150_000.0, None, True)],
)
def test_a_forecast_agrees_with_the_same_load_under_the_new_limit(
    before: float, after: float | None, cut_off: bool
) -> None:
    forecast = replay(given(shared(before, cut_off=cut_off), after))
    real = shared(after, cut_off=cut_off)
    assert forecast.requests == len(real.asked)
    for one in forecast.tenants:
        mine = [asked for asked in real.asked if asked.tenant == one.tenant]
        rejected = sum(asked.refused is not None for asked in mine)
        predicted = one.predicted
        assert predicted.over_quota + predicted.refused == pytest.approx(rejected, abs=0.02 * len(mine))
        assert predicted.admitted == pytest.approx(len(mine) - rejected, abs=0.02 * len(mine))
        answered = [asked for asked in mine if asked.ended_at is not None and asked.refused is None]
        e2e = 1e3 * percentile((one.ended_at - one.arrived_at for one in answered), 0.99)  # type: ignore[operator]
        ttft = 1e3 * percentile((asked.ttft_s for asked in answered), 0.99)
        assert predicted.e2e_p99_ms == pytest.approx(e2e, rel=0.15)
        assert predicted.ttft_p99_ms == pytest.approx(ttft, rel=0.15)
    limited = next(one for one in forecast.tenants if one.tenant == "limited")
    assert limited.predicted.over_quota != limited.recorded.over_quota


def answered(e2e_ms: float) -> RequestResult:
    return RequestResult(200, e2e_ms / 10, e2e_ms)


def test_a_request_that_its_client_cancelled_does_not_count_as_slow() -> None:
    requests = [Comparison(answered(500.0), answered(400.0), answered(400.0))] * 50
    cancelled = [Comparison(RequestResult(499, None, None), answered(30_000.0), answered(30_000.0))] * 5
    forecast = tenant_forecast("a", requests + cancelled)
    assert forecast.recorded.e2e_p99_ms == forecast.predicted.e2e_p99_ms == 500.0


def test_the_latency_of_a_request_that_was_refused_is_that_of_the_replay() -> None:
    """The replay is 100 ms faster than the service."""
    known = [Comparison(answered(500.0), answered(400.0), answered(400.0))] * 50
    refused = [
        Comparison(RequestResult(429, None, None), RequestResult(429, None, None), answered(900.0))
    ] * 5
    forecast = tenant_forecast("a", known + refused)
    assert forecast.predicted.e2e_p99_ms == pytest.approx(1000.0)
    assert forecast.predicted.over_quota == 0


@pytest.mark.parametrize("mixed", [False, True])
def test_a_speed_that_is_not_measured_yet_is_the_predicted_one(mixed: bool) -> None:
    """After its first steps, the replica has run only steps of one kind."""
    account = CreditAccount("m-0", "m")
    account.predict(0.005, 2e-5)
    account.slots = 8
    for computed in (1000, 2000):
        kind = {"mixed_steps": 20, "mixed_step_ms": 12.0} if mixed else {"decode_steps": 20, "step_ms": 6.0}
        account.learn(
            Report(
                step=1,
                credit_seqs=8,
                credit_tokens=512,
                finished=[],
                computed_tokens=computed if mixed else 0,
                **kind,  # type: ignore[arg-type]
            )
        )
    speed = speed_of(account)
    assert speed is not None
    if mixed:
        assert speed.step_s == 0.005
        assert speed.prompt_token_s != 2e-5
    else:
        assert speed.step_s == pytest.approx(0.006)
        assert speed.prompt_token_s == 2e-5


@pytest.mark.parametrize("step_s", [0.0041, 0.0056, 0.013])
@pytest.mark.parametrize("at", [0.0, _EPOCH])
def test_a_simulated_replica_ends_every_request_whatever_the_resolution_of_the_clock(
    at: float, step_s: float
) -> None:
    speed = ReplicaSpeed(
        unit="m",
        replica="m-0",
        slots=64,
        credit_tokens=4096,
        kv_tokens=200_000,
        step_s=step_s,
        sequence_s=1e-4,
        prompt_token_s=1e-5,
    )
    replica, draw = SimulatedReplica(speed), random.Random(1)
    for number in range(100):
        at += draw.uniform(0.5, 2.0)
        prompt = draw.choice((12, 12, 3000))
        replica.submit(
            SimulatedSubmission(
                request_id=str(number),
                index=0,
                level=0,
                sequences=1,
                prompt_tokens=prompt,
                cached_tokens=0,
                output_each=17,
            ),
            at,
        )
        changes = 0
        while (change := replica.next_change()) < math.inf:
            at, changes = change, changes + 1
            assert changes < 100
            replica.advance(at)
            replica.change()


def test_the_separate_process_gives_the_same_forecast() -> None:
    asked = given(served(150_000.0, 20.0), 300_000.0)
    assert replay_apart(asked) == replay(asked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=ReplayInput) == asked


@pytest.mark.system
def test_the_service_forecasts_from_its_own_traffic_and_changes_nothing(
    make_service: Callable[..., Service],
) -> None:
    service = make_service().start_and_wait()
    service.admin.act(CreateTenant(name="t", tokens_per_minute=60000.0))
    for _ in range(6):
        read_answer(service.connect("m 100"))
    # A front reports the end of a request only after the client has received the answer.
    wait_until(
        lambda: service.admin.status().queue.ended == 6, description="the end of the requests in the core"
    )
    read_key = service.admin.act(CreateKey(name="k", scopes=("read",)))
    reader = AdminClient(service.run_dir, key=read_key.key)  # type: ignore[attr-defined]
    forecast = reader.call(calls.what_if(SetTenant(name="t", tokens_per_day=210.0)))
    [tenant] = [one for one in forecast.tenants if one.tenant == "t"]
    assert (tenant.recorded.admitted, tenant.recorded.over_quota) == (6, 0)
    # Each request takes 104 tokens, so two of them fit within the limit. The test is too short for the quota
    # to refill by even one token.
    assert tenant.predicted.admitted == 2 and tenant.predicted.over_quota == 4
    [unchanged] = [one for one in service.admin.tenants() if one.name == "t"]
    assert unchanged.quota.tokens_per_minute == 60000.0
    for asked, message in (
        (SetTenant(name="nobody", weight=2.0), "there is no tenant 'nobody'"),
        (SetTenant(name="t", weight=-1.0), "weight"),
    ):
        with pytest.raises(AdminError, match=message):
            reader.call(calls.what_if(asked))


def test_requests_are_forgotten_after_a_time_and_beyond_a_number() -> None:
    server = served(None, 2.0)
    state = server.requests.state
    kept = state.recent.requests([])
    assert len(kept) == len(server.asked) and all(one.output_tokens for one in kept)
    assert [one.max_tokens for one in kept] == [600] * len(kept)
    server.run(server.now + KEPT_S)
    server.ask("other", Shape(10, 2, 2))
    server.run(server.now + 10.0)
    assert len(state.recent.requests([])) == 1
    assert state.recent._ended.maxlen == MAX_RECENT
