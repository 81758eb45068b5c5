"""Checks the guarantees in docs/traffic.md for urgent and light requests, on a server in virtual time.
`figures` returns the time to first token of single requests that arrive behind one large request.
`broken_promises` runs a random mix of requests, and returns the measured requests (probes) that waited longer
than guaranteed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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

AFTER_S = 1.0
"""Time, in seconds, for which a mix runs after the last probes have been sent."""


def full_step_s(slots: int) -> float:
    return SPEED.step_s + SPEED.seq_s * slots + SPEED.prompt_token_s * BUDGET + HOST_S


# ── individual requests ──


@dataclass(frozen=True)
class Case:
    """A large request on a server with one replica, and the short requests that arrive behind it."""

    asked_class: str
    prompt: int = 50
    output: int = 20
    samples: int = 1
    prompts: int = 1
    deadline_s: float | None = None
    resumed: bool = False
    """Whether the replica that ran the large request has died, so that another replica resumes it."""
    after_s: float = 0.2
    """Time between the large request and the short requests."""
    slots: int = 256
    behind: str = "P0"
    """Class of the short requests."""
    crowd: int = 1
    """Number of short requests, which arrive at the same time."""


CASES: dict[str, Case] = {
    "P0 behind a P3 prompt of 12,000": Case("P3", 12_000),
    "P0 behind a P3 prompt of 20,000": Case("P3", 20_000),
    "P0 behind a P3 prompt of 60,000": Case("P3", 60_000),
    "P0 behind a P3 prompt of 120,000": Case("P3", 120_000),
    "P1 behind a P3 prompt of 120,000": Case("P3", 120_000, behind="P1"),
    "light P1 behind a P1 prompt of 120,000": Case("P1", 120_000, behind="P1"),
    "P1 behind a P3 prompt of 2,000": Case("P3", 2000, after_s=0.01, behind="P1"),
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
    "2 P1 at once behind n = 32 of P1, 32 slots": Case("P1", 50, 1000, samples=32, slots=32, behind="P1"),
}


def figures() -> dict[str, float]:
    """Return the time to first token, in ms, of requests with a 50-token prompt: alone, and in each case. If
    several requests arrive at the same time, the time is that of the last one."""
    made = {"alone": _ttft_ms(None)}
    for name, case in CASES.items():
        made[name] = _ttft_ms(case)
    return made


def _ttft_ms(case: Case | None) -> float:
    slots = case.slots if case else 256
    server = SimulatedServer(tenants=[_tenant("front"), _tenant("behind")])
    server.add_replica(slots=slots)
    server.run(1.0)
    if case is not None:
        shape = Shape(case.prompt, case.output, case.output)
        front = server.ask(
            "front",
            shape,
            asked_class=case.asked_class,
            prompts=case.prompts,
            samples=case.samples,
            deadline_s=case.deadline_s,
        )
        if case.resumed:
            server.run(1.02)
            assert front.replica is not None
            server.kill_replica(front.replica)
            server.add_replica(slots=slots)
    server.run(1.0 + (case.after_s if case else 0.0))
    asked_class, crowd = (case.behind, case.crowd) if case else ("P0", 1)
    behind = [server.ask("behind", Shape(50, 5, 5), asked_class=asked_class) for _ in range(crowd)]
    while any(one.first_token_at is None for one in behind) and server.now < 100.0:
        server.run(server.now + 1.0)
    return round(1e3 * max(one.ttft_s for one in behind), 1)


def _tenant(name: str) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0)


# ── random mixes ──


@dataclass(frozen=True)
class Load:
    """A large request, which has either many tokens or many samples, or a request with a deadline."""

    at: float
    tenant: str
    asked_class: str
    shape: Shape
    prompts: int
    samples: int
    deadline_s: float | None


def random_load(draw: random.Random, classes: Sequence[str], seconds: float) -> list[Load]:
    """Return requests of random kinds: long prompts, several prompts, many samples, or (except in P1) short
    prompts. Requests in P1 either exceed one step or have many samples, because smaller ones would count as
    light, like the probes."""
    loads = []
    for _ in range(draw.randint(1, 12)):
        asked_class = draw.choice(classes)
        kinds = ("long", "long", "several", "wide", "wide") + (("short",) if asked_class != "P1" else ())
        kind = draw.choice(kinds)
        prompt = round(2 ** draw.uniform(13.2, 17)) - 1001 if kind == "long" else draw.randint(600, 3000)
        output = draw.choice((1, 20, 200, 1000))
        # A promise lets a request overtake higher-priority classes shortly before it must begin.
        has_deadline = kind != "wide" and draw.random() < 0.4
        loads.append(
            Load(
                at=draw.uniform(0.0, seconds / 2),
                tenant=f"heavy-{draw.randint(0, 2)}",
                asked_class=asked_class,
                shape=Shape(prompt, output, output),
                prompts=draw.randint(14, 20) if kind == "several" else 1,
                samples=draw.choice((60, 64, 128, 257, 1024)) if kind == "wide" else 1,
                deadline_s=0.03 * output + draw.uniform(1.0, 20.0) if has_deadline else None,
            )
        )
    return loads


@dataclass(frozen=True)
class Mix:
    """The server, the event during the run, and the requests of one scenario."""

    slots: int
    blocks: int
    replicas: int
    event: str
    """What happens to one of the two replicas halfway through the run: "" (nothing), "death" or "drain"."""
    seconds: float
    probes: str
    """Kind of requests to measure (probes): short P0 requests ("P0"), or P1 requests from a light tenant
    ("light") or from a busy tenant ("busy")."""
    crowd: int
    """Number of probes that are sent at the same time."""
    rules: QueueRules
    loads: tuple[Load, ...]


def random_mix(seed: int, seconds: float = 5.0) -> Mix:
    draw = random.Random(seed)
    replicas, probes = draw.choice((1, 2)), draw.choice(("P0", "light", "busy"))
    slots = draw.choice((64, 256))
    classes = ("P2", "P3") if probes == "busy" else ("P1", "P1", "P2", "P3")
    # At most as many light requests are sent at once as slots are reserved.
    most = {"P0": 8, "busy": 20, "light": 1 if slots == 64 else 3}[probes]
    strict = QueueRules(background_share=0.0, lifted_share=0.0)
    return Mix(
        slots=slots,
        blocks=draw.choice((20_000, 4_000)),
        replicas=replicas,
        event=draw.choice(("", "death", "drain")) if replicas > 1 else "",
        seconds=seconds,
        probes=probes,
        crowd=draw.choice((1, most)),
        rules=draw.choice((strict, QueueRules())),
        loads=tuple(random_load(draw, classes, seconds)),
    )


def broken_promises(mix: Mix) -> list[str]:
    """Run a mix. Return a description of each probe whose time to first token exceeds the time without load
    by more than two full steps.

    A probe whose replica died has this time twice: until the death, and from its resubmission on. A probe of
    a busy tenant also has the time of the requests that were dispatched before higher-priority classes.
    """
    alone, _ = _run(mix, ())
    beside, overtaking = _run(mix, mix.loads)
    alone_s = max(probe.ttft_s for probe in alone if not probe.attempt)
    bound_s = alone_s + 2 * full_step_s(mix.slots) + MARGIN_S
    broken = []
    for after in beside:
        most_s = bound_s + after.attempt * (bound_s + RESUBMIT_S)
        if mix.probes == "busy":
            most_s += sum(_prompts_s(one) for one in overtaking if _may_delay(one, after))
        waited_s = (after.first_token_at or mix.seconds + AFTER_S) - after.arrived_at
        if waited_s > most_s:
            took = f"{after.ttft_s:.3f}" if after.first_token_at is not None else f"never: {after.refused}"
            broken.append(
                f"{after.asked_class} of {after.tenant} at {after.arrived_at:.3f} s took {took}, "
                f"alone {alone_s:.3f}, bound {most_s:.3f}"
            )
    return broken


def _prompts_s(asked: Asked) -> float:
    """Return the time that a request's prompts take, in steps with decodes."""
    return 1.2 * asked.admit.prompt_tokens * SPEED.prompt_token_s


