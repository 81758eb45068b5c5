"""Clients of a simulated server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tests.core.simulated_server import Asked, Shape, SimulatedServer


def poisson(
    server: SimulatedServer,
    tenant: str,
    per_s: float,
    shape: Callable[[random.Random], Shape],
    *,
    until: float = float("inf"),
    deadline_s: Callable[[random.Random], float] | None = None,
) -> None:
    """Send a tenant's requests at random times, on average `per_s` requests per second."""
    draw = random.Random(f"{server.draw.random()} {tenant}")

    def come() -> None:
        if server.now < until:
            deadline = None if deadline_s is None else deadline_s(draw)
            server.ask(tenant, shape(draw), deadline_s=deadline)
            server.after(draw.expovariate(per_s), come)

    server.after(draw.expovariate(per_s), come)


def backlogged(
    server: SimulatedServer,
    tenant: str,
    outstanding: int,
    shape: Callable[[random.Random], Shape],
) -> None:
    """Keep `outstanding` requests from a tenant in flight."""
    draw = random.Random(f"{server.draw.random()} {tenant}")

    def again(asked: Asked | None = None) -> None:
        def ask() -> None:
            server.ask(tenant, shape(draw), done=again)

        # The client of a refused request retries after the time given in the refusal.
        wait_s = asked.refused.retry_after_s if asked is not None and asked.refused is not None else None
        server.after(wait_s or 0.0, ask)

    for _ in range(outstanding):
        again()


def fixed(prompt: int, output: int) -> Callable[[random.Random], Shape]:
    """Return a function that always returns this request size."""
    return lambda draw: Shape(prompt, output, output)


def uniform(
    prompt: tuple[int, int], output: tuple[int, int], max_tokens: int | None = None
) -> Callable[[random.Random], Shape]:
    """Return a function that draws request sizes within these bounds. `max_tokens` is the limit that the
    client sets for an answer; if `max_tokens` is None, the limit equals the length of the answer."""

    def shape(draw: random.Random) -> Shape:
        made = draw.randint(*output)
        return Shape(draw.randint(*prompt), made, max_tokens or made)

    return shape


def percentile(values: Iterable[float], part: float) -> float:
    """Return a percentile of the values (nearest rank)."""
    known = sorted(values)
    return known[min(len(known) - 1, int(part * len(known)))]
