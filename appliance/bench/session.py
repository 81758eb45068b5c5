"""A benchmark from end to end: workloads, open-loop runs and the search, against one server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from appliance.bench.backlog import RESPONSE_SHARE, Backlog, backlog
from appliance.bench.messages import Record
from appliance.bench.rates import (
    LATE_MS,
    SATURATED,
    TRIAL_SHARE,
    Found,
    Trial,
    UnsettledError,
    find_rate,
    is_lost,
    judge,
    misses,
    poisson_arrivals,
    requests_at,
)
from appliance.bench.results import Slo, Summary, summarize
from appliance.bench.server import Server
from appliance.bench.workers import Load, Standing, Workers, default_workers
from appliance.bench.workloads import Shape, Workload

_MOST_WARM_UP = 8
_SETTLE_S = 60.0
"""For what a trial left, or a trial's duration where that is longer."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a run is about to do, for whoever shows its progress."""

    title: str
    requests: int
    tokens: int
    """That all of them are to produce."""
    seconds: float | None = None
    """How long requests arrive, in open loop."""


Show = Callable[[Aim, Standing | None], None]
"""Told of every run's progress; None at its end."""


@dataclass(slots=True)
class Measured:
    """One run."""

    summary: Summary
    records: list[Record]
    started_at: float
    stopped: bool
    """It was given up before its end."""
    backlog: Backlog | None = None
    """Of open loop."""