def _may_delay(asked: Asked, probe: Asked) -> bool:
    """Return whether a request's prompts may have been computed while a probe waited for its first token."""
    if asked.admitted_at is None:
        return False
    begins_before = probe.first_token_at is None or asked.admitted_at <= probe.first_token_at
    return begins_before and (asked.first_token_at is None or asked.first_token_at >= probe.arrived_at)


def _run(mix: Mix, loads: Sequence[Load]) -> tuple[list[Asked], list[Asked]]:
    """Run a mix with these loads. Return its probes, and the requests that were dispatched before
    higher-priority classes."""
    names = ("probe", *(f"heavy-{number}" for number in range(3)))
    server = SimulatedServer(tenants=[_tenant(name) for name in names], rules=mix.rules)
    for _ in range(mix.replicas):
        server.add_replica(slots=mix.slots, blocks=mix.blocks)
    server.run(0.5)
    if mix.probes == "busy":
        for _ in range(8):
            server.ask("probe", Shape(50, 1500, 1500), asked_class="P1")
    if mix.probes == "light" and loads and mix.slots == 64:
        # Make the other tenants busy: only one slot is reserved for light requests, so light requests of
        # other tenants would compete for it.
        for name in names[1:]:
            server.ask(name, Shape(50, 3000, 3000), asked_class="P1", samples=2)
    server.run(1.0)
    start = server.now
    for load in loads:
        server.at(
            start + load.at,
            lambda load=load: server.ask(  # type: ignore[misc]
                load.tenant,
                load.shape,
                asked_class=load.asked_class,
                prompts=load.prompts,
                samples=load.samples,
                deadline_s=load.deadline_s,
            ),
        )
    if mix.event == "death":
        server.at(start + mix.seconds / 2, lambda: server.kill_replica(server.replicas[0]))
    elif mix.event == "drain":
        server.at(start + mix.seconds / 2, lambda: server.requests.retire_replica(server.replicas[0].account))
    probes: list[Asked] = []

    def ask_crowd() -> None:
        asked_class = "P0" if mix.probes == "P0" else "P1"
        # In P1, the tenant waits for its answers. Otherwise, a light tenant would have more running requests
        # than slots are reserved, and the requests of a busy tenant would delay each other.
        if asked_class == "P0" or all(one.ended_at is not None for one in probes):
            probes.extend(
                server.ask("probe", Shape(200, 5, 5), asked_class=asked_class) for _ in range(mix.crowd)
            )
        if server.now < start + mix.seconds:
            server.after(0.23, ask_crowd)

    server.after(0.23, ask_crowd)
    server.run(start + mix.seconds + AFTER_S)
    overtaking = [asked for asked in server.asked if asked.overtook]
    for asked in (*probes, *overtaking):
        asked.arrived_at -= start
        asked.first_token_at = None if asked.first_token_at is None else asked.first_token_at - start
        asked.admitted_at = None if asked.admitted_at is None else asked.admitted_at - start
    return probes, overtaking
