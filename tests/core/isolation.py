"""Checks the guarantees in docs/traffic.md for urgent and light requests, on a server in virtual time.
`figures` returns the time to first token of short requests that arrive after one large request.
`broken_promises` runs a random mix of requests, and returns the measured requests (probes) that waited longer
than guaranteed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from appliance.traffic.rules import QueueRules
from store.policies import TenantRecord
from tests.core.scheduler_replica import HOST_S, Speed
from tests.core.simulated_server import RESUBMIT_S, Asked, Shape, SimulatedServer

SPEED = Speed()
BUDGET = 8192
"""Number of tokens in a full step."""
MARGIN_S = 0.005
"""Allowance, in seconds, for messages between processes and for the step that follows a step without
prompts."""


def full_step_s(slots: int, step_tokens: int = BUDGET) -> float:
    return SPEED.step_s + SPEED.seq_s * slots + SPEED.prompt_token_s * step_tokens + HOST_S


# ── individual requests ──


@dataclass(frozen=True)
class Case:
    """Large requests on a server with one replica, and the short requests that arrive after them."""

    asked_class: str
    prompt: int = 50
    answer: int = 20
    samples: int = 1
    prompts: int = 1
    deadline_s: float | None = None
    tenants: int = 1
    """Number of tenants that send the large request at the same time."""
    own: bool = False
    """Whether the short requests' first tenant sends all large requests instead of these tenants."""
    own_wide: int = 0
    """Number of requests, each with n = 64 and a prompt of 1,000 tokens, that the short requests' first
    tenant sends before the large requests."""
    other_wide: int = 0
    """Number of samples of a request that another tenant sends before all other requests; 0 for no such
    request."""
    resumed: bool = False
    """Whether the replica that ran the large request has died, so that another replica resumes it."""
    after_s: float = 0.2
    """Time between the large request and the short requests."""
    slots: int = 256
    behind: str = "P0"
    """Class of the short requests."""
    crowd: int = 1
    """Number of short requests, which arrive at the same time."""
    crowd_tenants: int = 1
    """Number of tenants that send the short requests."""
    output: int = 5
    """Length of the short requests' answers."""
    short_prompt: int = 50
    """Length of the short requests' prompts."""
    step_tokens: int = BUDGET
    """Number of tokens in a full step."""
    decodes: int = 0
    """Number of P3 requests that generate long answers during the whole case."""


