"""Scenarios that check the guarantees for tenants on a server in virtual time. They cover fair shares, the
response times of a quiet tenant while another tenant floods the server, and deadlines at three times the load
that the server can handle.

    python -m tests.core.scenarios --seconds 120 --out measurements.json

`tests/core/test_scenarios.py` runs short versions of the same scenarios.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store.policies import TenantRecord
from tests.core import isolation
from tests.core.isolation_mixes import broken_promises, random_mix
from tests.core.scheduler_replica import Speed
from tests.core.simulated_clients import backlogged, fixed, percentile, poisson, uniform
from tests.core.simulated_server import Asked, Shape, SimulatedServer

SLOTS = 256
SPEED = Speed()
DECIDED_S = 0.010
"""A request that is refused within this many seconds of its arrival counts as refused on arrival. A request
that is refused later counts as admitted before."""

Measurements = dict[str, Any]


def tenant(name: str, weight: float = 1.0) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0, weight=weight)


# ── shares ──

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}


def shares(*, seconds: float, warm_up: float = 20.0, seed: int = 0) -> Measurements:
    """Run three tenants that always have waiting requests: one sends long prompts, one asks for long answers,
    and one does both."""
    server = SimulatedServer(tenants=[tenant(name, weight) for name, weight in WEIGHTS.items()], seed=seed)
    server.add_replica(slots=SLOTS)
    backlogged(server, "a", 400, fixed(2000, 20))
    backlogged(server, "b", 400, fixed(50, 400))
    backlogged(server, "c", 400, uniform((100, 3000), (10, 300)))
    server.run(warm_up)
    before = dict(server.served)
    server.run(warm_up + seconds)
    normal = [(server.served[name] - before[name]) / weight for name, weight in WEIGHTS.items()]
    return {
        "seconds": seconds,
        "seed": seed,
        "service_by_weight": [round(one) for one in normal],
        "spread": max(normal) / min(normal) - 1.0,
        "jain": sum(normal) ** 2 / (len(normal) * sum(one * one for one in normal)),
    }


# ── a quiet tenant ──


def quiet(*, seconds: float, flood_per_s: float, seed: int = 0) -> Measurements:
    """Run a tenant that asks about one long document after another, first alone and then while another tenant
    floods the server.

    A request's first token has to wait for the step that is running when the request arrives, and for the
    step that has already been launched. The steps for its prompt also contain the flood's decodes. The flood
    can therefore multiply a short time to first token.
    """
    alone = _quiet(seconds, 0.0, seed)
    beside = _quiet(seconds, flood_per_s, seed)
    p99 = [
        percentile([one.ttft_s for one in server.asked if one.tenant == "quiet"], 0.99)
        for server in (alone, beside)
    ]
    steps = [replica.longest_step_s for replica in beside.replicas]
    return {
        "seconds": seconds,
        "seed": seed,
        "flood_per_s": flood_per_s,
        "asked": len(beside.asked),
        "quiet_requests": sum(one.tenant == "quiet" for one in beside.asked),
        "ttft_p99_alone_ms": 1e3 * p99[0],
        "ttft_p99_beside_ms": 1e3 * p99[1],
        "ratio": p99[1] / p99[0],
        "longest_step_ms": 1e3 * max(steps),
    }


def _quiet(seconds: float, flood_per_s: float, seed: int) -> SimulatedServer:
    server = SimulatedServer(tenants=[tenant("quiet"), tenant("flood")], seed=seed)
    for _ in range(2):
        server.add_replica(slots=SLOTS)
    shape = uniform((8000, 12_000), (20, 60))
    draw = random.Random(seed)

    def ask(_: Asked | None = None) -> None:
        if server.now < seconds - 3.0:
            server.after(draw.expovariate(2.0), lambda: server.ask("quiet", shape(draw), done=ask))

    ask()
    if flood_per_s:
        poisson(server, "flood", flood_per_s, uniform((20, 60), (60, 200)))
    server.run(seconds)
    unserved = [one for one in server.asked if one.tenant == "quiet" and one.first_token_at is None]
    assert not unserved, (
        f"{len(unserved)} requests of the quiet tenant were not served: {unserved[0].refused}"
    )
    return server


# ── deadlines ──

MIXES: dict[str, tuple[int, int, Callable[[random.Random], Shape]]] = {
    "exact": (500, 110, uniform((100, 900), (20, 200))),
    "guess": (500, 110, uniform((100, 900), (20, 200), max_tokens=512)),
    "long": (3500, 225, uniform((1000, 6000), (50, 400))),
    "chat": (160, 350, uniform((20, 300), (100, 600), max_tokens=1024)),
}
"""For each mix of request sizes: the mean number of prompt tokens, the mean number of output tokens, and a
function that draws request sizes."""
EVENTS = ("steady", "cold", "surge", "mix", "death")
REPLICAS = 2
MET, MET_IN_EACH_EVENT = 0.99, 0.95
"""Minimum fractions of promised deadlines that must be met: over all events of a mix together, and in each
event separately."""


def deadlines(*, mix: str, event: str, seconds: float, load: float = 3.0, seed: int = 0) -> Measurements:
    """Run four tenants with a combined load of `load` times the server's capacity. Three of them set
    deadlines.

    `event` is "steady" or one of these:

    - "cold": the load begins immediately, before anything has been measured. In the other cases, a
      light load precedes it.
    - "surge": the load drops in the middle for 10 s and then rises again.
    - "mix": long prompts are added in the middle.
    - "death": a replica is killed in the middle, and a new one is added 5 s later.
    """
    server = SimulatedServer(tenants=[tenant(name) for name in "abcd"], seed=seed)
    for _ in range(REPLICAS):
        server.add_replica(slots=SLOTS)
    warm_up = 0.0 if event == "cold" else 10.0
    if warm_up:
        _ask(server, mix, 0.3, until=warm_up)
        server.run(warm_up)
    half = warm_up + seconds / 2
    end = warm_up + seconds
    if event == "surge":
        _ask(server, mix, load, until=half)
        server.at(half, lambda: _ask(server, mix, 0.3, until=half + 10.0))
        server.at(half + 10.0, lambda: _ask(server, mix, load, until=end))
    else:
        _ask(server, mix, load, until=end)
    if event == "mix":
        server.at(half, lambda: _ask(server, "long", 1.0, until=end))
    died_at = None
    if event == "death":
        died_at = half
        server.at(half, lambda: server.kill_replica(server.replicas[0]))
        server.at(half + 5.0, lambda: server.add_replica(slots=SLOTS))
    server.run(end + 30.0)
    return {
        "mix": mix,
        "event": event,
        "seconds": seconds,
        "load": load,
        "seed": seed,
        **_met(server, died_at),
    }


def _ask(server: SimulatedServer, mix: str, load: float, until: float) -> None:
    prompt, output, shape = MIXES[mix]
    # Compute the mean time that a request takes on a replica whose slots are all busy.
    served_s = prompt * SPEED.prompt_token_s + output * SPEED.step_s * 2 / SLOTS
    per_s = load * REPLICAS / served_s

    def deadline_s(draw: random.Random) -> float:
        return draw.uniform(0.5, 8.0) + 0.02 * output

    for name, part in (("a", 0.3), ("b", 0.3), ("c", 0.2)):
        poisson(server, name, part * per_s, shape, until=until, deadline_s=deadline_s)
    poisson(server, "d", 0.2 * per_s, shape, until=until)


def _met(server: SimulatedServer, died_at: float | None) -> Measurements:
    asked = [one for one in server.asked if one.deadline_s is not None]
    admitted = [one for one in asked if not _refused_at_once(one)]
    # The promise does not cover requests that were in flight on a replica that died.
    spared = [one for one in admitted if died_at is not None and _was_in_flight(one, died_at)]
    counted = len(admitted) - len(spared)
    met = sum(one.met for one in admitted) - sum(one.met for one in spared)
    decided = [one.decided_at - one.arrived_at for one in asked if _refused_at_once(one) and one.decided_at]
    late = Counter(one.refused.code for one in admitted if one.refused is not None)
    return {
        "asked": len(asked),
        "admitted": len(admitted),
        "met": sum(one.met for one in admitted) / max(1, len(admitted)),
        "met_but_those_at_a_death": met / max(1, counted),
        "in_flight_at_a_death": len(spared),
        "refused_later": dict(late),
        "refused_within_ms": 1e3 * max(decided, default=0.0),
        "output_tokens": sum(one.tokens for one in server.asked),
        "served_without_deadline": sum(
            one.deadline_s is None and one.ended_at is not None for one in server.asked
        ),
    }


def _refused_at_once(one: Asked) -> bool:
    return one.refused is not None and (one.decided_at or 0.0) - one.arrived_at <= DECIDED_S


def _was_in_flight(one: Asked, at: float) -> bool:
    return one.arrived_at <= at and (one.ended_at is None or one.ended_at >= at)


def _met_in_all(runs: list[Measurements]) -> tuple[int, float]:
    """Return the number of admitted requests in these runs, and the fraction of them that met their
    deadlines. Requests in flight at a replica's death are excluded."""
    admitted = [one["admitted"] - one["in_flight_at_a_death"] for one in runs]
    met = sum(one["met_but_those_at_a_death"] * count for one, count in zip(runs, admitted, strict=True))
    return sum(admitted), met / max(1, sum(admitted))


