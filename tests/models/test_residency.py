"""Tests of how the service decides which models to keep in memory, with simulated models and a simulated
clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.models.residency import (
    DRAIN_S,
    MIN_SERVICE_S,
    Bundle,
    Evict,
    LoadUnits,
    Refuse,
    Step,
    Wait,
    expired,
    first_waiting,
    next_step,
)

TICK_S = 0.05
UNLOAD_S = 0.3
RESIDENCE_S = 10.0


@dataclass
class Model:
    """A simulated model. Each request is represented by its run time in seconds."""

    name: str
    bytes: int = 1
    slots: int = 1000
    """Number of requests that run at the same time."""
    kept: str = ""
    group: str = ""
    state: str = "out"
    changes_at: float = 0.0
    load_began_at: float = -1e9
    ready_at: float = -1e9
    used_at: float = -1e9
    left_at: float = -1e9
    waiting: deque[tuple[float, float]] = field(default_factory=deque)
    """For each waiting request: the time at which it began to wait, and its run time."""
    running: list[float] = field(default_factory=list)
    """The times at which the running requests end."""

    @property
    def waiting_since(self) -> float | None:
        return max(self.waiting[0][0], self.left_at) if self.waiting else None

    def bundle(self) -> Bundle:
        return Bundle(
            (self.name,),
            loaded=self.state == "in",
            in_memory=self.state != "out",
            busy=bool(self.waiting or self.running),
            waiting_since=self.waiting_since,
            load_began_at=self.load_began_at,
            ready_at=self.ready_at,
            used_at=self.used_at,
            memory_bytes=self.bytes,
            kept=self.kept,
        )


class Machine:
    """A simulated machine. It runs requests on models that share `capacity` bytes of memory, in the same way
    as `OnDemand`."""

    def __init__(self, *models: Model, capacity: int = 1, load_s: float = 2.0) -> None:
        self.models = {model.name: model for model in models}
        self.capacity, self.load_s = capacity, load_s
        self.now = 0.0
        self.absences: list[float] = []
        """For each load: how long requests had been waiting for the model."""
        self.waits: list[float] = []
        """Waiting times of all requests that have begun to run."""
        self.loads: list[tuple[float, str]] = []
        self.refused: list[str] = []
        self.most_bytes = 0

    def run(self, arrivals: list[tuple[float, str, float]], for_s: float = 0.0) -> None:
        """Run until all requests have ended, and for at least `for_s` seconds. An arrival consists of a time,
        the name of a model and the request's run time."""
        left, begin = deque(sorted(arrivals)), self.now
        while left or self.now < begin + for_s or any(one.waiting or one.running for one in self.all()):
            while left and left[0][0] <= self.now:
                at, name, run_s = left.popleft()
                self.models[name].waiting.append((at, run_s))
            self._advance()
            self._decide()
            self.now += TICK_S
            assert self.now < begin + 3600, "the requests do not end"

    def all(self) -> list[Model]:
        return list(self.models.values())

    def _advance(self) -> None:
        for model in self.all():
            model.running = [end for end in model.running if end > self.now]
            if model.state == "loading" and self.now >= model.changes_at:
                if model.waiting_since is not None:
                    self.absences.append(self.now - model.waiting_since)
                model.state, model.ready_at = "in", self.now
            elif model.state == "draining" and (not model.running or self.now >= model.changes_at):
                # Requests that did not finish in time return to the queue.
                model.waiting.extend((self.now, end - self.now) for end in model.running)
                model.running, model.state, model.changes_at = [], "unloading", self.now + UNLOAD_S
            elif model.state == "unloading" and self.now >= model.changes_at:
                model.state = "out"
            if model.state == "in":
                while model.waiting and len(model.running) < model.slots:
                    since, run_s = model.waiting.popleft()
                    self.waits.append(self.now - since)
                    model.running.append(self.now + run_s)
            if model.running or model.waiting:
                model.used_at = self.now
        used = sum(one.bytes for one in self.all() if one.state != "out")
        self.most_bytes = max(self.most_bytes, used)

    def _decide(self) -> None:
        if any(model.state in ("loading", "draining", "unloading") for model in self.all()):
            return
        bundles = [model.bundle() for model in self.all()]
        wanted = first_waiting(bundles)
        if wanted is None:
            return
        model = self.models[wanted.units[0]]
        used = sum(one.bytes for one in self.all() if one.state != "out")
        step = next_step(
            self.now,
            wanted,
            bundles,
            missing_bytes=used + model.bytes - self.capacity,
            min_residence_s=RESIDENCE_S,
            excludes=lambda other: bool(model.group) and self.models[other.units[0]].group == model.group,
        )
        if isinstance(step, LoadUnits):
            model.state, model.changes_at = "loading", self.now + self.load_s
            model.load_began_at = self.now
            self.loads.append((self.now, model.name))
        elif isinstance(step, Evict):
            for victim in map(self.models.__getitem__, step.units):
                victim.state, victim.changes_at = "draining", self.now + DRAIN_S
                victim.left_at = self.now
        elif isinstance(step, Refuse):
            self.refused.append(f"{model.name}: {step.reason}")
            model.waiting.clear()

    def most_loads_in(self, window_s: float) -> int:
        times = [at for at, _ in self.loads]
        return max(sum(at <= other < at + window_s for other in times) for at in times)


