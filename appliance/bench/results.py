"""From records to figures: percentiles, rates, goodput, distributions and series over time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.bench.messages import STOPPED, Record
from appliance.bench.workers import Raw


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles (nearest rank) in milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good. None: anything goes."""

    ttft_p99_ms: float | None = None
    itl_p99_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_p99_ms is not None or self.itl_p99_ms is not None

    def keeps(self, ttft_ms: float, gaps_ms: Sequence[float]) -> bool:
        """Whether a request with this TTFT, and these gaps (their mean counts, as a request has too few for a
        p99 of its own), is within."""
        if self.ttft_p99_ms is not None and ttft_ms > self.ttft_p99_ms:
            return False
        return self.itl_p99_ms is None or not gaps_ms or sum(gaps_ms) / len(gaps_ms) <= self.itl_p99_ms


@dataclass(slots=True)
class Failures:
    """Requests that failed in the same way."""

    count: int
    example: str


@dataclass(slots=True)
class Second:
    """What came in one second of a run; seconds count from its start."""

    output_tokens: float
    first_tokens: int
    ended: int
    running: int
    """Requests on their way at the second's end."""


@dataclass(slots=True)
class Summary:
    """One run in figures. Spreads are None where nothing was there to measure."""

    seconds: float
    """From the start until no more requests were to come and the last one ended, or the run was given up."""
    requests: int
    """That were sent."""
    succeeded: int
    unfinished: int
    """Requests that were open when the run was given up."""
    failures: dict[str, Failures]
    output_tokens: int
    prompt_tokens: int
    tokens_counted_by_us: bool
    """Some answers had no usage: their tokens are their chunks."""
    chunks: int
    short_answers: int
    """Requests that succeeded with fewer tokens than asked for."""
    ttft: Spread | None
    itl: Spread | None
    """Between chunks."""
    tpot: Spread | None
    """Time per output token after the first chunk, the mean of each request."""
    e2e: Spread | None
    good: int | None
    """Requests within the SLO; None without one."""
    late_p99_ms: float
    workers: int
    busiest_worker: float
    series: list[Second]
    ttft_ms: list[float] = field(repr=False, default_factory=list)
    """Of each request that succeeded, sorted."""
    itl_ms: list[float] = field(repr=False, default_factory=list)
    """All gaps, sorted."""

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def prompt_tok_s(self) -> float:
        return self.prompt_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_s(self) -> float:
        return self.succeeded / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Requests within the SLO per second."""
        return None if self.good is None or not self.seconds else self.good / self.seconds

    @property
    def tokens_per_chunk(self) -> float:
        return self.output_tokens / self.chunks if self.chunks else 0.0

    def figure(self, name: str) -> float | None:
        """A workload's figure by its name; None where nothing was measured."""
        if name == "output_tok_s":
            return self.output_tok_s or None
        if name == "prompt_tok_s":
            return self.prompt_tok_s or None
        if self.e2e is None:
            return None
        return {"p99_ms": self.e2e.p99, "ms": self.e2e.p50}[name]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted, non-empty numbers."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread(ordered: Sequence[float]) -> Spread | None:
    """The percentiles of sorted numbers; None without any."""
    if not ordered:
        return None
    return Spread(percentile(ordered, 50), percentile(ordered, 90), percentile(ordered, 99), ordered[-1])


def summarize(raw: Raw, output_tokens: int, prompt_tokens: int, slo: Slo, duration_s: float = 0.0) -> Summary:
    """The figures of a run whose requests asked for `output_tokens` after `prompt_tokens`; in open loop they
    arrived over `duration_s`."""
    records = raw.records
    good = [record for record in records if not record.failure]
    failures: dict[str, Failures] = {}
    for record in records:
        if record.failure and record.failure != STOPPED:
            failures.setdefault(record.failure, Failures(0, record.message)).count += 1
    ttft = {id(one): 1000 * (one.first_at - one.began_at) for one in good if one.first_at is not None}
    gaps = sorted(1000 * gap for one in good for gap in one.gaps_s)
    tokens = {id(one): tokens_of(one) for one in good}
    per_token = sorted(
        1000 * sum(one.gaps_s) / (tokens[id(one)] - 1) for one in good if one.gaps_s and tokens[id(one)] > 1
    )
    seconds = max((one.ended_at for one in records), default=raw.started_at) - raw.started_at
    if not raw.stopped:
        seconds = max(seconds, duration_s)
    late = sorted(1000 * one.late_s for one in records if one.failure != STOPPED)
    within = None
    if slo.is_set:
        within = sum(
            id(one) in ttft and slo.keeps(ttft[id(one)], [1000 * gap for gap in one.gaps_s]) for one in good
        )
    return Summary(
        seconds=seconds,
        requests=len(records),
        succeeded=len(good),
        unfinished=sum(record.failure == STOPPED for record in records),
        failures=failures,
        output_tokens=sum(tokens.values()),
        prompt_tokens=sum(prompt_tokens if one.prompt_tokens is None else one.prompt_tokens for one in good),
        tokens_counted_by_us=any(one.tokens is None for one in good),
        chunks=sum(_chunks(one) for one in good),
        short_answers=sum(count < output_tokens for count in tokens.values()),
        ttft=spread(sorted(ttft.values())),
        itl=spread(gaps),
        tpot=spread(per_token),
        e2e=spread(sorted(1000 * (one.ended_at - one.began_at) for one in good)),
        good=within,
        late_p99_ms=percentile(late, 99) if late else 0.0,
        workers=raw.workers,
        busiest_worker=raw.busiest_worker,
        series=_series(records, raw.started_at, seconds),
        ttft_ms=sorted(ttft.values()),
        itl_ms=gaps,
    )


