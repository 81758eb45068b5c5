"""A benchmark run's statistics in one structure, which can be printed, evaluated and written as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from appliance.bench.load import STOPPED, FailureKind, Load, Record
from appliance.bench.processes import RawRun
from appliance.bench.workloads import WorkloadMetric


class Percentiles(msgspec.Struct):
    """Percentiles (nearest rank) in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True):
    """The limits that a request must meet to count towards goodput. None means no limit."""

    ttft_p99_ms: float | None = None
    itl_p99_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_p99_ms is not None or self.itl_p99_ms is not None

    def allows(self, record: Record) -> bool:
        """Return whether a request succeeded within the limits. The ITL limit is compared with the mean time
        between the response's chunks, because a single request has too few chunks for a 99th percentile."""
        if record.failure or record.first_at is None:
            return False
        if self.ttft_p99_ms is not None and 1000 * (record.first_at - record.began_at) > self.ttft_p99_ms:
            return False
        gaps = record.gaps_s
        return self.itl_p99_ms is None or not gaps or 1000 * sum(gaps) / len(gaps) <= self.itl_p99_ms


class Failures(msgspec.Struct):
    """A group of requests with the same kind of failure."""

    count: int
    example: str


class RequestTimes(msgspec.Struct):
    """One request's times. `at_s` is measured from the start of the run, all others from when the request
    should have been sent."""

    at_s: float
    ttft_ms: float | None
    e2e_ms: float
    late_ms: float
    itl_max_ms: float | None
    tokens: int
    failure: FailureKind
    message: str


class Backlog(msgspec.Struct):
    """The number of requests open for longer than a typical response takes, counted twice during an open-loop
    run."""

    response_s: float
    """Duration of a typical response, in seconds; infinite if responses take so long that the run cannot show
    a backlog."""
    before: int
    """Requests in the backlog halfway through the arrivals."""
    after: int
    """Requests in the backlog at the end of the arrivals."""
    seconds: float
    """Time between the two counts of the backlog, in seconds."""
    allowed: float
    """Largest backlog, in requests, that can be explained by chance."""

    @property
    def is_growing(self) -> bool:
        return self.after > self.allowed

    def __str__(self) -> str:
        if self.after <= self.before:
            return f"backlog of {self.after:,}"
        return f"backlog grew: {self.before:,} → {self.after:,} in {self.seconds:.2g} s"


class Run(msgspec.Struct, kw_only=True):
    """One run's statistics. Percentiles are None if nothing was measured. TTFT, ITL, TPOT and E2E
    percentiles, and token and chunk counts, include only requests that succeeded."""

    requests: int
    seconds: float
    """Time from the start of the run until the last request finished; in an open-loop run, at least the time
    over which requests arrive."""
    rate: float | None
    """Arrivals per second, or None for a closed-loop run."""
    succeeded: int
    unfinished: int
    """Requests still open when the run was stopped."""
    failures: dict[FailureKind, Failures]
    output_tokens: int
    prompt_tokens: int
    tokens_counted_by_client: bool
    """Whether some responses had no `usage` field; each of their chunks counts as one token."""
    chunks: int
    short_answers: int
    """Requests that succeeded with fewer tokens than requested."""
    output_tok_s: float
    prompt_tok_s: float
    requests_s: float
    goodput: float | None
    """Number of requests per second that met the limits, or None without limits."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    """Times between consecutive chunks of each response."""
    tpot_ms: Percentiles | None
    """Each request's mean time per output token after the first chunk."""
    e2e_ms: Percentiles | None
    late_p99_ms: float
    """99th percentile of how late requests were sent, in milliseconds."""
    workers: int
    busiest_worker_cpu: float
    backlog: Backlog | None = None
    """The backlog, or None for a closed-loop run."""
    reasons: list[str] = []
    """Reasons why the server did not sustain a trial's rate; empty if it did."""
    per_request: list[RequestTimes] = []

    def metric(self, name: WorkloadMetric) -> float | None:
        """Return the metric with this name, or None if nothing was measured."""
        if name in ("p99_ms", "ms"):
            if self.e2e_ms is None:
                return None
            return self.e2e_ms.p99 if name == "p99_ms" else self.e2e_ms.p50
        return (self.output_tok_s if name == "output_tok_s" else self.prompt_tok_s) or None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a nearest-rank percentile of a non-empty sorted sequence."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of values given in seconds, or None if there are no values."""
    if not values:
        return None
    ordered = sorted(1000 * value for value in values)
    return Percentiles(*(percentile(ordered, percent) for percent in (50, 90, 99, 100)))


def summarize(raw: RawRun, load: Load, slo: Slo, duration_s: float = 0.0) -> Run:
    """Return a run's statistics. In an open-loop run, `duration_s` is the time over which requests
    arrived."""
    records = sorted(raw.records, key=lambda record: record.began_at)
    good = [record for record in records if not record.failure]
    failures: dict[FailureKind, Failures] = {}
    for record in records:
        if record.failure and record.failure != STOPPED:
            failures.setdefault(record.failure, Failures(0, record.message)).count += 1
    seconds = max([raw.started_at + duration_s, *(record.ended_at for record in records)]) - raw.started_at
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(
        load.prompt_tokens if record.prompt_tokens is None else record.prompt_tokens for record in good
    )
    late = sorted(1000 * record.late_s for record in records)

    def per_second(count: float) -> float:
        return count / seconds if seconds else 0.0

    return Run(
        requests=len(records),
        seconds=seconds,
        rate=load.requests / duration_s if duration_s else None,
        succeeded=len(good),
        unfinished=sum(record.failure == STOPPED for record in records),
        failures=failures,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        tokens_counted_by_client=any(record.tokens is None for record in good),
        chunks=sum(record.chunks for record in good),
        short_answers=sum(record.output_tokens < load.output_tokens for record in good),
        output_tok_s=per_second(output_tokens),
        prompt_tok_s=per_second(prompt_tokens),
        requests_s=per_second(len(good)),
        goodput=per_second(sum(map(slo.allows, records))) if slo.is_set else None,
        ttft_ms=percentiles([one.first_at - one.began_at for one in good if one.first_at is not None]),
        itl_ms=percentiles([gap for one in good for gap in one.gaps_s]),
        tpot_ms=percentiles(
            [
                sum(one.gaps_s) / (one.output_tokens - 1)
                for one in good
                if one.gaps_s and one.output_tokens > 1
            ]
        ),
        e2e_ms=percentiles([one.ended_at - one.began_at for one in good]),
        late_p99_ms=percentile(late, 99) if late else 0.0,
        workers=raw.workers,
        busiest_worker_cpu=raw.busiest_worker_cpu,
        per_request=[_times(record, raw.started_at) for record in records],
    )


def _times(record: Record, start: float) -> RequestTimes:
    first_at = record.first_at
    return RequestTimes(
        at_s=round(record.began_at - start, 6),
        ttft_ms=None if first_at is None else round(1000 * (first_at - record.began_at), 3),
        e2e_ms=round(1000 * (record.ended_at - record.began_at), 3),
        late_ms=round(1000 * record.late_s, 3),
        itl_max_ms=round(1000 * max(record.gaps_s), 3) if record.gaps_s else None,
        tokens=record.output_tokens,
        failure=record.failure,
        message=record.message,
    )
