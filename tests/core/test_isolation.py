"""Tests, in virtual time, how long short P0 requests, requests from light tenants, and other P1 requests wait
while the server also has large requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.traffic.rules import QueueRules
from store.policies import TenantRecord
from tests.core.isolation import BUDGET, CASES, full_step_s, measurements
from tests.core.isolation_mixes import MAX_TOKENS, Load, broken_promises, random_mix
from tests.core.simulated_clients import backlogged, fixed
from tests.core.simulated_server import Shape, SimulatedServer


def test_no_single_request_delays_a_short_one_by_more_than_two_full_steps() -> None:
    made = measurements()
    assert made.keys() == {"alone", *CASES}
    bounds = {
        name: made["alone"] + 2e3 * full_step_s(case.slots, case.max_num_batched_tokens) + 5.0
        for name, case in CASES.items()
    }
    late = {name: made[name] for name, bound in bounds.items() if made[name] > bound}
    assert not late, bounds


@pytest.mark.parametrize("seed", range(30))
def test_no_mix_of_requests_delays_a_short_one_by_more_than_two_full_steps_property(seed: int) -> None:
    mix = random_mix(seed)
    assert not broken_promises(mix), mix


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ((), "none of 0 loads was dispatched"),
        ((Load(0.1, "heavy", "P3", Shape(MAX_TOKENS, 1, 1)),), "the engine rejected the load"),
    ],
)
def test_a_mix_without_served_loads_fails_the_check(loads: tuple[Load, ...], message: str) -> None:
    (reason,) = broken_promises(replace(random_mix(0), loads=loads))
    assert message in reason


def test_the_random_mixes_contain_probes_of_every_kind_and_size() -> None:
    probes = [random_mix(seed).probes for seed in range(300)]
    for kind in ("P0", "only P0", "light", "busy"):
        ours = [one for one in probes if one.kind == kind]
        assert any(one.samples > 2 for one in ours) and any(one.prompts > 2 for one in ours)
        assert any(one.prompts > 1 and one.samples > 1 for one in ours)
        assert any(one.prompt_tokens > 4 * BUDGET for one in ours)


def test_a_wide_request_does_not_make_the_predicted_wait_of_long_prompts_far_too_long() -> None:
    """Reproduces a bug: the prediction assumed that a 45 s request in a higher-priority class would recur
    continuously. It refused prompts because they "would wait 719 s", although they would have waited for at
    most 80 s."""
    server = SimulatedServer(
        tenants=[TenantRecord(name=name, created_at=0.0) for name in ("long", "wide")],
        rules=QueueRules(timeout_s=200.0, overload=1000.0),
    )
    server.add_replica(slots=128)
    for _ in range(8):
        server.ask("long", Shape(100_000, 1, 1), asked_class="P3")
    server.run(60.0)
    server.ask("wide", Shape(512, 256, 256), asked_class="P1", samples=128)
    server.run(61.0)
    prompts = [server.ask("long", Shape(100_000, 1, 1), asked_class="P3") for _ in range(8)]
    server.run(261.0)
    assert [prompt.refused for prompt in prompts] == [None] * 8
    assert max(prompt.ttft_s for prompt in prompts) < 120.0


@pytest.mark.parametrize(("samples", "prompt"), [(64, 100_000), (128, 66_000)])
def test_resumed_requests_that_wait_do_not_close_the_queue_to_real_time_requests(
    samples: int, prompt: int
) -> None:
    server = _server("a", "b", "c")
    for _ in range(2):
        server.add_replica()
    server.run(1.0)
    wide = server.ask("a", Shape(prompt, 1000, 1000), asked_class="P3", samples=samples)
    for _ in range(2):
        server.ask("b", Shape(120_000, 100, 100), asked_class="P3")
    server.run(1.5)
    assert wide.replica is not None
    server.kill_replica(wide.replica)
    probes = []
    for _ in range(20):
        server.run(server.now + 0.25)
        probes.append(server.ask("c", Shape(50, 5, 5), asked_class="P0"))
    server.run(server.now + 1.0)
    assert [probe.refused for probe in probes] == [None] * 20


def test_the_shared_prompt_of_a_resumed_request_counts_once_for_new_deadlines() -> None:
    server = _server("wide", "long", "asks")
    for _ in range(2):
        server.add_replica(prefix_cache=True)
    server.run(1.0)
    wide = server.ask("wide", Shape(60_000, 500, 500), asked_class="P3", samples=64)
    server.run(1.1)
    assert wide.replica is not None
    server.ask("long", Shape(120_000, 1, 1), asked_class="P3")
    server.run(5.0)
    assert wide.first_token_at is not None
    # The other replica has no credit for a while, so the resumed request has to wait.
    server.ask("long", Shape(120_000, 1, 1), asked_class="P3")
    server.run(5.1)
    server.kill_replica(wide.replica)
    server.run(5.5)
    assert wide.attempt and not wide.replica
    asked = server.ask("asks", Shape(500, 5, 5), asked_class="P3", deadline_s=20.0)
    server.run(30.0)
    assert asked.refused is None
    assert asked.met


def test_a_light_request_is_not_refused_because_of_work_that_it_overtakes() -> None:
    light = ("light-0", "light-1", "light-2")
    server = _server("a", "b", "c", *light)
    server.add_replica(slots=64)
    server.run(1.0)
    server.ask("c", Shape(100_000, 1, 1), asked_class="P3")
    server.ask("a", Shape(100_000, 1, 1), asked_class="P1")
    server.ask("a", Shape(100_000, 1, 1), asked_class="P1", prompts=3)
    server.run(1.3)
    for _ in range(2):
        server.ask("b", Shape(1200, 1000, 1000), asked_class="P1", samples=1024)
    probes = []
    for _ in range(6):
        server.run(server.now + 1.0)
        # The first two requests use up the token credit, so the third one must wait in the queue.
        probes += [server.ask(name, Shape(7000, 1, 1), asked_class="P1") for name in light]
    server.run(server.now + 5.0)
    assert [probe.refused for probe in probes] == [None] * 18


def test_urgent_requests_that_wait_for_their_share_count_for_the_limits_and_predictions() -> None:
    """Reproduces a bug: if a tenant had received more than its share, its urgent requests were accepted as if
    they could start at once, although they had to wait. The queue grew without limit, and the service
    promised deadlines that it could not meet."""
    server = _server("flood", "wide", rules=QueueRules(limit=10, reserved_slots=0.0))
    server.add_replica(slots=32)
    server.run(1.0)
    for _ in range(2):
        server.ask("wide", Shape(50, 1000, 1000), asked_class="P0", samples=32)
    server.ask("flood", Shape(60_000, 1, 1), asked_class="P0")
    server.run(1.5)
    promised = server.ask("flood", Shape(50, 5, 5), asked_class="P0", deadline_s=2.5)
    flood = [server.ask("flood", Shape(50, 5, 5), asked_class="P0") for _ in range(20)]
    few = server.ask("wide", Shape(50, 5, 5), asked_class="P0")
    server.run(4.1)
    assert promised.refused is None and promised.met
    waiting = [one for one in flood if one.refused is None]
    # A tenant gets at most four fifths of the queue, which also holds the two earlier requests.
    assert 5 <= len(waiting) <= 8 and not any(one.admitted_at for one in waiting)
    assert {one.refused.code for one in flood if one.refused is not None} == {"queue_full"}
    assert few.ttft_s < 2 * full_step_s(32) + 0.02
    server.run(20.0)
    assert all(one.ended_at is not None for one in waiting)


@pytest.mark.parametrize("promised", [True, False])
def test_a_request_that_goes_before_higher_classes_is_not_overtaken_by_them_in_the_engine(
    promised: bool,
) -> None:
    """The promised deadline is met and the background class gets its share, although P1 prompts fill every
    step."""
    server = _server("batch", "busy-0", "busy-1")
    server.add_replica()
    server.run(1.0)
    for name in ("busy-0", "busy-1"):
        backlogged(server, name, 60, fixed(4000, 30))
    server.run(2.0)
    batch = server.ask("batch", Shape(4000, 1, 1), asked_class="P3", deadline_s=20.0 if promised else None)
    while batch.first_token_at is None and server.now < 30.0:
        server.run(server.now + 1.0)
    assert batch.refused is None
    assert batch.admitted_at is not None and batch.first_token_at is not None
    if promised:
        assert batch.met
    # two steps for prompts that were dispatched earlier, and one for the request's own prompt
    assert batch.first_token_at - batch.admitted_at <= 4 * full_step_s(256)


def _server(*tenants: str, rules: QueueRules = QueueRules()) -> SimulatedServer:  # noqa: B008
    return SimulatedServer(tenants=[TenantRecord(name=name, created_at=0.0) for name in tenants], rules=rules)
