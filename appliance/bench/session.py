"""Runs benchmarks against one server: workloads, open-loop loads and searches for the highest sustained
rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from appliance.bench.load import Load
from appliance.bench.processes import RawRun, run_load
from appliance.bench.rates import (
    TRIAL_SHARE,
    Search,
    UnsettledError,
    backlog,
    find_rate,
    judge,
    poisson_arrivals,
    requests_at,
)
from appliance.bench.results import Run, Slo, summarize
from appliance.bench.server import Server
from appliance.bench.workloads import MetricUnit, Shape, Workload, WorkloadMetric

REQUEST_TIMEOUT_S = 600.0
_MAX_WARM_UP = 8
_SETTLE_S = 60.0
"""After a failed trial, the server must answer a test request within this many seconds or a trial's duration,
whichever is longer. Otherwise, the search ends."""


class Show(Protocol):
    """A function that displays a run's progress. It is called with None when the run ends."""

    def __call__(self, title: str, load: Load, raw: RawRun | None) -> None: ...


class Result(msgspec.Struct, kw_only=True):
    """The results of all runs with one workload or at one rate."""

    name: str
    description: str
    prompt_tokens: int
    output_tokens: int
    metric: WorkloadMetric
    unit: MetricUnit
    lower_is_better: bool = False
    runs: list[Run]

    @property
    def typical(self) -> Run:
        """The run with the median value of the metric. With an even number of runs, this is the worse of the
        two middle runs."""
        measured = [run for run in self.runs if run.metric(self.metric) is not None]
        if not measured:
            return self.runs[0]
        ranked = sorted(
            measured, key=lambda run: run.metric(self.metric) or 0.0, reverse=self.lower_is_better
        )
        return ranked[(len(ranked) - 1) // 2]


class Session:
    """A series of runs against one server."""

    def __init__(
        self,
        server: Server,
        seed: str,
        *,
        show: Show = lambda title, load, raw: None,
        workers: int | None = None,
        slo: Slo | None = None,
        warm_up: bool = True,
        run_load: Callable[[Load, int | None, Callable[[RawRun], None]], RawRun] = run_load,
    ) -> None:
        self._server = server
        self._seed = seed
        self._show = show
        self._workers = workers
        self._slo = slo or Slo()
        self._warms_up = warm_up
        self._run_load = run_load
        self._runs = 0

    def closed(self, name: str, workload: Workload, runs: int = 1) -> Result:
        """Run a workload `runs` times after a warm-up. Raises BenchError if a client process fails."""
        shape, requests, concurrency = workload.shape, workload.requests, workload.concurrency
        size = f"{requests:,} requests, {concurrency:,} concurrent" if requests > 1 else "1 request"
        self._warm_up(shape, concurrency)
        return Result(
            name=name,
            description=f"{size}, {shape}",
            prompt_tokens=shape.prompt_tokens,
            output_tokens=shape.output_tokens,
            metric=workload.metric,
            unit=workload.unit,
            lower_is_better=workload.lower_is_better,
            runs=[
                self._run(f"{name} {number}/{runs}", shape, requests, concurrency=concurrency)
                for number in range(1, runs + 1)
            ],
        )

    def open(self, shape: Shape, rate: float, duration_s: float, runs: int = 1) -> Result:
        """After a warm-up, repeat `runs` times: send requests at `rate` per second for `duration_s` seconds
        and wait for all responses. Raises BenchError if a client process fails."""
        requests = requests_at(rate, duration_s)
        self._warm_up(shape, requests)
        measured = [
            self._run(f"{rate:g} requests/s {number}/{runs}", shape, requests, duration_s=duration_s)
            for number in range(1, runs + 1)
        ]
        return _open_result("open loop", shape, rate, duration_s, measured)

    def search(self, shape: Shape, first_rate: float, duration_s: float) -> tuple[Search, Result | None]:
        """Run trials of `duration_s` seconds each to find the highest rate that the server sustains within
        the limits. Return a record of the search and its best trial's result, or None if no rate was
        sustained. Raises BenchError if a client process fails."""
        self._warm_up(shape, _MAX_WARM_UP)
        is_settled = True

        def attempt(requests: int) -> Run:
            nonlocal is_settled
            if not is_settled:
                self._settle(shape, duration_s)
            run = self._run(
                f"{requests / duration_s:.4g} requests/s",
                shape,
                requests,
                duration_s=duration_s,
                stop_after_s=TRIAL_SHARE * duration_s,
            )
            run.reasons = judge(run, self._slo, duration_s)
            is_settled = not run.reasons
            return run

        found = find_rate(attempt, requests_at(first_rate, duration_s))
        if found.best is None or found.best.rate is None:
            return found, None
        return found, _open_result("find-rate", shape, found.best.rate, duration_s, [found.best])

    def _settle(self, shape: Shape, duration_s: float) -> None:
        """Wait until the server answers a test request, because requests left over from one trial would slow
        down the next."""
        limit_s = max(_SETTLE_S, duration_s)
        run = self._run("settling", shape, 1, concurrency=1, timeout_s=limit_s)
        if "timeout" in run.failures:
            raise UnsettledError(
                f"the search ended early, because the server did not respond within {limit_s:g} s after "
                "a trial was stopped; it may still be processing requests whose clients have disconnected. "
                "Start at a lower --rate"
            )

    def _warm_up(self, shape: Shape, streams: int) -> None:
        """Send a few unmeasured requests, so that the first run does not include compilation time."""
        if self._warms_up:
            few = min(streams, _MAX_WARM_UP)
            self._run("warm-up", shape, few, concurrency=few)

    def _run(
        self,
        title: str,
        shape: Shape,
        requests: int,
        *,
        concurrency: int = 0,
        duration_s: float = 0.0,
        timeout_s: float = REQUEST_TIMEOUT_S,
        stop_after_s: float = math.inf,
    ) -> Run:
        self._server.check_length(shape)
        self._runs += 1
        seed = f"{self._seed}/{self._runs}"  # a new seed for each run avoids hits in a prefix cache
        load = Load(
            target=self._server.target,
            model=self._server.model,
            vocab_size=self._server.vocab_size,
            prompt_tokens=shape.prompt_tokens,
            output_tokens=shape.output_tokens,
            temperature=shape.temperature,
            top_p=shape.top_p,
            seed=seed,
            requests=requests,
            concurrency=concurrency,
            arrivals=poisson_arrivals(requests, duration_s, seed) if duration_s else (),
            timeout_s=timeout_s,
            stop_after_s=stop_after_s,
        )
        try:
            raw = self._run_load(load, self._workers, lambda raw: self._show(title, load, raw))
        finally:
            self._show(title, load, None)
        run = summarize(raw, load, self._slo, duration_s)
        if duration_s:
            run.backlog = backlog(run.per_request, duration_s)
        return run


def _open_result(name: str, shape: Shape, rate: float, duration_s: float, runs: list[Run]) -> Result:
    return Result(
        name=name,
        description=f"{rate:.4g} requests/s (Poisson) for {duration_s:g} s, {shape}",
        prompt_tokens=shape.prompt_tokens,
        output_tokens=shape.output_tokens,
        metric="output_tok_s",
        unit="tok/s",
        runs=runs,
    )