CASES: dict[str, Case] = {
    "P0 behind a P3 prompt of 12,000": Case("P3", 12_000),
    "P0 behind a P3 prompt of 20,000": Case("P3", 20_000),
    "P0 behind a P3 prompt of 60,000": Case("P3", 60_000),
    "P0 behind a P3 prompt of 120,000": Case("P3", 120_000),
    "P1 behind a P3 prompt of 120,000": Case("P3", 120_000, behind="P1"),
    "light P1 behind a P1 prompt of 120,000": Case("P1", 120_000, behind="P1"),
    "P1 behind a P3 prompt of 2,000": Case("P3", 2000, after_s=0.01, behind="P1"),
    "P1 of 10 tokens behind a P3 prompt of 4,000, steps of 64": Case(
        "P3", 4000, after_s=0.02, slots=32, behind="P1", short_prompt=10, step_tokens=64
    ),
    "P1 of 10 tokens behind a P3 prompt of 4,000 and 4 decodes, steps of 64": Case(
        "P3", 4000, after_s=0.02, slots=32, behind="P1", short_prompt=10, step_tokens=64, decodes=4
    ),
    "P0 behind a P3 request with 40 prompts of 3,000": Case("P3", 3000, prompts=40),
    "P1 behind a P3 request with 40 prompts of 3,000": Case("P3", 3000, prompts=40, behind="P1"),
    "P0 behind a resumed P3 prompt of 120,000": Case("P3", 120_000, resumed=True),
    "P0 behind a resumed P1 request with n = 128": Case("P1", 3000, 1000, samples=128, resumed=True),
    "P1 behind a P3 prompt of 120,000 with a deadline": Case("P3", 120_000, deadline_s=30.0, behind="P1"),
    "P0 behind n = 63, 64 slots": Case("P1", 50, 1000, samples=63, slots=64),
    "P0 behind n = 64, 64 slots": Case("P1", 50, 1000, samples=64, slots=64),
    "P0 behind n = 128, 64 slots": Case("P1", 50, 1000, samples=128, slots=64),
    "P0 behind n = 1,024, 256 slots": Case("P1", 50, 1000, samples=1024),
    "P1 behind n = 1,024 of P3, 256 slots": Case("P3", 50, 1000, samples=1024, behind="P1"),
    "20 P1 at once behind n = 1,024 of P3, 256 slots": Case(
        "P3", 50, 1000, samples=1024, behind="P1", crowd=20
    ),
    "2 P1 at once behind n = 32 of P1, 32 slots": Case(
        "P1", 50, 1000, samples=32, slots=32, behind="P1", crowd=2
    ),
    "P0 behind P0 prompts of 8,000 by 5 tenants": Case("P0", 8000, tenants=5, after_s=0.01),
    "light P1 behind P1 prompts of 8,000 by 5 tenants": Case(
        "P1", 8000, tenants=5, after_s=0.01, behind="P1"
    ),
    "P0 behind 3 P0 prompts of 100,000 by the same tenant": Case("P0", 100_000, tenants=3, own=True),
    "P0 behind 2 P0 requests with n = 1,024 by the same tenant, 256 slots": Case(
        "P0", 50, 1000, samples=1024, tenants=2, own=True
    ),
    "light P1 behind 3 P1 prompts of 100,000 by the same tenant": Case(
        "P1", 100_000, tenants=3, own=True, behind="P1"
    ),
    "P0 behind 2 requests with n = 64 and 4 prompts of 100,000 by the same tenant, 64 slots": Case(
        "P0", 100_000, 1, tenants=4, own=True, own_wide=2, after_s=2.6, slots=64
    ),
    "light P1 behind n = 128 of another tenant, its own n = 64 and 4 prompts of 100,000, 64 slots": Case(
        "P1", 100_000, 1, tenants=4, own=True, own_wide=1, other_wide=128, after_s=2.6, slots=64, behind="P1"
    ),
    "2 P0 at once behind n = 64 of P0, 64 slots": Case(
        "P0", 50, 1000, samples=64, slots=64, crowd=2, output=500
    ),
    "2 light P1 by one tenant at once behind n = 128 of P1, 64 slots": Case(
        "P1", 1000, 1000, samples=128, slots=64, behind="P1", crowd=2, output=500
    ),
    "60 light P1 by 30 tenants at once behind n = 128 of P1, 64 slots": Case(
        "P1", 1000, 1000, samples=128, slots=64, behind="P1", crowd=60, crowd_tenants=30, output=500
    ),
    "40 P0 at once behind 60 light P1 by 30 tenants, 64 slots": Case(
        "P1", 50, 1000, prompts=2, tenants=30, slots=64, crowd=40
    ),
}


def figures() -> dict[str, float]:
    """Return times to first token, in ms: that of a request with 50 tokens and no other load ("alone"), and
    that of the short requests in each case. If several of them arrive together, the time of the last one is
    returned."""
    made = {"alone": _ttft_ms(None)}
    for name, case in CASES.items():
        made[name] = _ttft_ms(case)
    return made


def _ttft_ms(case: Case | None) -> float:
    slots = case.slots if case else 256
    tenants = [f"behind-{number}" for number in range(case.crowd_tenants if case else 1)]
    fronts = [f"front-{number}" for number in range(case.tenants if case else 0)]
    if case is not None and case.own:
        fronts = tenants[:1] * len(fronts)
    server = SimulatedServer(tenants=[_tenant(name) for name in sorted({*fronts, *tenants, "wide"})])
    step_tokens = case.step_tokens if case else BUDGET
    server.add_replica(slots=slots, max_num_batched_tokens=step_tokens)
    for _ in range(case.decodes if case else 0):
        server.ask(fronts[0], Shape(10, 3000, 3000), asked_class="P3")
    server.run(1.0)
    if case is not None:
        wide = [("wide", case.other_wide)] if case.other_wide else []
        for name, samples in (*wide, *[(tenants[0], 64)] * case.own_wide):
            server.ask(name, Shape(50, 1000, 1000), asked_class=case.asked_class, samples=samples)
        for front in fronts:
            server.ask(
                front,
                Shape(case.prompt, case.answer, case.answer),
                asked_class=case.asked_class,
                prompts=case.prompts,
                samples=case.samples,
                deadline_s=case.deadline_s,
            )
        if case.resumed:
            server.run(1.02)
            server.kill_replica(server.replicas[0])
            server.add_replica(slots=slots, max_num_batched_tokens=step_tokens)
    server.run(1.0 + (case.after_s if case else 0.0))
    asked_class, crowd = (case.behind, case.crowd) if case else ("P0", 1)
    prompt, output = (case.short_prompt, case.output) if case else (50, 5)
    behind = [
        server.ask(tenants[number % len(tenants)], Shape(prompt, output, output), asked_class=asked_class)
        for number in range(crowd)
    ]
    while any(one.first_token_at is None for one in behind) and server.now < 100.0:
        server.run(server.now + 1.0)
    return round(1e3 * max(one.ttft_s for one in behind), 1)


