"""Prints benchmark results as tables of at most 80 columns, and a progress bar."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from appliance.bench.load import Load
from appliance.bench.processes import RawRun
from appliance.bench.rates import LATE_MS, SATURATED, SLOW, Search, resolution
from appliance.bench.results import Percentiles, Run
from appliance.bench.session import Result
from appliance.cli.output import Column, of_seconds, paint, printable, table
from appliance.cli.status_line import StatusLine, bar

_WIDTH = 80
_RANKS = ("p50", "p90", "p99", "max")
_MIN_FOR_P99 = 100
"""With fewer requests than this, the 99th percentile (nearest rank) equals the maximum."""
_FINE = 0.05
"""Target precision when searching for the highest rate. The report notes when a result is less precise."""


class BenchReport:
    """Writes a benchmark report to a stream, line by line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str = "", colour: str = "") -> None:
        """Write one line of the report."""
        print(paint(text, colour, self._stream) if colour else text, file=self._stream, flush=True)

    def wrapped(self, text: str, colour: str) -> None:
        """Write one or two sentences, wrapped to the report's width."""
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  "):
            self.line(line, colour)

    def result(self, result: Result) -> None:
        """Write the statistics of a workload's median run."""
        run = result.typical
        self.line()
        self.line(f"{result.name}: {result.description}", "bold")
        if len(result.runs) > 1:
            values = " · ".join(_number(one.metric(result.metric)) for one in result.runs)
            self.line(f"median of {len(result.runs)} runs: {values} {result.unit}", "dim")
        rates = [
            f"{run.succeeded:,} of {run.requests:,} requests in {of_seconds(run.seconds)}",
            f"{run.requests_s:,.2f} requests/s",
        ]
        if run.goodput is not None:
            rates.append(f"goodput {run.goodput:,.2f} requests/s")
        self.line(" · ".join(rates))
        tokens = [f"output {run.output_tok_s:,.1f} tok/s", f"prompt {run.prompt_tok_s:,.1f} tok/s"]
        if result.lower_is_better:
            tokens.append(f"{_number(run.metric(result.metric))} {result.unit}")
        workers = f"{run.workers} worker{'s' * (run.workers > 1)}"
        tokens.append(f"client {run.busiest_worker_cpu:.0%} of a core ({workers})")
        self.line(" · ".join(tokens))
        times = {"TTFT": run.ttft_ms, "ITL": run.itl_ms, "TPOT": run.tpot_ms, "E2E": run.e2e_ms}
        rows = [(name, *(_ms(one, rank) for rank in _RANKS)) for name, one in times.items() if one]
        if rows:
            self._table([Column("ms"), *(Column(name, right=True) for name in _RANKS)], rows)
        for kind, failures in run.failures.items():
            example = f": {printable(failures.example)}" if failures.example else ""
            self.wrapped(f"failed: {failures.count:,} × {printable(kind)}{example}", "red")
        for note in _notes(result, run):
            self.wrapped(f"note: {note}", "yellow")

    def comparison(self, results: Sequence[Result]) -> None:
        """Write a table that compares all workloads, one per line."""
        rows = []
        for result in results:
            run = result.typical
            rows.append(
                (
                    result.name,
                    _number(run.metric(result.metric)),
                    result.unit,
                    *(_ms(one, rank) for one in (run.ttft_ms, run.itl_ms) for rank in ("p50", "p99")),
                    f"{run.requests - run.succeeded:,}",
                )
            )
        columns = [
            Column("workload", flexible=True),
            Column("result", right=True),
            Column("unit"),
            *(Column(name, right=True) for name in ("TTFT p50", "p99", "ITL p50", "p99", "failed")),
        ]
        self.line()
        self._table(columns, rows)

    def search(self, search: Search, duration_s: float) -> None:
        """Write the trials and the result of a search for the highest rate."""
        rows = [
            (
                f"{trial.rate:.4g}",
                "" if trial.goodput is None else f"{trial.goodput:.4g}",
                _ms(trial.ttft_ms, "p99"),
                _ms(trial.itl_ms, "p99"),
                f"{trial.busiest_worker_cpu:.0%}",
                f"no: {trial.reasons[0]}" if trial.reasons else "yes",
            )
            for trial in sorted(search.trials, key=lambda trial: trial.rate or 0.0)
        ]
        columns = [
            *(Column(name, right=True) for name in ("req/s", "goodput", "TTFT p99", "ITL p99", "client")),
            Column("sustained", flexible=True),
        ]
        self.line()
        self._table(columns, rows)
        self.line()
        notes = [search.note] if search.note else []
        if (best := search.best) is not None:
            self.line(
                f"highest sustained rate: {best.rate:.4g} requests/s, "
                f"goodput {best.goodput or 0.0:.4g} requests/s",
                "bold",
            )
            if (beyond := resolution(best, duration_s)) > _FINE:
                notes.append(
                    f"with only {best.requests:,} requests per trial, the result may be up to "
                    f"{beyond:.0%} above the rate that the server can sustain: a longer --duration "
                    "gives a more precise result"
                )
            if best.requests < _MIN_FOR_P99:
                notes.append(
                    f"with only {best.requests:,} requests per trial, the 99th percentile is the slowest "
                    "request"
                )
        if any(reason.startswith(SLOW) for trial in search.trials for reason in trial.reasons):
            notes.append(
                "to show whether a rate is sustained, a trial must last more than twice as long as a "
                "response: use a longer --duration"
            )
        for note in notes:
            self.wrapped(f"note: {note}", "yellow")

    def _table(self, columns: list[Column], rows: Sequence[tuple[str, ...]]) -> None:
        for line in table(columns, rows, width=_WIDTH):
            self.line(line)


