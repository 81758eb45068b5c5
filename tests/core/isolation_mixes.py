"""Checks the guarantees in docs/traffic.md for urgent and light requests with random mixes of requests, on a
simulated server in virtual time. `broken_promises` runs a mix, and returns those of its measured requests
(the probes) that waited longer than guaranteed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from appliance.traffic.rules import QueueRules
from store.policies import TenantRecord
from tests.core.isolation import BUDGET, SPEED, full_step_s
from tests.core.scheduler_replica import HOST_S
from tests.core.simulated_server import RESUBMIT_S, Asked, Shape, SimulatedServer

MARGIN_S = 0.005
"""Allowance, in seconds, for messages between processes and for a step that follows a step without
prompts."""


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
    """The kind of the probes: P0 requests from several tenants ("P0") or from the only tenant that sends P0
    requests ("only P0"), or P1 requests from light tenants ("light") or from a busy tenant ("busy")."""
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
        """Whether several probes are sent at the same time and need more than one step."""
        return self.crowd > 1 and self.crowd_tokens > BUDGET

    @property
    def after_s(self) -> float:
        """Time in seconds for which a mix continues after the last probes have been sent."""
        return 1.0 + self.crowd_tokens * SPEED.prompt_token_s

    @property
    def own_class(self) -> str:
        return "P0" if self.kind in ("P0", "only P0") else "P1"


MAX_TOKENS = 131_072
"""Maximum length of a prompt and its answer together."""


def max_samples(slots: int) -> int:
    """Return the maximum number of samples of an urgent request, summed over its prompts."""
    return max(2, slots // 32)


def random_loads(draw: random.Random, probes: Probes, slots: int, seconds: float) -> list[Load]:
    """Return random requests that must not delay these probes. The only permitted delay is that of a busy
    tenant's P1 probes by the prompts of P0 requests.

    Urgent requests in the probes' class have prompts at least twice as long as the probes' prompts. There are
    no urgent requests in that class if the probes' prompts do not fit into one step, because all such prompts
    have the same level (class and urgency). If only one tenant sends P0 requests, it also sends the P0 loads,
    unless it sends more probes at once than fit into one step. docs/traffic.md gives the reason for each kind
    of request that is left out."""
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
        # A request that must begin soon to meet its promised deadline may overtake requests in
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
    # These are urgent requests of other tenants that arrive at the same time.
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
    """Return probes that never delay each other by more than a step: either all of them fit together into one
    step and into the slots, or each one arrives long after the previous one. As an exception, the only tenant
    that sends P0 requests may send many at once, which take several steps and use most of the server's
    capacity."""
    kind = draw.choice(("P0", "only P0", "light", "busy"))
    if kind == "only P0" and draw.random() < 0.6:
        # The slots suffice for two crowds (probes that are sent together). If crowds are smaller, they
        # suffice for three of them beside the loads of their tenant.
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
    # In a mix, a tenant's probes together have less than a full step of tokens, so the tenant's urgency is
    # never suspended.
    return Probes(kind, Shape(draw.choice((20, 100)), 5, 5), 0.23, crowd=draw.choice((1, crowd)))


class Event(NamedTuple):
    """A disturbance during the run. A "death" kills a replica, which is replaced after a second. A "drain"
    drains a replica. A "pause" stops admissions for half a second."""

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
        # A drain lengthens a crowd's service. After a death, a crowd shares its steps with a resumed crowd.
        kinds = ((),)
    strict = QueueRules(background_share=0.0, lifted_share=0.0)
    return Mix(
        slots=slots,
        blocks=draw.choice((20_000, 4_000)),
        prefix_cache=draw.random() < 0.5,
        replicas=replicas,
        # The second replica dies only after the first one has been replaced.
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
    """Run a mix. Return a description of each probe whose time to first token exceeds its time without load
    by more than two full steps. If the mix measures nothing, because it has no probe, no load was dispatched,
    or the engine rejected a load, return a description of the mix.

    If a probe's replica dies, the allowance starts again when the probe is resubmitted. A busy tenant's probe
    may also wait for prompts served before it: those of P0 requests, of requests dispatched ahead of
    higher-priority classes, and of resumed P1 requests.
    """
    alone = _run(mix, (), ()).probes
    beside, better, loads = _run(mix, mix.loads, mix.events)
    if not alone or not beside:
        return ["no probe was sent"]
    alone_s = max(probe.ttft_s for probe in alone)
    if mix.probes.prompts > 1:
        # Without load, the first prompt may be computed before the others arrive, or all prompts may be
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
    """Return how long steps that also contain decodes take to compute a request's prompts and, if the request
    was resumed, its earlier tokens."""
    recomputed = asked.tokens if asked.attempt else 0
    return 1.2 * (asked.admit.prompt_tokens + recomputed) * SPEED.prompt_token_s


def _may_delay(asked: Asked, probe: Asked) -> bool:
    """Return whether a request's prompts may have been computed while the probe waited for its first
    token."""
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
    """The requests that the service may serve ahead of an ordinary P1 request."""
    loads: list[Asked]


def _run(mix: Mix, loads: Sequence[Load], events: Sequence[Event]) -> _Run:
    """Run a mix with these loads and events."""
    measured = mix.probes
    names = {"probe-0", "probe-1", "probe-2", *(load.tenant for load in loads)}
    records = [TenantRecord(name=name, created_at=0.0) for name in sorted(names)]
    server = SimulatedServer(tenants=records, rules=mix.rules)

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
