"""Measures how fairly tenants share a real service: whether their shares match their weights, and how much a
flood delays a quiet tenant.

    python -m tests.system.fairness --seconds 60 --out measurements.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.core.simulated_clients import percentile
from tests.system.service import Service, service

OUTPUT_WEIGHT = 2.0
"""Weight of an output token relative to a prompt token. This is the service's default."""
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
ROWS, MAX_NUM_BATCHED_TOKENS = 16, 256
FLAGS = (
    "--device",
    "cpu",
    "--max-num-seqs",
    str(ROWS),
    "--max-num-batched-tokens",
    str(MAX_NUM_BATCHED_TOKENS),
)

Measurements = dict[str, Any]
Shape = Callable[[random.Random], tuple[int, int]]
"""A function that returns the number of prompt tokens and the number of output tokens."""
SHAPES: dict[str, Shape] = {
    "a": lambda draw: (150, 2),
    "b": lambda draw: (4, 40),
    "c": lambda draw: (draw.randint(10, 150), draw.randint(2, 40)),
}


def key_of(running: Service, tenant: str, weight: float = 1.0) -> str:
    """Create a tenant and return its key."""
    running.tenant(tenant, weight=weight)
    return running.key(tenant, tenant)


class Client:
    """A client that sends one tenant's requests on the Unix socket."""

    def __init__(self, running: Service, key: str) -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(running.api_socket), verify=False, limits=httpx.Limits(max_connections=None)
            ),
            base_url="http://appliance",
            headers={"Authorization": f"Bearer {key}"},
            timeout=600,
        )

    async def first_token_s(self, prompt: int, output: int) -> float:
        """Send a request and read the whole answer. Return the time to first token, in seconds."""
        began, first = time.monotonic(), None
        async with self._http.stream(
            "POST", "/v1/completions", json=_body(prompt, output, stream=True)
        ) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.monotonic() - began
        assert first is not None
        return first

    async def ask(self, prompt: int, output: int) -> float:
        """Send a request, and return the number of weighted tokens that the service spent on it. If the
        request is refused, wait for the time given in the refusal and return 0."""
        answer = await self._http.post("/v1/completions", json=_body(prompt, output))
        if answer.status_code in (429, 503):
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
            return 0.0
        answer.raise_for_status()
        usage = answer.json()["usage"]
        service: float = usage["prompt_tokens"] + OUTPUT_WEIGHT * usage["completion_tokens"]
        return service


def _body(prompt: int, output: int, *, stream: bool = False) -> dict[str, Any]:
    # Prompts differ from the first token on, so none hits the prefix cache.
    tokens = [random.randrange(7, 5000) for _ in range(prompt)]
    return {
        "model": "demo",
        "prompt": tokens,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }


async def _keep_asking(
    client: Client, shape: Shape, outstanding: int, served: Callable[[float], None]
) -> None:
    """Keep the given number of requests outstanding until this task is cancelled."""
    draw = random.Random(1)

    async def one() -> None:
        while True:
            served(await client.ask(*shape(draw)))

    await asyncio.gather(*[one() for _ in range(outstanding)])


def shares(
    running: Service, *, seconds: float = 0.0, least_service: float = 0.0, warm_up_service: float = 8000.0
) -> Measurements:
    """Measure the service that each tenant receives, divided by its weight. The tenants' requests differ
    greatly in size, and each tenant always has requests waiting.

    The measurement starts after a warm-up. It lasts at least the given number of seconds, and continues until
    the given number of weighted tokens has been served. A slow machine takes longer, but its results are
    equally meaningful.
    """
    clients = {name: Client(running, key_of(running, name, weight)) for name, weight in WEIGHTS.items()}
    served = dict.fromkeys(WEIGHTS, 0.0)
    before: dict[str, float] = {}
    reached: dict[float, asyncio.Event] = {}

    def counter(name: str) -> Callable[[float], None]:
        def count(service: float) -> None:
            served[name] += service
            for total, event in reached.items():
                if sum(served.values()) >= total:
                    event.set()

        return count

    async def reach(total: float) -> None:
        await reached.setdefault(total, asyncio.Event()).wait()

    async def measure() -> None:
        tasks = [
            asyncio.create_task(_keep_asking(client, SHAPES[name], 3 * ROWS, counter(name)))
            for name, client in clients.items()
        ]
        await reach(warm_up_service)
        before.update(served)
        await asyncio.gather(asyncio.sleep(seconds), reach(sum(served.values()) + least_service))
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(measure())
    normal = [(served[name] - before[name]) / weight for name, weight in WEIGHTS.items()]
    return {
        "least_seconds": seconds,
        "service_by_weight": [round(one) for one in normal],
        "spread": max(normal) / min(normal) - 1.0,
        "jain": sum(normal) ** 2 / (len(normal) * sum(one * one for one in normal)),
    }