def longest_wait_s(load_s: float, models: int = 2) -> float:
    """Return the longest wait that docs/models.md allows, plus the time that this simulation's ticks add."""
    swap_s = DRAIN_S + UNLOAD_S + load_s
    first_s = max(RESIDENCE_S, load_s + MIN_SERVICE_S) + swap_s
    return first_s + (models - 2) * (MIN_SERVICE_S + swap_s) + DRAIN_S + UNLOAD_S + 10 * models * TICK_S


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 120), st.sampled_from("ab"), st.sampled_from([0.05, 0.5, 3.0, 30.0])),
    min_size=1,
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(ARRIVALS, st.sampled_from([0.2, 3.0, 15.0]))
def test_no_arrival_pattern_makes_a_request_wait_longer_than_the_bound(
    arrivals: list[tuple[float, str, float]], load_s: float
) -> None:
    machine = Machine(Model("a"), Model("b"), load_s=load_s)
    machine.run(arrivals)
    assert max(machine.waits) <= longest_wait_s(load_s)
    assert machine.most_loads_in(60.0) <= 60.0 / RESIDENCE_S + 1
    assert machine.most_bytes == 1 and not machine.refused


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 120), st.sampled_from("abcd"), st.sampled_from([0.05, 0.5, 3.0, 30.0])),
        min_size=1,
        max_size=60,
    ),
    st.integers(2, 5),
)
def test_models_of_different_sizes_stay_within_the_memory_and_none_starves(
    arrivals: list[tuple[float, str, float]], capacity: int
) -> None:
    machine = Machine(Model("a"), Model("b"), Model("c", 2), Model("d", 2), capacity=capacity)
    machine.run(arrivals)
    assert machine.most_bytes <= capacity and not machine.refused
    # Preempted requests wait for several turns, and each turn is bounded.
    assert max(machine.waits) <= longest_wait_s(2.0, models=4)


@settings(max_examples=20, deadline=None)
@given(ARRIVALS, st.sampled_from([0.2, 3.0, 15.0]))
def test_a_model_with_a_long_queue_keeps_no_other_out_of_the_memory(
    arrivals: list[tuple[float, str, float]], load_s: float
) -> None:
    machine = Machine(Model("a", slots=2), Model("b", slots=1), load_s=load_s)
    machine.run([(0.0, "a", 3.0)] * 40 + [(1.0, "b", 3.0)] + arrivals)
    assert max(machine.absences) <= longest_wait_s(load_s)


def test_two_busy_models_change_places_at_the_minimum_residence() -> None:
    machine = Machine(Model("a"), Model("b"))
    machine.run([(0.1 * number, "ab"[number % 2], 0.3) for number in range(1200)])
    gaps = [second[0] - first[0] for first, second in zip(machine.loads, machine.loads[1:], strict=False)]
    assert len(machine.loads) > 6 and min(gaps) >= RESIDENCE_S
    assert {name for _, name in machine.loads} == {"a", "b"}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 120), st.sampled_from("abc"), st.sampled_from([0.05, 0.5, 3.0, 30.0])),
        min_size=1,
        max_size=80,
    ),
    st.sampled_from([0.2, 3.0, 15.0]),
)
def test_with_three_models_a_request_waits_for_one_residence_and_two_swaps(
    arrivals: list[tuple[float, str, float]], load_s: float
) -> None:
    machine = Machine(*map(Model, "abc"), load_s=load_s)
    machine.run(arrivals)
    assert max(machine.waits) <= longest_wait_s(load_s, models=3)


@pytest.mark.parametrize("every_s", [0.0, 0.3, 1.0])
def test_the_pattern_a_b_a_a_c_waits_at_most_a_residence_one_swap_and_10_s(every_s: float) -> None:
    # A load takes 3.6 s. The third model waits for two swaps, and the second of them fits into the 10 s.
    machine = Machine(*map(Model, "abc"), load_s=3.6)
    machine.run([(every_s * number, name, 0.5) for number, name in enumerate("abaac" * 40)])
    assert max(machine.waits) <= RESIDENCE_S + 3.6 + 10.0
    assert machine.most_loads_in(60.0) <= 60.0 / (RESIDENCE_S / 2) + 1


