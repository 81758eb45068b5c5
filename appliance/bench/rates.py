"""Open loop: when requests arrive, and the search for the highest rate that a server sustains.

Arrivals are a Poisson process, as of many independent users: they come whether or not the server keeps up,
and a request's times count from when it was due.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from appliance.bench.results import Slo, Summary

SATURATED = 0.8
"""CPU of the busiest worker, of a core, above which the client may be what is measured."""
_PRECISION = 1.05
"""The search ends when the rate that fails is at most this times the one that holds."""
_LEAST_RATE = 0.01
_LATE_SHARE = 0.01


def poisson_arrivals(rate: float, duration_s: float, seed: str) -> list[float]:
    """Seconds after the start, `rate` a second on average, up to `duration_s`; at least one."""
    draw = random.Random(f"{seed}/arrivals")
    arrivals: list[float] = []
    at = draw.expovariate(rate)
    while at < duration_s:
        arrivals.append(at)
        at += draw.expovariate(rate)
    return arrivals or [0.0]


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, tried."""

    rate: float
    summary: Summary
    stopped: bool
    """Given up before its end: it could no longer succeed."""
    verdict: str
    """Why it failed, in words; empty where the rate is sustained."""

    @property
    def is_sustained(self) -> bool:
        return not self.verdict


@dataclass(frozen=True, slots=True)
class Found:
    """The search's end."""

    best: Trial | None
    """The highest rate that was sustained; None where none was."""
    trials: list[Trial]
    note: str
    """What kept the search from an answer, in words; mostly empty."""


def judge(summary: Summary, slo: Slo, stopped: bool) -> str:
    """Why a trial does not sustain its rate, in words; empty where it does.

    A request that failed was infinitely late: more than 1% of them, and no p99 is kept.
    """
    failed = summary.requests - summary.succeeded
    if failed > _LATE_SHARE * summary.requests:
        return f"{failed} of {summary.requests} failed ({next(iter(summary.failures))})"
    if summary.ttft is not None and slo.ttft_p99_ms is not None and summary.ttft.p99 > slo.ttft_p99_ms:
        return f"TTFT p99 {summary.ttft.p99:,.0f} ms"
    if summary.itl is not None and slo.itl_p99_ms is not None and summary.itl.p99 > slo.itl_p99_ms:
        return f"ITL p99 {summary.itl.p99:,.1f} ms"
    if stopped:
        return "given up: first tokens are late"
    if summary.ttft is None:
        return "no request got a token"
    return ""


def is_lost(requests: int, missed: int) -> bool:
    """Whether a running trial of so many requests, of which `missed` missed their TTFT, cannot succeed."""
    return missed > _LATE_SHARE * requests


async def find_rate(attempt: Callable[[float], Awaitable[Trial]], first_rate: float) -> Found:
    """The highest sustained rate: doubled (or halved) from `first_rate` until it lies between two, then
    bisected.

    The search stops early where the client itself is saturated: a higher rate would measure it alone.
    """
    trials: list[Trial] = []

    async def tried(rate: float) -> Trial:
        trials.append(await attempt(rate))
        return trials[-1]

    trial = await tried(first_rate)
    failing: float | None = None
    while not trial.is_sustained:
        failing = trial.rate
        if failing / 2 < _LEAST_RATE:
            return Found(None, trials, f"no rate down to {failing:g} requests/s is sustained")
        trial = await tried(failing / 2)
    best = trial
    while failing is None:
        if best.summary.busiest_worker > SATURATED:
            return Found(best, trials, "the client is saturated: give it more --workers, or cores")
        trial = await tried(2 * best.rate)
        if trial.is_sustained:
            best = trial
        else:
            failing = trial.rate
    while failing / best.rate > _PRECISION:
        trial = await tried((failing + best.rate) / 2)
        if trial.is_sustained:
            best = trial
        else:
            failing = trial.rate
    return Found(best, trials, "")