def _tenant(name: str) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0)


# ── random mixes ──


@dataclass(frozen=True)
class Load:
    """A request that is heavier than the probes: it has a long prompt, several prompts or many samples. It
    may also have a deadline."""

    at: float
    tenant: str
    asked_class: str
    shape: Shape
    prompts: int = 1
    samples: int = 1
    deadline_s: float | None = None


class Probes(NamedTuple):
    """The requests for which the time to first token is measured."""

    kind: str
    """P0 requests from several tenants ("P0") or from the only tenant that sends P0 requests ("only P0"), or
    P1 requests from light tenants ("light") or from a busy tenant ("busy")."""
    shape: Shape
    every_s: float
    """Time between two crowds."""
    crowd: int = 1
    """Number of probes that are sent at the same time."""
    prompts: int = 1
    samples: int = 1
    """Number of samples for each prompt."""

    @property
    def prompt_tokens(self) -> int:
        return self.prompts * self.shape.prompt

    @property
    def crowd_tokens(self) -> int:
        """Number of prompt tokens of all probes that are sent at the same time."""
        return self.crowd * self.prompt_tokens

    @property
    def is_large_crowd(self) -> bool:
        """Whether several probes are sent at the same time and do not fit into one step together."""
        return self.crowd > 1 and self.crowd_tokens > BUDGET

    @property
    def after_s(self) -> float:
        """Time, in seconds, for which a mix runs after the last probes have been sent."""
        return 1.0 + self.crowd_tokens * SPEED.prompt_token_s

    @property
    def own_class(self) -> str:
        return "P0" if self.kind in ("P0", "only P0") else "P1"


MAX_TOKENS = 131_072
"""Maximum length of a prompt and its answer together."""