def test_the_pattern_a_b_a_a_c_needs_one_load_for_each_model() -> None:
    machine = Machine(Model("a"), Model("b"), Model("c"))
    machine.run([(0.1 * number, name, 0.2) for number, name in enumerate("abaac")])
    assert [name for _, name in machine.loads] == ["a", "b", "c"]


def test_an_idle_model_leaves_before_a_busy_one_and_the_least_recently_used_first() -> None:
    old = Bundle(("old",), loaded=True, in_memory=True, used_at=1.0, memory_bytes=1)
    new = Bundle(("new",), loaded=True, in_memory=True, used_at=90.0, memory_bytes=1)
    busy = Bundle(("busy",), loaded=True, in_memory=True, busy=True, used_at=0.0, memory_bytes=1)
    wanted = Bundle(("wanted",), waiting_since=99.0)

    def step(missing: int) -> Step:
        return next_step(
            100.0,
            wanted,
            [busy, new, old, wanted],
            missing_bytes=missing,
            min_residence_s=RESIDENCE_S,
            excludes=lambda _: False,
        )

    assert step(0) == LoadUnits(("wanted",))
    assert step(1) == Evict(("old",))
    assert step(2) == Evict(("old", "new"))
    assert step(3) == Wait(99.0 + RESIDENCE_S)
    assert isinstance(step(4), Refuse)


def test_a_sleeping_model_is_unloaded_after_idle_models_and_before_busy_ones() -> None:
    idle = Bundle(("idle",), loaded=True, in_memory=True, used_at=90.0, memory_bytes=1)
    asleep = Bundle(("asleep",), in_memory=True, asleep=True, load_began_at=99.0, memory_bytes=1)
    busy = Bundle(("busy",), loaded=True, in_memory=True, busy=True, memory_bytes=1)
    wanted = Bundle(("wanted",), waiting_since=99.0)

    def step(missing: int, excluded: str = "") -> Step:
        return next_step(
            100.0,
            wanted,
            [busy, asleep, idle, wanted],
            missing_bytes=missing,
            min_residence_s=RESIDENCE_S,
            excludes=lambda one: excluded in one.units,
        )

    assert step(0, excluded="asleep") == LoadUnits(("wanted",))
    assert step(1) == Evict(("idle",))
    assert step(2) == Evict(("idle", "asleep"))
    assert step(3) == Wait(99.0 + RESIDENCE_S)


def test_no_model_leaves_whose_memory_would_not_help() -> None:
    small = Bundle(("small",), loaded=True, in_memory=True, used_at=1.0, memory_bytes=1)
    large = Bundle(("large",), loaded=True, in_memory=True, used_at=2.0, memory_bytes=10)
    wanted = Bundle(("wanted",), waiting_since=99.0)
    step = next_step(
        100.0,
        wanted,
        [small, large],
        missing_bytes=10,
        min_residence_s=RESIDENCE_S,
        excludes=lambda _: False,
    )
    assert step == Evict(("large",))


@pytest.mark.parametrize(("group", "capacity"), [("", 1), ("g", 2)])
def test_a_model_that_always_stays_loaded_is_named_in_the_refusal(group: str, capacity: int) -> None:
    machine = Machine(
        Model("a", kept="'a' is pinned", group=group), Model("b", group=group), capacity=capacity
    )
    machine.run([(0.0, "a", 0.1), (60.0, "b", 0.1)])
    [refused] = machine.refused
    assert refused.startswith("b: ") and "'a' is pinned" in refused
    assert [name for _, name in machine.loads] == ["a"]


def test_models_of_a_group_take_turns_although_both_fit() -> None:
    machine = Machine(Model("a", group="g"), Model("b", group="g"), Model("c"), capacity=3)
    machine.run([(0.0, "a", 0.1), (0.0, "c", 0.1), (30.0, "b", 0.1), (60.0, "c", 0.1)])
    assert [name for _, name in machine.loads] == ["a", "c", "b"]
    assert machine.most_bytes == 2


def test_a_model_expires_only_when_it_has_been_idle_for_its_time_to_live() -> None:
    idle = Bundle(("a",), loaded=True, in_memory=True, ready_at=5.0, used_at=10.0)
    assert not expired(19.9, idle, 20.0) and expired(20.0, idle, 20.0)
    assert not expired(1e9, idle, math.inf)
    assert not expired(1e9, idle._replace(kept="'a' is pinned"), 20.0)
    assert not expired(1e9, idle._replace(busy=True), 20.0)
    assert not expired(1e9, idle._replace(loaded=False), 20.0)
