"""Checks the guarantees in docs/traffic.md for urgent and light requests, on a server in virtual time.
`figures` returns the time to first token of single requests behind one large request. `broken_promises` runs
a random mix of such requests and returns the probes that waited longer than guaranteed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.traffic.rules import QueueRules
from store.policies import TenantRecord
from tests.core.simulated_replica import HOST_S, Speed
from tests.core.simulated_server import Asked, Shape, SimulatedServer

SPEED = Speed()
BUDGET = 8192
"""Number of tokens in a full step."""
MARGIN_S = 0.005
"""Allowance for messages between processes, and for the step after one that left out prompts."""


def full_step_s(slots: int) -> float:
    return SPEED.step_s + SPEED.seq_s * slots + SPEED.prompt_token_s * BUDGET + HOST_S


# ── individual requests ──

CASES: dict[str, tuple[int, int, int, int, str, str]] = {
    "P0 behind a P3 prompt of 12,000": (256, 12_000, 1, 20, "P3", "P0"),
    "P0 behind a P3 prompt of 20,000": (256, 20_000, 1, 20, "P3", "P0"),
    "P0 behind a P3 prompt of 60,000": (256, 60_000, 1, 20, "P3", "P0"),
    "P0 behind a P3 prompt of 120,000": (256, 120_000, 1, 20, "P3", "P0"),
    "P1 behind a P3 prompt of 120,000": (256, 120_000, 1, 20, "P3", "P1"),
    "light P1 behind a P1 prompt of 120,000": (256, 120_000, 1, 20, "P1", "P1"),
    "P0 behind n = 63, 64 slots": (64, 50, 63, 1000, "P1", "P0"),
    "P0 behind n = 64, 64 slots": (64, 50, 64, 1000, "P1", "P0"),
    "P0 behind n = 128, 64 slots": (64, 50, 128, 1000, "P1", "P0"),
    "P0 behind n = 1,024, 256 slots": (256, 50, 1024, 1000, "P1", "P0"),
    "P1 behind n = 1,024 of P3, 256 slots": (256, 50, 1024, 1000, "P3", "P1"),
}
"""For each case: the number of slots; the prompt tokens, samples, output tokens and class of the large
request; and the class of the request behind it."""


def figures() -> dict[str, float]:
    """Return the time to first token, in ms, of a request with 50 tokens, alone and in each case."""
    made = {"alone": _ttft_ms(256, None, "P0")}
    for name, (slots, prompt, samples, output, front_class, behind_class) in CASES.items():
        made[name] = _ttft_ms(slots, (Shape(prompt, output, output), samples, front_class), behind_class)
    return made


def _ttft_ms(slots: int, front: tuple[Shape, int, str] | None, behind_class: str) -> float:
    server = SimulatedServer(tenants=[_tenant("front"), _tenant("behind")])
    server.add_replica(slots=slots)
    server.run(1.0)
    if front is not None:
        shape, samples, front_class = front
        server.ask("front", shape, asked_class=front_class, samples=samples)
    server.run(1.2)
    behind = server.ask("behind", Shape(50, 5, 5), asked_class=behind_class)
    while behind.first_token_at is None and server.now < 100.0:
        server.run(server.now + 1.0)
    return round(1e3 * behind.ttft_s, 1)


def _tenant(name: str) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0)


# ── random mixes ──


@dataclass(frozen=True)
class Load:
    """A large request, with many tokens or many samples."""

    at: float
    tenant: str
    asked_class: str
    shape: Shape
    prompts: int
    samples: int


def random_load(draw: random.Random, classes: Sequence[str], seconds: float) -> list[Load]:
    """Return requests with long prompts, several prompts, many samples, or (except in P1) none of these.
    Requests in P1 either exceed one step or have many samples, because smaller requests would count as light,
    like the probes."""
    loads = []
    for _ in range(draw.randint(1, 12)):
        asked_class = draw.choice(classes)
        kinds = ("long", "long", "several", "wide", "wide") + (("short",) if asked_class != "P1" else ())
        kind = draw.choice(kinds)
        prompt = round(2 ** draw.uniform(13.2, 17)) - 1001 if kind == "long" else draw.randint(600, 3000)
        output = draw.choice((1, 20, 200, 1000))
        loads.append(
            Load(
                at=draw.uniform(0.0, seconds / 2),
                tenant=f"heavy-{draw.randint(0, 2)}",
                asked_class=asked_class,
                shape=Shape(prompt, output, output),
                prompts=draw.randint(14, 20) if kind == "several" else 1,
                samples=draw.choice((60, 64, 128, 257, 1024)) if kind == "wide" else 1,
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
    """Event that affects one of two replicas halfway through the run: "" (none), "death" or "drain"."""
    seconds: float
    probes: str
    """Probes to measure: short requests in P0 ("P0"), or in P1 from a light tenant ("light") or a busy tenant
    ("busy")."""
    loads: tuple[Load, ...]


def random_mix(seed: int, seconds: float = 5.0) -> Mix:
    draw = random.Random(seed)
    replicas, probes = draw.choice((1, 2)), draw.choice(("P0", "light", "busy"))
    slots = draw.choice((64, 256))
    classes = ("P2", "P3") if probes == "busy" else ("P1", "P1", "P2", "P3")
    return Mix(
        slots=slots,
        blocks=draw.choice((20_000, 4_000)),
        replicas=replicas,
        event=draw.choice(("", "death", "drain")) if replicas > 1 else "",
        seconds=seconds,
        probes=probes,
        loads=tuple(random_load(draw, classes, seconds)),
    )


def broken_promises(mix: Mix) -> list[str]:
    """Run a mix, and describe each probe that waited longer than a probe alone plus two full steps."""
    alone, beside = _run(mix, ()), _run(mix, mix.loads)
    middle = mix.seconds / 2
    bound_s = 2 * full_step_s(mix.slots) + MARGIN_S
    broken = []
    alone_s = max(probe.ttft_s for probe in alone)
    for after in beside:
        if mix.event == "death" and middle - 1.0 < after.arrived_at < middle + 0.5:
            continue  # The probe was on the replica that died, or arrived together with the resumed requests.
        if after.first_token_at is None or after.ttft_s > alone_s + bound_s:
            took = f"{after.ttft_s:.3f}" if after.first_token_at is not None else f"never: {after.refused}"
            broken.append(
                f"{after.asked_class} of {after.tenant} at {after.arrived_at:.3f} s took {took}, "
                f"alone {alone_s:.3f}, bound {alone_s + bound_s:.3f}"
            )
    return broken


def _run(mix: Mix, loads: Sequence[Load]) -> list[Asked]:
    """Run a mix with these loads and return its probes. Probes in P1 are sent one after another, because P1
    has only one slot more than P2 and P3."""
    names = ("probe", *(f"heavy-{number}" for number in range(3)))
    # Give P2 and P3 no turns before P1, because the guarantee counts such turns as P1's own work.
    rules = QueueRules(background_share=0.0, lifted_share=0.0)
    server = SimulatedServer(tenants=[_tenant(name) for name in names], rules=rules)
    for _ in range(mix.replicas):
        server.add_replica(slots=mix.slots, blocks=mix.blocks)
    server.run(0.5)
    if mix.probes == "busy":
        for _ in range(8):
            server.ask("probe", Shape(50, 1500, 1500), asked_class="P1")
    if mix.probes == "light" and loads and mix.slots == 64:
        # Only one slot is reserved for light requests, so make the other tenants busy.
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
            ),
        )
    if mix.event == "death":
        server.at(start + mix.seconds / 2, lambda: server.kill_replica(server.replicas[0]))
    elif mix.event == "drain":
        server.at(start + mix.seconds / 2, lambda: server.requests.retire_replica(server.replicas[0].account))
    probes: list[Asked] = []

    asked_class = "P0" if mix.probes == "P0" else "P1"

    def probe(ended: Asked | None = None) -> None:
        def ask() -> None:
            if server.now < start + mix.seconds:
                done = probe if asked_class == "P1" else None
                probes.append(server.ask("probe", Shape(200, 5, 5), asked_class=asked_class, done=done))
                if done is None:
                    probe()

        server.after(0.23, ask)

    probe()
    server.run(start + mix.seconds + 1.0)
    for asked in probes:
        asked.arrived_at -= start
        if asked.first_token_at is not None:
            asked.first_token_at -= start
    return probes
