"""Open loop: when requests arrive, and the search for the highest rate that a server sustains.

Arrivals are a Poisson process, as of many independent users: they come whether or not the server keeps up,
and a request's times count from when it was due.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from appliance.bench.backlog import RESPONSE_SHARE, Backlog
from appliance.bench.messages import STOPPED, Record
from appliance.bench.results import Slo, Summary, percentile

SATURATED = 0.8
"""CPU of the busiest worker, of a core, above which the client may be what is measured."""
LATE_MS = 20.0
"""Requests that leave so much later than they were due say the same."""
MOST_REQUESTS = 2_000_000
"""In one run: each is planned, and kept with its times, in memory."""
TRIAL_SHARE = 1 + RESPONSE_SHARE
"""A trial ends at latest after so many of its durations: by then each response was late, or is here."""
_PRECISION = 0.05
"""The search ends when the rate that fails is at most this share above the one that holds."""
_LATE_SHARE = 0.01
SLOW = "E2E p99 >"
_CLIENT = "the client may be what was measured, busy or late as it was: give it more --workers, or cores"


class UnsettledError(Exception):
    """The server still works on what an earlier trial left; the message says so, and what to do."""


def requests_at(rate: float, duration_s: float) -> int:
    """Requests that arrive in so long a time, on average; at least one."""
    return max(1, round(rate * duration_s))


def poisson_arrivals(requests: int, duration_s: float, seed: str) -> list[float]:
    """Seconds after the start of so many arrivals of a Poisson process within `duration_s`, sorted.

    Given their number, such arrivals are independent and uniform. Drawing the number as well would offer
    another rate than the one asked for: by 10 % (one standard deviation) for 100 requests.
    """
    draw = random.Random(f"{seed}/arrivals")
    return sorted(draw.uniform(0.0, duration_s) for _ in range(requests))


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, tried."""

    requests: int
    """That were to arrive."""
    duration_s: float
    summary: Summary
    backlog: Backlog
    given_up_s: float | None
    """When it was ended, after its start: it could no longer succeed, or took too long. None where all
    requests came to their end."""
    reasons: Sequence[str] = ()
    """Why the rate is not sustained, in words; empty where it is."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.duration_s

    @property
    def is_sustained(self) -> bool:
        return not self.reasons

    @property
    def resolution(self) -> float:
        """How far beyond the server's capacity, as a share of it, a rate may be and still pass: by the
        randomness of arrivals (0.2 of 100 requests, 0.05 of 1,600), and of response times against the
        duration."""
        spread = self.summary.e2e
        uneven_s = 0.0 if spread is None else (spread.p90 - spread.p50) / 1000
        return 2 / math.sqrt(self.requests) + uneven_s / self.duration_s

    @property
    def is_of_client(self) -> bool:
        """Whether the client may be what was measured."""
        return self.summary.busiest_worker > SATURATED or self.summary.late_p99_ms > LATE_MS


@dataclass(frozen=True, slots=True)
class Found:
    """The search's end."""

    best: Trial | None
    """The highest rate that was sustained; None where none was."""
    trials: list[Trial]
    note: str
    """What kept the search from an answer, in words; mostly empty."""


def is_late(record: Record, slo: Slo) -> bool:
    """Whether a request waited longer for its first token than the SLO allows."""
    if slo.ttft_p99_ms is None:
        return False
    until = record.ended_at if record.first_at is None else record.first_at
    return 1000 * (until - record.began_at) > slo.ttft_p99_ms


def is_slow(record: Record, duration_s: float) -> bool:
    """Whether a response took longer than a trial of this duration can judge."""
    return record.ended_at - record.began_at > RESPONSE_SHARE * duration_s


def misses(record: Record, slo: Slo, duration_s: float) -> bool:
    """Whether a request missed a limit of a trial: it failed, or its token or its end came too late. One that
    was open when the trial was given up counts with the time it had waited."""
    failed = bool(record.failure) and record.failure != STOPPED
    return failed or is_late(record, slo) or is_slow(record, duration_s)


def is_lost(requests: int, missed: int) -> bool:
    """Whether a trial of so many requests, of which `missed` missed a limit, holds none for 99 % of them."""
    return missed > _LATE_SHARE * requests


def judge(trial: Trial, records: Sequence[Record], slo: Slo) -> list[str]:
    """Why a trial does not sustain its rate, in words; empty where it does.

    A request that failed was infinitely late. One that was still open when the trial was given up counts with
    the time it had waited.
    """
    reasons = []
    requests, summary = trial.requests, trial.summary
    failed = [record for record in records if record.failure and record.failure != STOPPED]
    others = [record for record in records if not record.failure or record.failure == STOPPED]
    late = len(failed) + sum(is_late(record, slo) for record in others)
    missed = sum(misses(record, slo, trial.duration_s) for record in records)
    if is_lost(requests, len(failed)):
        reasons.append(f"{len(failed):,} of {requests:,} failed ({failed[0].failure})")
    if trial.backlog.is_growing:
        reasons.append(str(trial.backlog))
    if summary.succeeded and summary.ttft is None:
        reasons.append("no answer had a token")
    elif slo.ttft_p99_ms is not None and is_lost(requests, late):
        limit = f"> {slo.ttft_p99_ms:,g} ms"
        waited = sorted([*summary.ttft_ms, *([math.inf] * len(failed))])
        p99 = percentile(waited, 99) if waited and trial.given_up_s is None else math.inf
        known = f"TTFT p99 {p99:,.0f} {limit}"
        reasons.append(known if p99 < math.inf else f"TTFT {limit} of {late:,} in {requests:,}")
    if slo.itl_p99_ms is not None and summary.itl is not None and summary.itl.p99 > slo.itl_p99_ms:
        reasons.append(f"ITL p99 {summary.itl.p99:,.1f} > {slo.itl_p99_ms:,g} ms")
    if not reasons and is_lost(requests, missed):
        reasons.append(f"{SLOW} {RESPONSE_SHARE * trial.duration_s:.2g} s, half a trial")
    return reasons


async def find_rate(attempt: Callable[[int], Awaitable[Trial]], first: int) -> Found:
    """The highest sustained rate, in requests a trial: doubled (or halved) from `first` until it lies between
    two, then bisected. A trial that failed, though it came to its end, is repeated once: one moment in which
    the machine did something else is not to decide. `attempt` raises UnsettledError where no further trial
    makes sense.

    The search stops early where the client itself is saturated: a higher rate would measure it alone.
    """
    trials: list[Trial] = []
    best: Trial | None = None
    failing: Trial | None = None
    requests = first
    while True:
        try:
            trials.append(await attempt(requests))
            if not trials[-1].is_sustained and trials[-1].given_up_s is None:
                trials.append(await attempt(requests))
        except UnsettledError as error:
            return Found(best, trials, str(error))
        trial = trials[-1]
        if trial.is_sustained:
            best = trial
        else:
            failing = trial
        if best is None:
            if requests == 1:
                return Found(None, trials, f"no rate down to {trial.rate:g} requests/s is sustained")
            requests //= 2
        elif failing is None:
            if best.is_of_client:
                return Found(best, trials, _CLIENT)
            if 2 * requests > MOST_REQUESTS:
                return Found(best, trials, f"a trial has at most {MOST_REQUESTS:,} requests")
            requests *= 2
        elif failing.requests - best.requests <= max(1.0, _PRECISION * best.requests):
            return Found(best, trials, _CLIENT if failing.is_of_client else "")
        else:
            requests = (best.requests + failing.requests) // 2