def quiet(running: Service, requests: int, outstanding: int = 4 * ROWS) -> Measurements:
    """Measure the time to first token of a tenant that sends one short request after another, first alone and
    then during a flood of prompts that fill whole steps."""
    calm, wild = (Client(running, key_of(running, name)) for name in ("quiet", "flood"))
    alone: list[float] = []
    beside: list[float] = []
    steps_ms: list[float] = []

    async def ask(into: list[float]) -> None:
        for _ in range(requests):
            into.append(await calm.first_token_s(16, 2))
            await asyncio.sleep(random.uniform(0.0, 0.1))

    async def measure() -> None:
        await calm.first_token_s(16, 2)
        await ask(alone)
        flood = asyncio.create_task(
            _keep_asking(
                wild, lambda draw: (MAX_NUM_BATCHED_TOKENS * 2, 8), outstanding, lambda service: None
            )
        )
        await asyncio.sleep(3.0)
        watch = asyncio.create_task(_watch_steps(running, steps_ms))
        await ask(beside)
        watch.cancel()
        assert not flood.done(), flood.exception()
        flood.cancel()
        await asyncio.gather(flood, watch, return_exceptions=True)

    asyncio.run(measure())
    # Some steps are short, because they serve the quiet tenant. If a step has decodes, its budget is half of
    # a full step's budget.
    mixed_step_ms = percentile(steps_ms, 0.9)
    full_step_ms = 2 * mixed_step_ms
    p50 = [1e3 * statistics.median(times) for times in (alone, beside)]
    return {
        "requests": requests,
        "flood_outstanding": outstanding,
        "ttft_p50_alone_ms": p50[0],
        "ttft_p50_beside_ms": p50[1],
        "ttft_max_beside_ms": 1e3 * max(beside),
        "mixed_step_ms": mixed_step_ms,
        "full_step_ms": full_step_ms,
        "delay_in_full_steps": (p50[1] - p50[0]) / full_step_ms,
    }


async def _watch_steps(running: Service, steps_ms: list[float]) -> None:
    """Repeatedly record the duration of the latest step with prompts, until this task is cancelled."""
    transport = httpx.AsyncHTTPTransport(uds=str(running.run_dir / "admin.sock"), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance", timeout=600) as http:
        while True:
            status = (await http.get("/status")).json()
            if step_ms := status["models"][0]["replicas"][0]["mixed_step_ms"]:
                steps_ms.append(step_ms)
            await asyncio.sleep(0.1)


def main() -> int:
    """Run both measurements, write their results, and fail if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with service(*FLAGS) as running:
        measurements = {"shares": shares(running, seconds=options.seconds, warm_up_service=20_000.0)}
        print(json.dumps(measurements["shares"]), flush=True)
    with service(*FLAGS) as running:
        measurements["quiet"] = quiet(running, options.requests)
        print(json.dumps(measurements["quiet"]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(measurements, indent=1) + "\n")
    kept = (
        measurements["shares"]["spread"] <= 0.05
        and measurements["shares"]["jain"] >= 0.99
        and measurements["quiet"]["delay_in_full_steps"] <= 1.0
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
