"""Tests of the dispatch order (classes, ageing, weights, deadlines) and of the sums used to predict waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.traffic.fairness import FairQueue, Ticket
from appliance.traffic.load_shedder import DROP_BACKGROUND, REFUSE_BACKGROUND, REFUSE_INTERACTIVE, LoadShedder
from appliance.traffic.outputs import OutputLengths, expected_tokens, most_tokens
from appliance.traffic.queue import RequestQueue
from appliance.traffic.rates import ReplicaRates
from appliance.traffic.timeline import Promises, Timeline
from engine.levels import level_of
from engine.rank_messages import Report
from tests.core.tickets import ALL_LEVELS, RULES, Serial

NEVER = float("inf")


def take_next(queue: RequestQueue[str], now: float, promises_from: float = 0.0) -> Ticket[str]:
    found = queue.next(ALL_LEVELS, now, promises_from)
    assert found is not None
    ticket = found.ticket
    queue.take(ticket, now)
    queue.classes[ticket.request_class].charge(ticket.tenant, ticket.service - ticket.prompt_tokens)
    return ticket


# ── classes and ageing ──


def test_higher_classes_go_first() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    for number in (3, 2, 0, 1):
        queue.push(serial.ticket(request_class=number), 1.0, light=False)
    assert [take_next(queue, 0.0).request_class for _ in range(4)] == [0, 1, 2, 3]


@given(
    victim=st.integers(1, 3),
    sizes=st.lists(st.tuples(st.integers(100, 4000), st.integers(50, 1000)), min_size=1, max_size=20),
    prompt=st.integers(1, 4000),
    output=st.integers(1, 1000),
    ahead=st.integers(0, 3),
)
def test_under_endless_load_of_higher_classes_every_request_has_its_turn_in_a_bounded_time_property(
    victim: int, sizes: list[tuple[int, int]], prompt: int, output: int, ahead: int
) -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    waiting = [serial.ticket("poor", victim, prompt=prompt, output=float(output)) for _ in range(ahead + 1)]
    for ticket in waiting:
        queue.push(ticket, 1.0, light=False)
    share = RULES.background_share if victim == 3 else RULES.lifted_share
    largest = max(p + RULES.output_weight * o for p, o in sizes)
    # Once the oldest request has waited too long, its class gets a fixed share of the service. In each of the
    # class's turns, one of its requests is served.
    bound = sum(ticket.service for ticket in waiting) / share + 2 * largest
    now = 0.0 if victim == 3 else RULES.late_s(victim) + 0.001
    given_to_others, turn = 0.0, 0
    queue.push(serial.ticket("rich", 0, now=now), 1.0, light=False)
    while waiting[-1].waiting:
        number, (p, o) = turn % victim, sizes[turn % len(sizes)]
        queue.push(serial.ticket("rich", number, now=now, prompt=p, output=float(o)), 1.0, light=False)
        ticket = take_next(queue, now)
        given_to_others += ticket.service if ticket.tenant == "rich" else 0.0
        turn += 1
        assert given_to_others <= bound, f"other classes got {given_to_others}, more than the bound {bound}"


def test_a_class_that_is_not_late_gets_nothing_while_a_higher_one_waits() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    queue.push(serial.ticket("b", 2), 1.0, light=False)
    for _ in range(200):
        queue.push(serial.ticket("a", 1), 1.0, light=False)
    now = RULES.late_s(2) - 1.0
    assert {take_next(queue, now).tenant for _ in range(150)} == {"a"}
    now = RULES.late_s(2) + 1.0
    assert "b" in {take_next(queue, now).tenant for _ in range(20)}


def test_a_request_that_goes_before_higher_classes_runs_as_one_of_them() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    background = serial.ticket("b", 3, prompt=10, output=1.0)
    queue.push(background, 1.0, light=False)
    assert queue.next(ALL_LEVELS, 0.0, 0.0) == (background, level_of(3, 0)), (
        "nothing of higher priority is waiting"
    )
    for number in (1, 2):
        queue.push(serial.ticket("a", number, prompt=10_000), 1.0, light=False)
    queue.push(serial.ticket("a", 1, prompt=10_000), 1.0, light=False)
    assert take_next(queue, 0.0).request_class == 1
    assert queue.next(ALL_LEVELS, 0.0, 0.0) == (background, level_of(1, 0))


# ── within a class ──


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    seed=st.integers(0, 1 << 16),
)
def test_backlogged_tenants_differ_by_at_most_their_largest_requests_property(
    weights: list[float], seed: int
) -> None:
    draw, serial, fair = random.Random(seed), Serial(), FairQueue[str]()
    service = [0.0] * len(weights)
    largest = 3000.0

    def push(number: int) -> None:
        prompt, output = draw.randint(1, 1000), float(draw.randint(1, 1000))
        fair.push(serial.ticket(str(number), prompt=prompt, output=output), weights[number], light=False)

    for number in range(len(weights)):
        push(number)
    for _ in range(300):
        ticket = fair.next()
        assert ticket is not None
        number = int(ticket.tenant)
        push(number)
        fair.take(ticket)
        fair.charge(ticket.tenant, ticket.service - ticket.prompt_tokens)
        service[number] += ticket.service
        normal = [one / weight for one, weight in zip(service, weights, strict=True)]
        assert max(normal) - min(normal) <= 2 * largest / min(weights)


def test_idleness_is_not_saved_up() -> None:
    serial, fair = Serial(), FairQueue[str]()
    for _ in range(20):
        fair.push(serial.ticket("busy"), 1.0, light=False)
    for _ in range(10):
        ticket = fair.next()
        assert ticket is not None
        fair.take(ticket)
    for _ in range(10):
        fair.push(serial.ticket("late"), 1.0, light=False)
    turns = []
    for _ in range(10):
        ticket = fair.next()
        assert ticket is not None
        fair.take(ticket)
        turns.append(ticket.tenant)
    assert turns.count("late") in (5, 6)


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    for due in (30.0, 10.0, 20.0):
        queue.push(serial.ticket(due=due), 1.0, light=False)
    assert [take_next(queue, 0.0).due for _ in range(3)] == [10.0, 20.0, 30.0]


def test_a_request_goes_before_other_tenants_only_when_it_must_begin_to_meet_its_deadline() -> None:
    queue, serial = RequestQueue[str](RULES), Serial()
    promised = serial.ticket("b", begin_by=10.0, due=12.0)
    queue.push(promised, 1.0, light=False, promised_s=2.0)
    queue.classes[1].charge("b", 1e6)
    other = serial.ticket("a")
    queue.push(other, 1.0, light=False)
    assert queue.next(ALL_LEVELS, 0.0, promises_from=9.0) == (other, level_of(1, 0))
    assert queue.next(ALL_LEVELS, 0.0, promises_from=10.0) == (promised, level_of(1, 0))


# ── sums over earlier requests ──

_OPERATIONS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 50), st.integers(1, 100), st.integers(1, 100)), max_size=300
)


@given(operations=_OPERATIONS, at=st.integers(-1, 51))
def test_a_timeline_sums_the_work_that_comes_before_a_request_property(
    operations: list[tuple[bool, int, int, int]], at: int
) -> None:
    timeline, plain = Timeline[int](), []
    for serial, (add, time, prompt, output) in enumerate(operations):
        if add or not plain:
            timeline.add(time, serial, prompt, output, serial)
            plain.append((time, serial, prompt, output))
        else:
            removed = plain.pop(prompt % len(plain))
            timeline.remove(removed[0], removed[1])
    plain.sort()
    assert list(timeline) == [serial for _, serial, _, _ in plain]
    assert timeline.first() == (plain[0][1] if plain else None)
    before = [one for one in plain if one[0] <= at]
    assert timeline.before(at) == (sum(one[2] for one in before), sum(one[3] for one in before))


@given(operations=_OPERATIONS, time=st.integers(0, 50), work=st.integers(1, 50))
def test_promises_know_the_latest_time_at_which_serving_must_begin_property(
    operations: list[tuple[bool, int, int, int]], time: int, work: int
) -> None:
    def latest(plain: list[tuple[float, float, float]]) -> float:
        at, slack = 0.0, NEVER
        for begin_by, _, work_s in sorted(plain):
            slack, at = min(slack, begin_by - at), at + work_s
        return slack

    promises, plain = Promises[int](), []
    for serial, (add, begin_by, work_s, pick) in enumerate(operations):
        if add or not plain:
            promises.add(begin_by, serial, work_s, serial)
            plain.append((begin_by, serial, work_s))
        else:
            removed = plain.pop(pick % len(plain))
            promises.remove(removed[0], removed[1])
    assert promises.latest_begin() == latest(plain)
    ahead = [one for one in plain if one[0] <= time]
    # Earlier promises were checked when they were added. The new promise does not affect them.
    unaffected = latest(ahead)
    assert min(unaffected, promises.latest_begin_with(time, work)) == latest([*plain, (time, 1 << 40, work)])


# ── learned values ──


def test_answers_that_reach_their_limit_are_expected_to_reach_it_again() -> None:
    lengths, nobody = OutputLengths(), OutputLengths()
    assert expected_tokens(lengths, nobody, 100.0) == 100.0
    for tokens in (20, 200, 60, 120, 90, 30, 40, 50):
        lengths.learn(tokens, tokens)
    assert expected_tokens(lengths, nobody, 77.0) == 77.0
    assert most_tokens(lengths, nobody, 777.0) == 777.0


def test_the_mean_answer_length_is_not_used_while_most_answers_still_run() -> None:
    lengths, nobody = OutputLengths(), OutputLengths()
    lengths.running = 10
    for _ in range(27):
        lengths.learn(10, 1000.0)
    assert most_tokens(lengths, nobody, 1000.0) == 1000.0
    lengths.learn(10, 1000.0)
    assert expected_tokens(lengths, nobody, 1000.0) == pytest.approx(10.0)
    assert 10.0 < most_tokens(lengths, nobody, 1000.0) < 25.0


def test_few_answers_are_longer_than_the_likely_maximum_length() -> None:
    draw, lengths = random.Random(1), OutputLengths()
    for _ in range(3000):
        lengths.learn(int(draw.expovariate(1 / 100.0)), 1e6)
    longer = sum(draw.expovariate(1 / 100.0) > lengths.likely_most(1e6) for _ in range(3000))
    assert longer <= 45
    assert lengths.likely_most(1e6) < 900.0


def test_the_time_of_a_prompt_is_measured_even_if_its_tokens_are_in_an_earlier_report() -> None:
    rates = ReplicaRates()
    computed = 0
    for _ in range(200):
        computed += 500
        rates.learn(Report(step=1, credit_seqs=1, credit_tokens=1, finished=[], computed_tokens=computed))
        rates.learn(
            Report(
                step=1,
                credit_seqs=1,
                credit_tokens=1,
                finished=[],
                running=4,
                computed_tokens=computed,
                decode_steps=10,
                step_ms=5.0,
                mixed_steps=1,
                mixed_step_ms=17.5,
            )
        )
    assert rates.prompt_token_s == pytest.approx(12.5e-3 / 500, rel=0.01)
    assert rates.step_s == pytest.approx((10 * 5e-3 + 17.5e-3) / 11, rel=0.01)


# ── overload ──


def test_an_overload_sheds_background_load_first_and_all_load_is_accepted_again_afterwards() -> None:
    shedder, waits = LoadShedder(), [0.0, 20.0, 0.0, 0.0]
    steps = []
    for now in range(40):
        shedder.observe(RULES, float(now), waits)
        steps.append(shedder.step)
    assert sorted(set(steps)) == [0, 1, 2, 3, 4]
    assert steps == sorted(steps), "load shedding skips no step"
    assert steps.index(REFUSE_BACKGROUND) == 5, "refuses only after a lasting overload"
    assert shedder.refuses(3, None, RULES)
    assert shedder.refuses(1, 20.0, RULES)
    assert not shedder.refuses(1, 5.0, RULES), "a request with a short wait is not refused"
    assert not shedder.refuses(0, 1e9, RULES), "real-time requests are never refused"
    assert "P1 requests would wait 20.0 s" in shedder.reason
    for now in range(40, 80):
        shedder.observe(RULES, float(now), [0.0, 1.0, 0.0, 0.0])
    assert shedder.step == 0
    assert shedder.reason == ""


def test_an_overload_of_batch_leaves_interactive_requests_alone() -> None:
    shedder = LoadShedder()
    for now in range(60):
        shedder.observe(RULES, float(now), [0.0, 0.0, 1000.0, 0.0])
    assert DROP_BACKGROUND < shedder.step < REFUSE_INTERACTIVE
    assert shedder.refuses(2, 1000.0, RULES)
    assert not shedder.refuses(1, 1000.0, RULES)