def max_samples(slots: int) -> int:
    """Return the maximum number of samples of an urgent request, over all of its prompts."""
    return max(2, slots // 32)


def random_loads(draw: random.Random, probes: Probes, slots: int, seconds: float) -> list[Load]:
    """Return requests of random kinds that must not delay these probes. One exception: P0 requests may delay
    a busy tenant's P1 probes by the time that the P0 prompts take. Urgent requests in the probes' class have
    prompts at least twice as long as the probes' prompts. There are none if the probes' prompts do not fit
    into one step, because all such prompts have the same level (class and urgency).

    If only one tenant sends P0 requests, it also sends the P0 loads, unless it sends more probes at once than
    fit into one step. docs/traffic.md gives the reason for each kind of request that is left out."""
    classes = {
        "P0": ("P0", "P1", "P2", "P3"),
        "only P0": ("P1", "P2", "P3") if probes.is_large_crowd else ("P0", "P0", "P1", "P2", "P3"),
        "light": ("P1", "P1", "P2", "P3"),
        "busy": ("P2", "P3"),
    }
    fits = probes.prompt_tokens <= BUDGET
    loads = []
    for _ in range(draw.randint(1, 12)):
        asked_class = draw.choice(classes[probes.kind])
        kind = draw.choice(("long", "long", "several", "wide", "wide", "long and wide", "several and wide"))
        prompt = draw.randint(600, 3000)
        if kind in ("long", "long and wide") or (kind == "several" and draw.random() < 0.5):
            prompt = round(2 ** draw.uniform(13.2, 17)) - 1001
        samples = draw.choice((8, 60, 64, 128, 257, 1024)) if "wide" in kind else 1
        output, tenant = draw.choice((1, 20, 200, 1000)), f"heavy-{draw.randint(0, 2)}"
        prompts = draw.randint(2, 20) if "several" in kind else 1
        if asked_class == probes.own_class and prompts * samples <= max_samples(slots):
            prompt = max(prompt, 2 * probes.prompt_tokens)
            samples = samples if fits else 64
        # When a request must begin soon to meet its promised deadline, it may overtake requests in
        # higher-priority classes.
        has_deadline = samples == 1 and draw.random() < 0.4
        loads.append(
            Load(
                at=draw.uniform(0.0, seconds / 2),
                tenant="probe-0" if (probes.kind, asked_class) == ("only P0", "P0") else tenant,
                asked_class=asked_class,
                shape=Shape(min(prompt, MAX_TOKENS - output), output, output),
                prompts=prompts,
                samples=samples,
                deadline_s=0.03 * output + draw.uniform(1.0, 20.0) if has_deadline else None,
            )
        )
    # Urgent requests of other tenants, which arrive at the same time.
    lower = probes.kind in ("light", "only P0") or (probes.kind == "P0" and not fits)
    asked_class = "P1" if lower else "P0"
    for _ in range(0 if probes.kind == "light" and not fits else draw.choice((0, 1, 3))):
        at, output = draw.uniform(0.0, seconds), draw.choice((1, 20, 200))
        prompt = round(2 * max(probes.prompt_tokens, 250) * 2 ** draw.uniform(0.0, 4.0))
        loads += [
            Load(
                at,
                f"urgent-{number}",
                asked_class,
                Shape(min(prompt, MAX_TOKENS - output), output, output),
            )
            for number in range(draw.randint(1, 6))
        ]
    return loads


def random_probes(draw: random.Random, slots: int) -> Probes:
    """Return probes that never delay each other by more than a step, because all of them together fit into
    one step and into the slots, or because each of them arrives long after the previous one. There is one
    exception: the only tenant that sends P0 requests may send many at once, which take several steps and use
    up most of the server."""
    kind = draw.choice(("P0", "only P0", "light", "busy"))
    if kind == "only P0" and draw.random() < 0.6:
        # The slots suffice for two crowds (probes sent together) or, beside their tenant's loads, for three
        # of the smaller crowds.
        crowd, prompt = draw.randint(12, 30), draw.choice((800, 2000))
        if draw.random() < 0.5:
            crowd, prompt = draw.randint(3, 12), draw.choice((20, 200, 600))
        most_s = crowd * prompt * SPEED.prompt_token_s
        return Probes(kind, Shape(prompt, 5, 5), max(0.6, most_s / draw.uniform(0.5, 0.8)), crowd)
    # A light tenant occupies less than 1/32 of the slots.
    crowd = {"P0": 8, "only P0": 1, "light": slots // 32, "busy": 20}[kind]
    most = 20 if kind == "busy" else max_samples(slots)
    made = draw.choice(("short", "short", "long answer", "full step", "samples", "prompts", "several steps"))
    if made == "long answer":
        return Probes(kind, Shape(100, 400, 400), 0.23)
    if made == "full step":
        return Probes(kind, Shape(BUDGET - draw.randint(0, 500), 5, 5), 1.5)
    if made == "samples":
        return Probes(kind, Shape(200, 5, 5), 0.23, samples=draw.randint(2, most))
    if made == "prompts":
        prompts = draw.randint(2, most)
        shape = Shape(draw.randint(20, min(2000, BUDGET // prompts)), 5, 5)
        return Probes(
            kind, shape, 0.23 if shape.prompt < 200 else 1.5, prompts=prompts, samples=most // prompts
        )
    if made == "several steps":
        prompt = round(BUDGET * 2 ** draw.uniform(0.1, 3.0))
        return Probes(kind, Shape(prompt, 5, 5), 1.0 + 1.5 * prompt * SPEED.prompt_token_s)
    # In a mix, a tenant's probes have less than a full step of tokens, so its urgency is never suspended.
    return Probes(kind, Shape(draw.choice((20, 100)), 5, 5), 0.23, crowd=draw.choice((1, crowd)))


class Event(NamedTuple):
    """A disturbance during the run: the "death" of a replica, which is replaced after a second; the "drain"
    of a replica; or a "pause" of admissions, which ends after half a second."""

    at: float
    kind: str


PAUSE_S = 0.5


@dataclass(frozen=True)
class Mix:
    """The server, the events during the run, and the requests of one scenario."""

    slots: int
    blocks: int
    prefix_cache: bool
    replicas: int
    events: tuple[Event, ...]
    seconds: float
    probes: Probes
    rules: QueueRules
    loads: tuple[Load, ...]


def random_mix(seed: int, seconds: float = 5.0) -> Mix:
    draw = random.Random(seed)
    slots, replicas = draw.choice((64, 256)), draw.choice((1, 2))
    probes = random_probes(draw, slots)
    kinds: tuple[tuple[str, ...], ...] = ((), ("pause",))
    if replicas > 1:
        kinds = ((), ("death",), ("death", "death"), ("drain",), ("pause",))
    if probes.crowd > 1:
        # Several crowds of probes would wait during a pause and together need more than one step.
        kinds = tuple(events for events in kinds if "pause" not in events)
    if 2 * probes.crowd_tokens > BUDGET and probes.crowd > 1:
        # After a drain, a crowd takes longer. After a death, it shares its steps with a resumed crowd.
        kinds = ((),)
    strict = QueueRules(background_share=0.0, lifted_share=0.0)
    return Mix(
        slots=slots,
        blocks=draw.choice((20_000, 4_000)),
        prefix_cache=draw.random() < 0.5,
        replicas=replicas,
        # A second replica dies only after the first one has been replaced.
        events=tuple(
            Event(seconds * (draw.uniform(0.1, 0.4) + 0.5 * number), kind)
            for number, kind in enumerate(draw.choice(kinds))
        ),
        seconds=seconds,
        probes=probes,
        rules=draw.choice((strict, QueueRules())),
        loads=tuple(random_loads(draw, probes, slots, seconds)),
    )


def broken_promises(mix: Mix) -> list[str]:
    """Run a mix. Return a description of each probe whose time to first token exceeds the time without load
    by more than two full steps. Return a description of the mix if it measures nothing: if it has no probe,
    if no load was dispatched, or if the engine rejected a load.

    If a probe's replica dies, the allowance starts again when the probe is resubmitted. A busy tenant's probe
    is also allowed the time of the prompts served before it: prompts of P0 requests, of requests dispatched
    ahead of higher-priority classes, and of resumed P1 requests.
    """
    alone = _run(mix, (), ()).probes
    beside, better, loads = _run(mix, mix.loads, mix.events)
    if not alone or not beside:
        return ["no probe was sent"]
    alone_s = max(probe.ttft_s for probe in alone)
    if mix.probes.prompts > 1:
        # Without load, the first prompt may be computed before the others arrive. Otherwise, all of them are
        # computed in one step.
        alone_s = max(alone_s, SPEED.step_s + SPEED.prompt_token_s * mix.probes.prompt_tokens + HOST_S)
    bound_s = alone_s + 2 * full_step_s(mix.slots) + MARGIN_S
    broken = [
        f"the engine rejected the load {load.shape}" for load in loads if load.ended_at and not load.tokens
    ]
    if not any(load.admitted_at for load in loads):
        broken.append(f"none of {len(loads)} loads was dispatched")
    for after in beside:
        most_s = bound_s + after.attempt * (bound_s + RESUBMIT_S)
        if mix.probes.kind == "busy":
            most_s += sum(_prompts_s(one) for one in better if _may_delay(one, after))
        for event in mix.events:
            if event.kind == "pause" and event.at <= after.arrived_at <= event.at + PAUSE_S:
                most_s += event.at + PAUSE_S - after.arrived_at
        waited_s = (after.first_token_at or mix.seconds + mix.probes.after_s) - after.arrived_at
        if waited_s > most_s:
            took = f"{after.ttft_s:.3f}" if after.first_token_at is not None else f"never: {after.refused}"
            broken.append(
                f"{after.asked_class} of {after.tenant} at {after.arrived_at:.3f} s took {took}, "
                f"alone {alone_s:.3f}, bound {most_s:.3f}"
            )
    return broken


def _prompts_s(asked: Asked) -> float:
    """Return how long it takes to compute a request's prompts, and its earlier tokens if it was resumed, in
    steps that also contain decodes."""
    recomputed = asked.tokens if asked.attempt else 0
    return 1.2 * (asked.admit.prompt_tokens + recomputed) * SPEED.prompt_token_s


def _may_delay(asked: Asked, probe: Asked) -> bool:
    """Return whether a request's prompts may have been computed while a probe waited for its first token."""
    if asked.admitted_at is None:
        return False
    begins_before = probe.first_token_at is None or asked.admitted_at <= probe.first_token_at
    computed_at = asked.ended_at if asked.attempt else asked.first_token_at
    return begins_before and (computed_at is None or computed_at >= probe.arrived_at)


def _ask(server: SimulatedServer, load: Load, sent: list[Asked]) -> None:
    sent.append(
        server.ask(
            load.tenant,
            load.shape,
            asked_class=load.asked_class,
            prompts=load.prompts,
            samples=load.samples,
            deadline_s=load.deadline_s,
        )
    )


class _Run(NamedTuple):
    probes: list[Asked]
    better: list[Asked]
    """The requests that may be served ahead of an ordinary P1 request."""
    loads: list[Asked]


def _run(mix: Mix, loads: Sequence[Load], events: Sequence[Event]) -> _Run:
    """Run a mix with these loads and events."""
    measured = mix.probes
    names = {"probe-0", "probe-1", "probe-2", *(load.tenant for load in loads)}
    server = SimulatedServer(tenants=[_tenant(name) for name in sorted(names)], rules=mix.rules)

    def add_replica() -> None:
        server.add_replica(slots=mix.slots, blocks=mix.blocks, prefix_cache=mix.prefix_cache)

    for _ in range(mix.replicas):
        add_replica()
    server.run(0.5)
    tenants = 1 if measured.kind in ("busy", "only P0") else 3
    if measured.kind == "busy":
        for _ in range(mix.replicas * mix.slots // 16):
            server.ask("probe-0", Shape(50, 3000, 3000), asked_class="P1")
    server.run(1.0)
    start = server.now
    sent: list[Asked] = []
    for load in loads:
        server.at(start + load.at, partial(_ask, server, load, sent))

    def kill() -> None:
        server.kill_replica(server.replicas[0])
        server.after(1.0, add_replica)

    def pause() -> None:
        server.requests.pause_admission(None, "a test", hold=True)
        server.after(PAUSE_S, lambda: server.requests.resume_admission(None))

    happen: dict[str, Callable[[], None]] = {
        "death": kill,
        "drain": lambda: server.requests.retire_replica(server.replicas[0].account),
        "pause": pause,
    }
    for event in events:
        server.at(start + event.at, happen[event.kind])
    probes: list[Asked] = []

    def ask_crowd() -> None:
        asked_class = measured.own_class
        # In P1, each tenant sends its next requests only after its previous ones have been answered.
        # Otherwise, a light tenant would become a busy one, and a busy tenant's requests would delay each
        # other.
        tenant = f"probe-{len(probes) // measured.crowd % tenants}"
        if asked_class == "P0" or all(one.ended_at is not None for one in probes if one.tenant == tenant):
            probes.extend(
                server.ask(
                    tenant,
                    measured.shape,
                    asked_class=asked_class,
                    prompts=measured.prompts,
                    samples=measured.samples,
                )
                for _ in range(measured.crowd)
            )
        if server.now + measured.every_s < start + mix.seconds:
            server.after(measured.every_s, ask_crowd)

    server.after(measured.every_s, ask_crowd)
    server.run(start + mix.seconds + measured.after_s)
    better = [
        asked
        for asked in server.asked
        if asked.overtook or asked.asked_class == "P0" or (asked.attempt and asked.asked_class == "P1")
    ]
    for asked in {*probes, *better}:
        asked.arrived_at -= start
        asked.first_token_at = None if asked.first_token_at is None else asked.first_token_at - start
        asked.admitted_at = None if asked.admitted_at is None else asked.admitted_at - start
        asked.ended_at = None if asked.ended_at is None else asked.ended_at - start
    return _Run(probes, better, sent)
