"""Compares the forecast for a new quota with the outcome on a real service:
`python -m tests.system.what_if_replay`.

Three tenants send a load from a fixed seed, and one of them exceeds its quota. Then the operator asks for
the forecast for another quota, sets this quota, and the same load is sent again. The numbers of admitted and
rejected requests, and the p99 latencies in the request log, must agree with the forecast. This is done once
for a higher and once for a lower quota, each on a new service.

A p99 of a few hundred requests depends on its few slowest ones, and differs by up to a quarter between two
runs under the same quota. A predicted p99 is therefore compared with the 95% confidence interval of the
measured one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from appliance.client import AdminClient
from tests.system.service import CALL_TIMEOUT_S, Service, service

LIMITED = "limited"
TENANTS = {LIMITED: 0.6, "steady": 0.25, "rare": 0.15}
"""The tenants and their fractions of the requests. Only the first one has a quota."""
FLAGS = ("--device", "cpu", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")
SHARES = (0.4, 0.75)
"""The lower and the higher quota, as fractions of the tokens that the limited tenant asks for."""
BURST_S = 2.0
"""Seconds of use that the quota allows at once. After this time without requests, the quota is full again."""
REFILL = 1e9
"""A quota, in tokens per minute, that fills any other quota before the next command has been performed."""
LOAD = 0.75
"""Speed of the arrivals relative to the measured speed of the service. Requests queue, but the queue remains
short."""
MAX_OUTPUT_TOKENS = 60
MAX_COUNT_ERROR = 0.02
MAX_P99_ERROR = 0.15
ENDED_WITHIN_S = 180.0


class Arrival(NamedTuple):
    """One request of the load."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int


class Outcome(NamedTuple):
    """The outcomes of one tenant's requests."""

    admitted: int
    rejected: int
    """Number of requests that were refused with 429 or 503."""
    ttft_p99_ms: float
    e2e_p99_ms: float
    ttft_range_ms: tuple[float, float] = (0.0, 0.0)
    """95% confidence interval of the p99, for measured latencies."""
    e2e_range_ms: tuple[float, float] = (0.0, 0.0)


def draw_load(
    requests: int, per_s: float, *, max_output: int = MAX_OUTPUT_TOKENS, seed: int = 1
) -> list[Arrival]:
    """Draw a load with random arrivals at this rate."""
    draw, at_s, load = random.Random(seed), 0.0, []
    for _ in range(requests):
        at_s += draw.expovariate(per_s)
        [tenant] = draw.choices(list(TENANTS), list(TENANTS.values()))
        load.append(Arrival(at_s, tenant, draw.randint(10, 100), draw.randint(2, max_output)))
    return load


def limits_of(load: Sequence[Arrival]) -> tuple[float, float]:
    """Return the lower and the higher quota of the limited tenant, in tokens per minute."""
    tokens = sum(one.prompt_tokens + one.output_tokens for one in load if one.tenant == LIMITED)
    low, high = (round(share * tokens / load[-1].at_s * 60.0) for share in SHARES)
    return low, high


class Replays:
    """A service with the tenants of the load."""

    def __init__(self, running: Service) -> None:
        self.running = running
        for tenant in (*TENANTS, "calibration"):
            running.tenant(tenant)
        self._keys = {tenant: running.key(tenant, tenant) for tenant in (*TENANTS, "calibration")}

    def compare(
        self, load: Sequence[Arrival], *, raised: bool, burst_s: float = BURST_S
    ) -> dict[str, dict[str, Outcome]]:
        """Send the load under one quota, ask for the forecast for the other quota, and send the load under
        the other quota. Return the outcomes of each tenant: before, predicted and measured. With a longer
        `burst_s` than the load's duration, each quota allows the same number of tokens in total, but nearly
        all at once, so the times of the requests do not matter."""
        per_burst = load[-1].at_s / max(burst_s, load[-1].at_s)
        low, high = (limit * per_burst for limit in limits_of(load))
        present, new = (low, high) if raised else (high, low)
        self.limit(present, "--burst", f"{burst_s:g}s")
        before = self.send(load)
        forecast = self.limit(new, "--what-if")
        self.limit(REFILL)
        self.limit(new)
        self.running.wait_until(lambda: not self.used(), 60, "the quota to be full again")
        measured = self.send(load)
        found = {}
        for one in forecast["tenants"]:
            if (tenant := one["tenant"]) in TENANTS:
                predicted = one["predicted"]
                found[tenant] = {
                    "before": before[tenant],
                    "predicted": Outcome(
                        predicted["admitted"],
                        predicted["over_quota"] + predicted["refused"],
                        predicted["ttft_p99_ms"],
                        predicted["e2e_p99_ms"],
                    ),
                    "measured": measured[tenant],
                }
        return found

    def requests_per_s(self) -> float:
        """Return the speed at which the service answers requests of the load if its slots are always full."""
        shapes = [one._replace(at_s=0.0, tenant="calibration") for one in draw_load(96, 1.0, seed=2)]
        began = time.monotonic()
        asyncio.run(self._send(shapes))
        return len(shapes) / (time.monotonic() - began)

    def send(self, load: Sequence[Arrival]) -> dict[str, Outcome]:
        """Send each request at its time, and return the outcomes by tenant."""
        began = time.time()
        statuses = asyncio.run(self._send(load))
        self.running.wait_until(
            lambda: not self.running.rows(state="open"), ENDED_WITHIN_S, "the end of the requests in the log"
        )
        outcomes = {}
        for tenant in TENANTS:
            mine = [status for one, status in zip(load, statuses, strict=True) if one.tenant == tenant]
            assert set(mine) <= {200, 429, 503}, (tenant, mine)
            rows = self.running.rows(limit=len(load), tenant=tenant, since=began, status=200)
            assert len(rows) == mine.count(200), (tenant, len(rows), mine.count(200))
            ttft_ms, e2e_ms = ([row[name] for row in rows] for name in ("ttft_ms", "e2e_ms"))
            outcomes[tenant] = Outcome(
                mine.count(200),
                len(mine) - mine.count(200),
                _p99(ttft_ms),
                _p99(e2e_ms),
                p99_range(ttft_ms),
                p99_range(e2e_ms),
            )
        return outcomes

    def limit(self, tokens_per_minute: float, *words: str) -> Any:
        """Set the quota with the command that an operator uses, and return its answer."""
        return self.running.command(
            "tenants", "set", LIMITED, "--tokens-per-minute", f"{tokens_per_minute:g}", *words
        )

    def used(self) -> int:
        """Return the tokens of the quota that are used now."""
        with AdminClient(self.running.run_dir, CALL_TIMEOUT_S) as client:
            [limited] = [one for one in client.tenants() if one.name == LIMITED]
        return sum(usage.used for usage in limited.usage)

    async def _send(self, load: Sequence[Arrival]) -> list[int]:
        transport = httpx.AsyncHTTPTransport(
            uds=str(self.running.api_socket), verify=False, limits=httpx.Limits(max_connections=None)
        )
        draw = random.Random()
        async with httpx.AsyncClient(
            transport=transport, base_url="http://appliance", timeout=ENDED_WITHIN_S
        ) as client:
            began = time.monotonic()

            async def one(arrival: Arrival) -> int:
                await asyncio.sleep(arrival.at_s - (time.monotonic() - began))
                body = {
                    "model": "demo",
                    # Prompts differ from the first token on, so none hits the prefix cache.
                    "prompt": [draw.randrange(7, 5000) for _ in range(arrival.prompt_tokens)],
                    "max_tokens": arrival.output_tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                }
                headers = {"Authorization": f"Bearer {self._keys[arrival.tenant]}"}
                return (await client.post("/v1/completions", json=body, headers=headers)).status_code

            return await asyncio.gather(*map(one, load))


