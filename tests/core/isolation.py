"""Measures the guarantees in docs/traffic.md for urgent and light requests, on a simulated server in virtual
time. `measurements` returns the time to first token of short requests that arrive after one large request."""

from __future__ import annotations

from dataclasses import dataclass

from store.policies import TenantRecord
from tests.core.scheduler_replica import HOST_S, Speed
from tests.core.simulated_server import Shape, SimulatedServer

SPEED = Speed()
BUDGET = 8192
"""Number of tokens in a full step."""


def full_step_s(slots: int, max_num_batched_tokens: int = BUDGET) -> float:
    return SPEED.step_s + SPEED.seq_s * slots + SPEED.prompt_token_s * max_num_batched_tokens + HOST_S


@dataclass(frozen=True)
class Case:
    """A scenario on a server with one replica: large requests, and the short requests that arrive
    after them."""

    asked_class: str
    prompt: int = 50
    answer: int = 20
    samples: int = 1
    prompts: int = 1
    deadline_s: float | None = None
    tenants: int = 1
    """Number of tenants that send the large requests at the same time."""
    own: bool = False
    """Whether the first tenant of the short requests sends all large requests, in place of other tenants."""
    own_wide: int = 0
    """Number of additional requests that the first tenant of the short requests sends before the large
    requests. Each has n = 64 and a prompt of 1,000 tokens."""
    other_wide: int = 0
    """Number of samples of a request that another tenant sends before all others. If 0, that tenant sends no
    request."""
    resumed: bool = False
    """Whether the replica that ran the large request has died, so that another replica resumes the
    request."""
    after_s: float = 0.2
    """Time in seconds between the large request and the short requests."""
    slots: int = 256
    behind: str = "P0"
    """Priority class of the short requests."""
    crowd: int = 1
    """Number of short requests that arrive at the same time."""
    crowd_tenants: int = 1
    """Number of tenants that send the short requests."""
    output: int = 5
    """Length of the answers to the short requests, in tokens."""
    short_prompt: int = 50
    """Length of the prompts of the short requests, in tokens."""
    max_num_batched_tokens: int = BUDGET
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
        "P3", 4000, after_s=0.02, slots=32, behind="P1", short_prompt=10, max_num_batched_tokens=64
    ),
    "P1 of 10 tokens behind a P3 prompt of 4,000 and 4 decodes, steps of 64": Case(
        "P3", 4000, after_s=0.02, slots=32, behind="P1", short_prompt=10, max_num_batched_tokens=64, decodes=4
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


def measurements() -> dict[str, float]:
    """Return times to first token in ms. "alone" is the time of a request with 50 tokens on an idle server;
    each other entry is the time of a case's short request. If several short requests arrive together, the
    entry is the time of the last one."""
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
    names = sorted({*fronts, *tenants, "wide"})
    server = SimulatedServer(tenants=[TenantRecord(name=name, created_at=0.0) for name in names])
    max_num_batched_tokens = case.max_num_batched_tokens if case else BUDGET
    server.add_replica(slots=slots, max_num_batched_tokens=max_num_batched_tokens)
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
            server.add_replica(slots=slots, max_num_batched_tokens=max_num_batched_tokens)
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