class ProgressBar:
    """A line on standard error that is overwritten during a run. If standard error is not a terminal, nothing
    is shown."""

    def __init__(self) -> None:
        self._line = StatusLine()

    def show(self, title: str, load: Load, raw: RawRun | None) -> None:
        """Show a run's progress, or clear the line if there is no run."""
        if raw is None:
            self._line.clear()
            return
        elapsed = max(0.001, time.monotonic() - raw.started_at)
        ended = len(raw.records)
        share = max(ended / load.requests, raw.chunks / (load.requests * load.output_tokens))
        failed = sum(bool(record.failure) for record in raw.records)
        parts = [
            f"{ended:,}/{load.requests:,}",
            *([f"{failed:,} failed"] if failed else []),
            f"{raw.running:,} running",
            f"{raw.chunks / elapsed:,.0f} chunks/s",
            of_seconds(elapsed),
        ]
        self._line.show(f"{title} {bar(share)} {' · '.join(parts)}")


def _notes(result: Result, run: Run) -> Iterator[str]:
    """Yield notes that help to interpret a run's results."""
    if run.unfinished:
        yield f"{run.unfinished:,} requests were unfinished when the run was stopped"
    if run.busiest_worker_cpu > SATURATED:
        yield (
            f"the busiest of {run.workers} client processes used {run.busiest_worker_cpu:.0%} of a "
            "core: the client may be the bottleneck; use more --workers, or more cores"
        )
    if run.late_p99_ms > LATE_MS:
        yield f"requests were sent late: {run.late_p99_ms:,.0f} ms (p99) after they were due"
    if run.backlog is not None and run.backlog.is_growing:
        yield f"{run.backlog}: the server cannot sustain this rate, so latencies grow with --duration"
    if run.short_answers:
        yield (
            f"{run.short_answers:,} of {run.succeeded:,} answers have fewer than the "
            f"{result.output_tokens} requested tokens, because the server ignores ignore_eos. The rates "
            f"count the {run.output_tokens:,} tokens that were received"
        )
    if run.tokens_counted_by_client and run.succeeded:
        yield "the server reported no token usage, so each chunk counts as one token"
    elif run.chunks and abs(run.output_tokens / run.chunks - 1) > 0.05:
        yield (
            f"a chunk contains {run.output_tokens / run.chunks:.2f} tokens on average; ITL is measured "
            "per chunk, TPOT per token"
        )


def _ms(percentiles: Percentiles | None, rank: str) -> str:
    if percentiles is None:
        return ""
    value: float = getattr(percentiles, rank)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
