"""Open-loop runs, in which requests arrive at a given rate. Decides whether a server sustains a rate and
searches for the highest sustained rate.

Arrivals form a Poisson process, like requests from many independent users. Arrivals do not depend on whether
the server keeps up, and all times of a request are measured from the time at which it should have been sent.
A rate is sustainable if response times do not keep growing (Karimov et al., "Benchmarking Distributed Stream
Data Processing Systems", ICDE 2018). A short trial's percentiles are not sufficient, because they can be low
even while the backlog grows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import msgspec

from appliance.bench.load import STOPPED
from appliance.bench.results import Backlog, RequestTimes, Run, Slo, percentile

SATURATED = 0.8
"""If the busiest client process uses more than this share of a CPU, the client may be the bottleneck."""
LATE_MS = 20.0
"""If requests are sent more than this many milliseconds late, the client may be the bottleneck."""
MAX_REQUESTS = 2_000_000
"""Maximum number of requests per run, because all of their records are kept in memory."""
RESPONSE_SHARE = 0.5
"""Maximum response time, as a fraction of a trial's duration. If responses take longer, a trial ends before
it reaches a steady state."""
TRIAL_SHARE = 1 + RESPONSE_SHARE
"""A trial is stopped after this multiple of its duration. Responses that are still open at that time have
exceeded the maximum response time."""
_FIRST_SHARE = 0.25
_MIN_ALLOWED = 3
"""A backlog of at most this many requests does not count as growth, even in a short trial."""
_MISSED_SHARE = 0.01
_PRECISION = 0.05
SLOW = "E2E p99 >"


class Search(msgspec.Struct, kw_only=True):
    """The result of a search for the highest sustained rate."""

    best: Run | None
    """The trial with the highest sustained rate."""
    trials: list[Run]
    note: str
    """Why the search ended before it found the exact rate. Empty if it found the rate."""


class UnsettledError(Exception):
    """Raised if the server is still processing an earlier trial's requests, which would affect the next
    trial."""


def requests_at(rate: float, duration_s: float) -> int:
    """Return the mean number of requests that arrive within `duration_s` seconds, but at least one."""
    return max(1, round(rate * duration_s))


def poisson_arrivals(requests: int, duration_s: float, seed: str) -> tuple[float, ...]:
    """Return the sorted times of `requests` Poisson arrivals within `duration_s` seconds. For a given number
    of Poisson arrivals, the arrival times are independent and uniformly distributed. The number is fixed: if
    it were random, the rate would vary by 10% (one standard deviation) with 100 requests.
    """
    draw = random.Random(f"{seed}/arrivals")
    return tuple(sorted(draw.uniform(0.0, duration_s) for _ in range(requests)))


def backlog(requests: Sequence[RequestTimes], duration_s: float) -> Backlog:
    """Return the backlog of a run in which requests arrived over `duration_s` seconds.

    A server that keeps up finishes each request about one response time after its arrival. Requests that stay
    open longer form the backlog. If a server can handle only a fraction 1 − d of the load, the backlog grows
    to about a fraction d of all requests.

    The standard deviation of a Poisson arrival count is the square root of its mean. A backlog of up to half
    a standard deviation is allowed; servers that run at up to 90% of their capacity rarely reach it.

    The response time is determined from the first quarter of the run, before a backlog can affect responses.
    The 90th percentile is used or, if that exceeds RESPONSE_SHARE of the duration, the time of the fastest
    response.
    """
    spans = [
        (one.at_s, math.inf if one.failure == STOPPED else one.at_s + one.e2e_ms / 1000) for one in requests
    ]
    first = sorted(end - begin for begin, end in spans if begin <= _FIRST_SHARE * duration_s)
    typical = [percentile(first, 90), first[0]] if first else [0.0]
    response = next((one for one in typical if one <= RESPONSE_SHARE * duration_s), math.inf)

    def behind(at: float) -> int:
        return sum(begin <= at - response and at < end for begin, end in spans)

    arrived = sum(begin <= duration_s - response for begin, _ in spans)
    return Backlog(
        response_s=response,
        before=behind(duration_s / 2),
        after=behind(duration_s),
        seconds=duration_s / 2,
        allowed=max(_MIN_ALLOWED, math.sqrt(arrived) / 2),
    )


def judge(run: Run, slo: Slo, duration_s: float) -> list[str]:
    """Return the reasons why the server did not sustain a trial's rate; empty if it did. Failed or stopped
    requests are treated as exceeding every limit."""
    allowed = _MISSED_SHARE * run.requests
    failed = [one for one in run.per_request if one.failure and one.failure != STOPPED]
    reasons = []
    if len(failed) > allowed:
        reasons.append(f"{len(failed):,} of {run.requests:,} failed ({failed[0].failure})")
    if run.backlog is not None and run.backlog.is_growing:
        reasons.append(str(run.backlog))
    if run.succeeded and run.ttft_ms is None:
        reasons.append("no answer contained a token")
    elif (limit := slo.ttft_p99_ms) is not None:
        # Count failed requests as infinitely late. A stopped request may have received its first token.
        waits = sorted(
            math.inf if one.ttft_ms is None or (one.failure and one.failure != STOPPED) else one.ttft_ms
            for one in run.per_request
        )
        late = sum(wait > limit for wait in waits)
        if late > allowed:
            p99 = percentile(waits, 99)
            known = f"{p99:,.0f} > {limit:,g} ms" if p99 < math.inf else f"> {limit:,g} ms"
            reasons.append(f"TTFT p99 {known}")
    if (limit := slo.itl_p99_ms) is not None and run.itl_ms is not None and run.itl_ms.p99 > limit:
        reasons.append(f"ITL p99 {run.itl_ms.p99:,.1f} > {limit:,g} ms")
    slow = sum(
        bool(one.failure) or one.e2e_ms > 1000 * RESPONSE_SHARE * duration_s for one in run.per_request
    )
    if not reasons and slow > allowed:
        reasons.append(f"{SLOW} {RESPONSE_SHARE * duration_s:.2g} s, half a trial")
    return reasons


def is_client_limited(run: Run) -> bool:
    """Return whether the client may have been a run's bottleneck."""
    return run.busiest_worker_cpu > SATURATED or run.late_p99_ms > LATE_MS