def tokens_of(record: Record) -> int:
    """Output tokens: the server's count, else one a chunk."""
    return _chunks(record) if record.tokens is None else record.tokens


def _chunks(record: Record) -> int:
    return 0 if record.first_at is None else 1 + len(record.gaps_s)


def _series(records: Sequence[Record], start: float, seconds: float) -> list[Second]:
    """Per-second sums over the whole run. A chunk counts as the tokens that its request's chunks carry on
    average; requests that failed or were given up run until then, and count as nothing else."""
    length = 1 + int(seconds)
    tokens = [0.0] * length
    first, ended, begun, gone = (Counter[int]() for _ in range(4))
    for record in records:
        begun[int(record.began_at - start)] += 1
        gone[int(record.ended_at - start)] += 1
        if record.failure:
            continue
        ended[int(record.ended_at - start)] += 1
        if record.first_at is None:
            continue
        first[int(record.first_at - start)] += 1
        weight = tokens_of(record) / _chunks(record)
        at = record.first_at - start
        tokens[int(at)] += weight
        for gap in record.gaps_s:
            at += gap
            # A sum of gaps may round beyond the end.
            tokens[min(int(at), length - 1)] += weight
    running = 0
    series = []
    for second in range(length):
        running += begun[second] - gone[second]
        series.append(Second(tokens[second], first[second], ended[second], running))
    return series


@dataclass(frozen=True, slots=True)
class Bin:
    """Values in [low, high); the last bin holds its high too."""

    low: float
    high: float
    count: int


_NOTHING = 1e-9
"""Numbers, and differences, that are no more have no scale of their own."""


def distribution(ordered: Sequence[float], most_bins: int = 10) -> list[Bin]:
    """A histogram of sorted, non-negative numbers. Edges are round (1, 2 or 5 times a power of ten apart, or
    such numbers themselves where the values span more than a factor of 20), about `most_bins` bins. Of the
    latter the first holds the lowest hundredth, however low that goes."""
    if not ordered:
        return []
    low, high = ordered[0], ordered[-1]
    usual = max(percentile(ordered, 1), 1e-3 * high)
    if high > 20 * usual and usual > _NOTHING:
        edges = _round_numbers(usual, high, most_bins)
        if low < edges[0]:
            edges[0] = 0.0
    else:
        apart = high - low > _NOTHING
        step = _step((high - low) / (most_bins - 2) if apart else max(high, 1.0) / 10)
        first = math.floor(low / step)
        edges = [(first + index) * step for index in range(math.floor(high / step) - first + 2)]
    counts = [0] * (len(edges) - 1)
    index = 0
    for value in ordered:
        while index < len(counts) - 1 and value >= edges[index + 1]:
            index += 1
        counts[index] += 1
    return [Bin(*edge, count) for edge, count in zip(itertools.pairwise(edges), counts, strict=True)]


def _step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _round_numbers(low: float, high: float, most_bins: int) -> list[float]:
    """1, 2, 5, 10, … around [low, high]; with fewer a decade where those are too many."""
    for factors in ((1, 2, 5), (1, 3), (1,)):
        edges = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
        ]
        inner = [edge for edge in edges if low < edge <= high]
        edges = [
            max((edge for edge in edges if edge <= low), default=low),
            *inner,
            min(edge for edge in [*edges, 10 * edges[-1]] if edge > high),
        ]
        if len(edges) - 1 <= most_bins:
            break
    return edges