@dataclass(slots=True)
class Result:
    """A workload, or a rate, with all its runs."""

    name: str
    description: str
    shape: Shape
    figure: str
    unit: str
    requests: int
    """Of each run."""
    concurrency: int | None = None
    """At once, in closed loop."""
    duration_s: float | None = None
    """In which they arrive, in open loop."""
    less_is_better: bool = False
    """Of the figure."""
    runs: list[Measured] = field(default_factory=list)

    @property
    def typical(self) -> Measured:
        """The run whose figure is the median; of an even number, the worse of the two in the middle."""
        known = [run for run in self.runs if run.summary.figure(self.figure) is not None]
        if not known:
            return self.runs[0]
        ranked = sorted(known, key=self._figure, reverse=self.less_is_better)
        return ranked[(len(ranked) - 1) // 2]

    def _figure(self, run: Measured) -> float:
        return run.summary.figure(self.figure) or 0.0


class Session:
    """Runs against one server. `show` is told of progress."""

    def __init__(
        self,
        server: Server,
        pool: Workers,
        show: Show,
        *,
        seed: str,
        workers: int | None = None,
        timeout_s: float = 600.0,
        slo: Slo | None = None,
    ) -> None:
        self._server = server
        self._pool = pool
        self._show = show
        self._seed = seed
        self._workers = workers
        self._timeout_s = timeout_s
        self._slo = slo or Slo()
        self._runs = 0

    async def closed(self, name: str, workload: Workload, runs: int, warm_up: bool = True) -> Result:
        """Run a workload `runs` times, after a warm-up that does not count. Raises BenchError."""
        shape = workload.shape
        asked = f"{workload.requests:,} requests, {workload.concurrency:,} at once"
        if workload.requests == 1:
            asked = "1 request"
        result = Result(
            name,
            f"{asked}, {_of(shape)}",
            shape,
            workload.figure,
            workload.unit,
            workload.requests,
            concurrency=workload.concurrency,
            less_is_better=workload.less_is_better,
        )
        if warm_up:
            await self._warm_up(shape, workload.concurrency)
        for run in range(1, runs + 1):
            title = f"{name} {run}/{runs}" if runs > 1 else name
            result.runs.append(
                await self._run(title, shape, workload.requests, concurrency=workload.concurrency)
            )
        return result

    async def open(
        self, name: str, shape: Shape, rate: float, duration_s: float, runs: int, warm_up: bool = True
    ) -> Result:
        """Have requests arrive at `rate` a second for `duration_s`, and wait for the last; `runs` times,
        after a warm-up that does not count. Raises BenchError."""
        description = f"{rate:g} requests/s (Poisson) for {duration_s:g} s, {_of(shape)}"
        requests = requests_at(rate, duration_s)
        result = Result(name, description, shape, "output_tok_s", "tok/s", requests, duration_s=duration_s)
        if warm_up:
            await self._warm_up(shape, requests)
        for run in range(1, runs + 1):
            title = f"{name} {run}/{runs}" if runs > 1 else name
            arrivals = poisson_arrivals(requests, duration_s, self._next_seed())
            measured = await self._run(title, shape, requests, arrivals=arrivals, duration_s=duration_s)
            measured.backlog = backlog(measured.records, measured.started_at, duration_s)
            result.runs.append(measured)
        return result

    async def search(
        self, shape: Shape, first_rate: float, duration_s: float, warm_up: bool = True
    ) -> tuple[Found, Result | None]:
        """Find the highest rate that keeps the SLO, and that the server keeps up with, in trials of
        `duration_s` after a warm-up; with the run that held it. Raises BenchError."""
        runs: dict[int, Measured] = {}
        is_settled = True
        if warm_up:
            await self._warm_up(shape, _MOST_WARM_UP)

        async def attempt(requests: int) -> Trial:
            nonlocal is_settled
            if not is_settled:
                await self._settle(shape, duration_s)
            trial, measured = await self._try(shape, requests, duration_s)
            runs[requests] = measured
            is_settled = trial.is_sustained
            return trial

        found = await find_rate(attempt, requests_at(first_rate, duration_s))
        if found.best is None:
            return found, None
        description = f"{found.best.rate:.4g} requests/s (Poisson) for {duration_s:g} s, {_of(shape)}"
        best = found.best.requests
        result = Result("find-rate", description, shape, "output_tok_s", "tok/s", best, duration_s=duration_s)
        result.runs.append(runs[best])
        return found, result

    async def _try(self, shape: Shape, requests: int, duration_s: float) -> tuple[Trial, Measured]:
        """One trial, given up when it can no longer succeed, and at latest after TRIAL_SHARE durations."""
        arrivals = poisson_arrivals(requests, duration_s, self._next_seed())
        missed = 0
        seen = 0

        def goes_on(standing: Standing) -> bool:
            nonlocal missed, seen
            missed += sum(misses(record, self._slo, duration_s) for record in standing.records[seen:])
            seen = len(standing.records)
            is_over = time.monotonic() > standing.started_at + TRIAL_SHARE * duration_s
            return not is_over and not is_lost(requests, missed + standing.overdue)

        measured = await self._run(
            f"{requests / duration_s:.4g} requests/s",
            shape,
            requests,
            arrivals=arrivals,
            duration_s=duration_s,
            e2e_limit_s=RESPONSE_SHARE * duration_s,
            goes_on=goes_on,
        )
        summary = measured.summary
        given_up = measured.stopped and (summary.unfinished > 0 or summary.requests < requests)
        trial = Trial(
            requests,
            duration_s,
            summary,
            backlog(measured.records, measured.started_at, duration_s),
            summary.seconds if given_up else None,
        )
        return replace(trial, reasons=judge(trial, measured.records, self._slo)), measured

    async def _settle(self, shape: Shape, duration_s: float) -> None:
        """Wait until one request is answered: what the last trial left is not to count in the next one.
        Raises UnsettledError where that takes too long."""
        limit_s = max(_SETTLE_S, duration_s)
        settling = await self._run("settling", shape, 1, concurrency=1, timeout_s=limit_s)
        if "timeout" in settling.summary.failures:
            raise UnsettledError(
                f"the search ended early: {limit_s:g} s after a trial was given up, the server still did not "
                f"answer. Does it go on with requests whose clients have left? Begin at a lower --rate"
            )

    async def _warm_up(self, shape: Shape, at_once: int) -> None:
        """What a first run alone would wait for: one request of the shape on every stream, of a few."""
        few = min(at_once, _MOST_WARM_UP)
        await self._run("warm-up", shape, few, concurrency=few)

    def _next_seed(self) -> str:
        self._runs += 1
        return f"{self._seed}/{self._runs}"

    async def _run(
        self,
        title: str,
        shape: Shape,
        requests: int,
        *,
        concurrency: int = 0,
        arrivals: Sequence[float] = (),
        duration_s: float | None = None,
        timeout_s: float = math.inf,
        e2e_limit_s: float = math.inf,
        goes_on: Callable[[Standing], bool] = lambda standing: True,
    ) -> Measured:
        load = Load(
            target=self._server.target,
            # Prompts of its own for every run: none is found in a prefix cache.
            prompting=self._server.prompting(
                shape.prompt_tokens,
                shape.output_tokens,
                self._next_seed(),
                shape.temperature,
                shape.top_p,
            ),
            requests=requests,
            concurrency=concurrency,
            arrivals=arrivals,
            timeout_s=min(timeout_s, self._timeout_s),
            ttft_limit_s=math.inf if self._slo.ttft_p99_ms is None else self._slo.ttft_p99_ms / 1000,
            e2e_limit_s=e2e_limit_s,
        )
        aim = Aim(title, requests, requests * shape.output_tokens, duration_s)

        def watch(standing: Standing) -> bool:
            self._show(aim, standing)
            return goes_on(standing)

        try:
            raw = await self._pool.run(load, self._workers or default_workers(concurrency or requests), watch)
        finally:
            self._show(aim, None)
        summary = summarize(raw, shape.output_tokens, shape.prompt_tokens, self._slo, duration_s or 0.0)
        return Measured(summary, raw.records, raw.started_at, raw.stopped)


def warnings(result: Result, run: Measured) -> list[str]:
    """What a reader of a run's figures must know, in words."""
    summary, shape = run.summary, result.shape
    found = []
    if summary.busiest_worker > SATURATED:
        found.append(
            f"the client is busy: {summary.busiest_worker:.0%} of a core in one of its {summary.workers} "
            f"workers. It may be what was measured: give it more --workers, or cores"
        )
    if run.backlog is not None and run.backlog.is_growing:
        found.append(
            f"{run.backlog}: the server does not keep up with this rate, and its times are those of a queue "
            f"that grows for as long as requests arrive"
        )
    if summary.late_p99_ms > LATE_MS:
        found.append(f"requests were sent late: {summary.late_p99_ms:,.0f} ms (p99) after they were due")
    if summary.short_answers:
        found.append(
            f"{summary.short_answers:,} of {summary.succeeded:,} answers have fewer than the "
            f"{shape.output_tokens} tokens asked for: the server does not honour ignore_eos. Figures count "
            f"the {summary.output_tokens:,} tokens that came"
        )
    if summary.tokens_counted_by_us and summary.succeeded:
        found.append("the server sent no usage: each chunk is counted as a token")
    elif summary.chunks and abs(summary.tokens_per_chunk - 1) > 0.05:
        found.append(
            f"a chunk carries {summary.tokens_per_chunk:.2f} tokens on average: ITL is between chunks, TPOT "
            f"per token"
        )
    return found


def _of(shape: Shape) -> str:
    sampled = "" if not shape.temperature else f", temperature {shape.temperature:g}, top-p {shape.top_p:g}"
    return f"{shape.prompt_tokens:,} tokens in, {shape.output_tokens:,} out{sampled}"
