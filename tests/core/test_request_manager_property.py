"""Property tests of the request manager, with messages in any order and deaths of fronts and replicas at any
time. Every request results in exactly one row, every credit is returned, and no quota is exceeded or
leaks."""

from __future__ import annotations

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.traffic.forecast import Forecast
from appliance.traffic.remaining import Remaining
from store.policies import Policies, Quota, TenantRecord
from tests.core.simulated_service import FakeFront, FakeReplica, SimulatedService
from tests.examples import examples

BUCKET = 400
"""Capacity of the tenant's quota in tokens. One token is refilled each second."""
CONCURRENT = 3
"""Maximum number of the tenant's requests that run at the same time."""

pick = st.integers(0, 1_000)


class Steady(Forecast):
    """A forecast with round rates, so that floating-point sums do not depend on the order of addition."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.step_s = True, 0.25

    def serving_s(self, prompt_tokens: float, output_tokens: float) -> float:
        return prompt_tokens + 64.0 * output_tokens


def looked_up(service: SimulatedService, forecast: Forecast) -> Remaining:
    """Compute `TrafficState.remaining` independently, by adding up the remaining work of every request."""
    unfinished = list(service.requests.state.unfinished())
    queued = [request for request in unfinished if request.queued_at is not None]
    lengths = {request: request.expected_tokens / request.admit.num_seqs for request in unfinished}
    tokens, running_s = 0.0, 0.0
    for request in unfinished:
        if request.queued_at is None:
            made = request.generated_each
            if not made and forecast.step_s:
                made = (service.now - (request.began_at or service.now)) / forecast.step_s
            left = lengths[request] - made if made < lengths[request] else made
            left = max(1.0, min(left, request.most_each - made))
            tokens += left * request.admit.num_seqs
            running_s = max(running_s, left * forecast.step_s)
    outputs = sum(request.expected_tokens for request in queued)
    seconds: float | None = running_s
    if queued and forecast.known:
        prompts = sum(request.admit.prompt_tokens for request in queued)
        longest = max(lengths[request] for request in queued)
        seconds = running_s + forecast.serving_s(prompts, outputs) + longest * forecast.step_s
    known = forecast.known or not unfinished
    return Remaining(
        len(unfinished) - len(queued), len(queued), round(tokens + outputs), seconds if known else None
    )


class RequestManagerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.service = SimulatedService()
        quota = Quota(tokens_per_minute=60.0, burst_s=BUCKET, concurrent_requests=CONCURRENT)
        self.service.requests.set_policies(Policies([TenantRecord(name="t", created_at=0.0, quota=quota)]))
        self.service.new_front()
        self.service.new_front()
        self.service.new_replica()

    def front(self, number: int) -> FakeFront:
        fronts = list(self.service.fronts.values())
        return fronts[number % len(fronts)]

    def live_front(self, number: int) -> FakeFront | None:
        fronts = self.service.live_fronts()
        return fronts[number % len(fronts)] if fronts else None

    def replica(self, number: int) -> FakeReplica:
        return self.service.replicas[number % len(self.service.replicas)]

    @rule(number=pick, submissions=st.integers(1, 3), samples=st.integers(1, 2), tokens=st.integers(1, 30))
    def a_request_arrives(self, number: int, submissions: int, samples: int, tokens: int) -> None:
        if front := self.live_front(number):
            self.service.ask(front, submissions, samples, tokens)

    @rule(hold=st.booleans())
    def a_drain_begins(self, hold: bool) -> None:
        self.service.requests.pause_admission(None, "draining", hold=hold)

    @rule()
    def a_drain_is_over(self) -> None:
        self.service.requests.resume_admission(None)

    @invariant()
    def no_more_run_than_may(self) -> None:
        if hasattr(self, "service"):
            assert len(self.service.on_replicas()) <= CONCURRENT

    @invariant()
    def counts_match_a_scan_of_all_requests(self) -> None:
        if hasattr(self, "service"):
            outstanding = self.service.requests.state.models["m"].outstanding
            for forecast in (Forecast(), Steady()):
                assert outstanding.remaining(forecast, self.service.now) == looked_up(self.service, forecast)

    @rule(number=pick)
    def the_core_reads_a_front(self, number: int) -> None:
        self.service.core_reads_front(self.front(number))

    @rule(number=pick)
    def a_front_reads_the_core(self, number: int) -> None:
        front = self.live_front(number)
        if front and front.from_core:
            self.service.hear(front)

    @rule(number=pick, request=pick)
    def a_client_leaves(self, number: int, request: int) -> None:
        front = self.live_front(number)
        if front and front.asks:
            self.service.settle(front, list(front.asks)[request % len(front.asks)], 499)

    @rule(number=pick, request=pick)
    def an_answer_ends(self, number: int, request: int) -> None:
        front = self.live_front(number)
        running = [name for name, ask in front.asks.items() if ask.replica is not None] if front else []
        if front and running:
            self.service.settle(front, running[request % len(running)], 200)

    @rule(number=pick)
    def a_front_notices_a_dead_replica(self, number: int) -> None:
        if front := self.live_front(number):
            for name, ask in list(front.asks.items()):
                if ask.replica is not None and not ask.replica.alive:
                    self.service.ask_again(front, name)

    @rule(number=pick, front=pick)
    def a_replica_reads_a_front(self, number: int, front: int) -> None:
        replica = self.replica(number)
        waiting = [name for name, inbox in replica.inbox.items() if inbox]
        if replica.alive and waiting:
            replica.take(waiting[front % len(waiting)])

    @rule(number=pick, which=pick)
    def a_replica_finishes_something(self, number: int, which: int) -> None:
        replica = self.replica(number)
        if replica.alive and replica.running:
            replica.finish(replica.running[which % len(replica.running)])

    @rule(number=pick)
    def a_replica_reports(self, number: int) -> None:
        replica = self.replica(number)
        if replica.alive:
            replica.report()

    @rule(number=pick)
    def the_core_reads_a_replica(self, number: int) -> None:
        self.service.core_reads_replica(self.replica(number))

    @rule(number=pick, unwritten=st.integers(0, 2))
    def a_front_dies(self, number: int, unwritten: int) -> None:
        if front := self.live_front(number):
            self.service.kill_front(front, unwritten)

    @precondition(lambda self: len(self.service.fronts) < 5)
    @rule()
    def a_front_starts(self) -> None:
        self.service.new_front()

    @rule(number=pick)
    def a_replica_dies(self, number: int) -> None:
        self.service.kill_replica(self.replica(number))

    @precondition(lambda self: len(self.service.replicas) < 5)
    @rule()
    def a_replica_starts(self) -> None:
        self.service.new_replica()

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.service.now += seconds
        self.service.requests.expire()

    @rule(request=pick)
    def an_operator_cancels(self, request: int) -> None:
        if self.service.asked:
            self.service.requests.abort(self.service.asked[request % len(self.service.asked)], "cancelled")

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.service.requests.resume_admission(None)
            self.service.settle_everything()
            self.service.check_end()
            self.check_quota()

    def check_quota(self) -> None:
        """Check that the quota's usage equals the sum over the log's rows minus the refill."""
        service = self.service
        (usage,) = service.requests.state.quotas.usage("tenant", "t")
        assert [one.used for one in service.requests.state.usage("tenant", "t")] == [usage.used, 0]
        charged = sum(row.quota_tokens for row in service.rows.ended)
        assert charged <= BUCKET + service.now - 1000.0, "overstepped"
        if service.now == 1000.0:
            assert usage.used == charged, "leaked"
        for row in service.rows.ended:
            if row.quota_tokens and row.error != "the front process died":
                assert row.quota_tokens == row.prompt_tokens + row.billed_tokens


RequestManagerMachine.TestCase.settings = examples(
    300,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_every_request_ends_once_and_every_credit_comes_back = RequestManagerMachine.TestCase