# ── long runs of all scenarios ──


def main() -> int:
    """Run every scenario with several seeds and write the measurements. Return 1 if a guarantee is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds of each run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    broken: list[str] = []
    measurements: Measurements = {"shares": [], "quiet": [], "deadlines": [], "deadlines_in_all": {}}
    measurements["isolation_ttft_ms"] = isolation.measurements()
    print(f"isolation {json.dumps(measurements['isolation_ttft_ms'])}", flush=True)
    measurements["isolation_mixes"] = 600 * options.seeds
    for seed in range(measurements["isolation_mixes"]):
        broken += [f"mix {seed}: {probe}" for probe in broken_promises(random_mix(seed))]
    print(
        f"{len(broken)} short requests waited too long in {measurements['isolation_mixes']} mixes", flush=True
    )

    def note(kind: str, one: Measurements, kept: bool) -> None:
        measurements[kind].append(one)
        print(f"{'ok ' if kept else 'BAD'} {kind} {json.dumps(one)}", flush=True)
        if not kept:
            broken.append(f"{kind}: {one}")

    for seed in range(options.seeds):
        one = shares(seconds=60.0, seed=seed)
        note("shares", one, one["spread"] <= 0.05 and one["jain"] >= 0.99)
        one = quiet(seconds=min(30.0, options.seconds), flood_per_s=10_000.0, seed=seed)
        note("quiet", one, one["ratio"] <= 1.2)
        for mix in MIXES:
            for event in EVENTS:
                one = deadlines(mix=mix, event=event, seconds=options.seconds, seed=seed)
                note("deadlines", one, one["refused_within_ms"] <= 1e3 * DECIDED_S)
    for mix in MIXES:
        runs = [one for one in measurements["deadlines"] if one["mix"] == mix]
        measurements["deadlines_in_all"][mix] = {}
        for event in ("all", *EVENTS):
            admitted, share = _met_in_all([one for one in runs if event in ("all", one["event"])])
            measurements["deadlines_in_all"][mix][event] = {"admitted": admitted, "met": share}
            kept = share >= (MET if event == "all" else MET_IN_EACH_EVENT)
            result = f"{mix}, {event}: {share:.4f} of {admitted} met their deadlines"
            print(f"{'ok ' if kept else 'BAD'} {result}")
            if not kept:
                broken.append(result)
    measurements["wall_s"] = round(time.monotonic() - began, 1)
    if options.out:
        options.out.write_text(json.dumps(measurements, indent=1) + "\n")
    print(
        "\n".join(["broken:", *broken])
        if broken
        else f"all promises were kept, in {measurements['wall_s']} s"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
