"""Whether a server keeps up with requests that arrive at a rate, or only collects them.

A rate is sustainable where response times do not go on growing (Karimov et al., "Benchmarking Distributed
Stream Data Processing Systems", ICDE 2018): percentiles of a short trial can be fine while every second
leaves more undone than the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.bench.messages import STOPPED, Record
from appliance.bench.results import percentile

RESPONSE_SHARE = 0.5
"""Of a trial's duration: what takes longer than that does not reach its steady state within the trial."""
_FIRST = 0.25
_LEAST_ALLOWED = 3
"""Fewer requests than so many say nothing, however short the trial."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that had been open for longer than a response takes, at two moments of a trial."""

    response_s: float
    """What a response takes. Infinite where all take longer than a trial can judge: no backlog shows."""
    before: int
    after: int
    seconds: float
    """From one moment to the other: the second half of the time in which requests arrived."""
    allowed: float
    """So many may be left by chance."""

    @property
    def is_growing(self) -> bool:
        return self.after > self.allowed

    def __str__(self) -> str:
        if self.after <= self.before:
            return f"backlog of {self.after:,}"
        return f"backlog grew: {self.before:,} → {self.after:,} in {self.seconds:.2g} s"


def backlog(records: Sequence[Record], started_at: float, duration_s: float) -> Backlog:
    """The backlog of a trial whose requests arrived over `duration_s`, or until it was given up.

    A server that keeps up ends each request about one response time after it came, so what is open longer at
    the end is behind: of a server that can do a share 1 − d of what arrives, about d of all requests. Chance
    alone leaves some: the number of Poisson arrivals in a span varies by the root of their mean. Half of that
    is allowed, which servers loaded up to nine tenths hardly reach, whatever their queue's discipline.

    What a response takes is measured before a backlog can matter much: nine of ten of the requests of the
    trial's first quarter took less. Where that is beyond RESPONSE_SHARE, the fastest of them says it.
    """
    given_up = [record.ended_at for record in records if record.failure == STOPPED]
    until = min([duration_s, *(at - started_at for at in given_up)])
    spans = [
        (
            record.began_at - started_at,
            math.inf if record.failure == STOPPED else record.ended_at - started_at,
        )
        for record in records
    ]
    first = sorted(ended - began for began, ended in spans if began <= _FIRST * duration_s)
    typical = [percentile(first, 90), first[0]] if first else [0.0]
    response = next((one for one in typical if one <= RESPONSE_SHARE * duration_s), math.inf)

    def behind(at: float) -> int:
        return sum(began <= at - response and at < ended for began, ended in spans)

    came = sum(began <= until - response for began, _ in spans)
    return Backlog(
        response_s=response,
        before=behind(until / 2),
        after=behind(until),
        seconds=until / 2,
        allowed=max(_LEAST_ALLOWED, math.sqrt(came) / 2),
    )