def resolution(run: Run, duration_s: float) -> float:
    """Return the fraction by which a rate may exceed the server's capacity and still count as sustained.

    The fraction is above 0 because response times vary and arrivals are random. Random arrivals contribute
    0.2 for 100 requests and 0.05 for 1,600 requests.
    """
    spread = run.e2e_ms
    uneven_s = 0.0 if spread is None else (spread.p90 - spread.p50) / 1000
    return 2 / math.sqrt(run.requests) + uneven_s / duration_s


def find_rate(attempt: Callable[[int], Run], first: int) -> Search:
    """Search for the highest sustained number of requests per trial. Starting at `first`, double (or halve)
    the number until both a sustained and an unsustained number are known, and then bisect the interval
    between them. A trial that fails without being stopped is repeated once, so that a brief disturbance on
    the machine does not decide the result. `attempt` runs a trial and raises UnsettledError if more trials
    would be useless.
    """
    trials: list[Run] = []
    best: Run | None = None
    failing: Run | None = None
    requests = first

    def found(note: str) -> Search:
        return Search(best=best, trials=trials, note=note)

    while True:
        try:
            trials.append(attempt(requests))
            if trials[-1].reasons and not trials[-1].unfinished:
                trials.append(attempt(requests))
        except UnsettledError as error:
            return found(str(error))
        trial = trials[-1]
        if trial.reasons:
            failing = trial
        else:
            best = trial
        limited = "the client may have been the bottleneck: use more --workers, or more cores"
        if best is None:
            if requests == 1:
                return found(f"the server did not sustain any tested rate, down to {trial.rate:g} requests/s")
            requests //= 2
        elif failing is None:
            if is_client_limited(best):
                return found(limited)
            if 2 * requests > MAX_REQUESTS:
                return found(f"the search stopped at the maximum of {MAX_REQUESTS:,} requests per trial")
            requests *= 2
        elif failing.requests - best.requests <= max(1.0, _PRECISION * best.requests):
            return found(limited if is_client_limited(failing) else "")
        else:
            requests = (best.requests + failing.requests) // 2