def count_error(predicted: Outcome, measured: Outcome) -> float:
    """Return the difference in rejections as a fraction of the tenant's requests."""
    return abs(predicted.rejected - measured.rejected) / (measured.admitted + measured.rejected)


def p99_errors(predicted: Outcome, measured: Outcome) -> tuple[float, float]:
    """Return the relative errors of the two latencies: their distances from the confidence intervals."""
    return (
        _distance(predicted.ttft_p99_ms, measured.ttft_range_ms),
        _distance(predicted.e2e_p99_ms, measured.e2e_range_ms),
    )


def p99_range(values: list[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the p99. The number of values above the true p99 has a binomial
    distribution, so the interval's ends are two of the sorted values. Fewer than about 380 values give no
    upper end."""
    if not values:
        raise ValueError("no request was answered: send more requests")
    known, above = sorted(values), 0.01 * len(values)
    spread = 1.96 * math.sqrt(0.99 * above)
    first = math.ceil(len(known) - above - spread) - 1
    last = math.ceil(len(known) - above + spread) - 1
    return known[max(0, first)], known[last] if last < len(known) else math.inf


def _distance(value: float, interval: tuple[float, float]) -> float:
    low, high = interval
    return max(0.0, 1.0 - value / low, value / high - 1.0)


def _p99(values: list[float]) -> float:
    known = sorted(values)
    return known[min(len(known) - 1, int(0.99 * len(known)))]


def _shown(p99_ms: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{p99_ms:6.0f} ms" + (f" ({low:.0f} to {high:.0f})" if high else "")


def show(found: dict[str, dict[str, Outcome]]) -> bool:
    """Print the outcomes. Return whether they are within the bounds."""
    kept = True
    for tenant, outcomes in found.items():
        predicted, measured = outcomes["predicted"], outcomes["measured"]
        for name, one in outcomes.items():
            print(
                f"{tenant:8} {name:9} admitted {one.admitted:4} rejected {one.rejected:4} "
                f"TTFT p99 {_shown(one.ttft_p99_ms, one.ttft_range_ms)}  "
                f"e2e p99 {_shown(one.e2e_p99_ms, one.e2e_range_ms)}"
            )
        counts, latencies = count_error(predicted, measured), p99_errors(predicted, measured)
        print(
            f"{tenant:8} errors: counts {counts:.1%}, "
            f"TTFT p99 {latencies[0]:.1%}, e2e p99 {latencies[1]:.1%}",
            flush=True,
        )
        kept &= counts <= MAX_COUNT_ERROR and max(latencies) <= MAX_P99_ERROR
    return kept


def main() -> int:
    """Compare for a higher and for a lower quota, and fail if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results, kept = {}, True
    for name, raised in (("raised", True), ("lowered", False)):
        print(f"the quota is {name}", flush=True)
        with service(*FLAGS) as running:
            replays = Replays(running)
            load = draw_load(options.requests, LOAD * replays.requests_per_s())
            results[name] = replays.compare(load, raised=raised)
        kept &= show(results[name])
    if options.out:
        named = {
            name: {
                tenant: {kind: one._asdict() for kind, one in outcomes.items()}
                for tenant, outcomes in found.items()
            }
            for name, found in results.items()
        }
        options.out.write_text(json.dumps(named, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
