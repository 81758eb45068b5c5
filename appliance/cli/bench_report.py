"""A benchmark as text: tables and charts of at most 80 columns."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from appliance.bench.rates import SLOW, Found, Trial
from appliance.bench.results import Bin, Second, Spread, Summary, distribution
from appliance.bench.session import Aim, Result, warnings
from appliance.bench.workers import Standing
from appliance.cli.output import Column, is_terminal, of_seconds, paint, printable, table, terminal_width

_WIDTH = 80
_BAR_CELLS = 34
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
_CHART_ROWS = 4
_CHART_CELLS = 64
_RANKS = ("p50", "p90", "p99", "max")
_FEWEST_FOR_P99 = 100
"""Requests; with fewer, their p99 (nearest rank) is the maximum."""
_FINE = 0.05
"""The precision of a search: where a trial's is coarser, that is said."""


class Report:
    """Writes to one stream; in ASCII where that cannot carry blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            "▏█".encode(stream.encoding or "ascii")
            self._blocks = True
        except (UnicodeEncodeError, LookupError):
            self._blocks = False

    def line(self, text: str = "", colour: str = "") -> None:
        """One line, in a colour where the stream wants any."""
        print(paint(text, colour, self._stream) if colour else text, file=self._stream, flush=True)

    def wrapped(self, text: str, colour: str) -> None:
        """A sentence or two, in lines that fit."""
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  "):
            self.line(line, colour)

    def result(self, result: Result) -> None:
        """A workload's typical run, with its charts."""
        run = result.typical
        summary = run.summary
        self.line()
        self.line(f"{result.name}: {result.description}", "bold")
        if len(result.runs) > 1:
            figures = " · ".join(_number(one.summary.figure(result.figure)) for one in result.runs)
            self.line(f"median of {len(result.runs)} runs: {figures} {result.unit}", "dim")
        self._rates(result, summary)
        self._spreads(summary)
        if summary.unfinished:
            self.wrapped(f"unfinished: {summary.unfinished:,}, open when the run was given up", "yellow")
        for kind, failures in summary.failures.items():
            example = f": {printable(failures.example)}" if failures.example else ""
            self.wrapped(f"failed: {failures.count:,} × {printable(kind)}{example}", "red")
        for warning in warnings(result, run):
            self.wrapped(f"note: {warning}", "yellow")
        self._distribution("TTFT, ms", distribution(summary.ttft_ms), "requests")
        self._distribution("ITL, ms", distribution(summary.itl_ms), "gaps")
        self._over_time(summary.series, summary.seconds)

    def comparison(self, results: Sequence[Result]) -> None:
        """All workloads, one line each."""
        rows = []
        for result in results:
            summary = result.typical.summary
            figure = summary.figure(result.figure)
            rows.append(
                (
                    result.name,
                    _number(figure),
                    result.unit,
                    _ms(summary.ttft, "p50"),
                    _ms(summary.ttft, "p99"),
                    _ms(summary.itl, "p50"),
                    _ms(summary.itl, "p99"),
                    f"{summary.requests - summary.succeeded:,}",
                )
            )
        columns = [
            Column("workload", flexible=True),
            Column("figure", right=True),
            Column("unit"),
            *(Column(name, right=True) for name in ("TTFT p50", "p99", "ITL p50", "p99", "failed")),
        ]
        self.line()
        for line in table(columns, rows, width=_WIDTH):
            self.line(line)

    def search(self, found: Found) -> None:
        """The trials of a search, and what they say."""
        rows = []
        for trial in sorted(found.trials, key=lambda trial: trial.rate):
            summary = trial.summary
            goodput = summary.goodput
            rows.append(
                (
                    f"{trial.rate:.4g}",
                    "" if goodput is None or trial.given_up_s is not None else f"{goodput:.4g}",
                    _ms(summary.ttft, "p99"),
                    _ms(summary.itl, "p99"),
                    f"{summary.busiest_worker:.0%}",
                    "yes" if trial.is_sustained else f"no: {trial.reasons[0]}",
                )
            )
        columns = [
            *(Column(name, right=True) for name in ("req/s", "goodput", "TTFT p99", "ITL p99", "client")),
            Column("sustained", flexible=True),
        ]
        self.line()
        for line in table(columns, rows, width=_WIDTH):
            self.line(line)
        self.line()
        if found.best is not None:
            goodput = found.best.summary.goodput or 0.0
            self.line(
                f"highest sustained rate: {found.best.rate:.4g} requests/s, goodput {goodput:.4g} requests/s",
                "bold",
            )
            for note in _few_requests(found.best):
                self.wrapped(f"note: {note}", "yellow")
        if any(reason.startswith(SLOW) for trial in found.trials for reason in trial.reasons):
            self.wrapped(
                "note: whether a rate is sustained shows in trials of more than twice as long as a response "
                "takes: give a longer --duration",
                "yellow",
            )
        if found.note:
            self.wrapped(f"note: {found.note}", "yellow")

    def _rates(self, result: Result, summary: Summary) -> None:
        parts = [
            f"{summary.succeeded:,} of {summary.requests:,} requests in {of_seconds(summary.seconds)}",
            f"{summary.requests_s:,.2f} requests/s",
        ]
        if summary.goodput is not None:
            parts.append(f"goodput {summary.goodput:,.2f} requests/s")
        self.line(" · ".join(parts))
        parts = [f"output {summary.output_tok_s:,.1f} tok/s", f"prompt {summary.prompt_tok_s:,.1f} tok/s"]
        if result.figure in ("p99_ms", "ms"):
            parts.append(f"{_number(summary.figure(result.figure))} {result.unit}")
        workers = f"{summary.workers} worker{'s' * (summary.workers > 1)}"
        parts.append(f"client {summary.busiest_worker:.0%} of a core ({workers})")
        self.line(" · ".join(parts))

    def _spreads(self, summary: Summary) -> None:
        spreads: list[tuple[str, Spread | None]] = [
            ("TTFT", summary.ttft),
            ("ITL", summary.itl),
            ("TPOT", summary.tpot),
            ("E2E", summary.e2e),
        ]
        rows = [(name, *(_ms(one, rank) for rank in _RANKS)) for name, one in spreads if one]
        if rows:
            columns = [Column("ms"), *(Column(name, right=True) for name in _RANKS)]
            for line in table(columns, rows, width=_WIDTH):
                self.line(line)

    def _distribution(self, title: str, bins: Sequence[Bin], what: str) -> None:
        total = sum(one.count for one in bins)
        if total < 2:
            return
        self.line()
        self.line(title, "bold")
        most = max(one.count for one in bins)
        places = _places(bins)
        lows = [f"{one.low:,.{places}f}" for one in bins]
        highs = [f"{one.high:,.{places}f}" for one in bins]
        low, high = max(map(len, lows)), max(map(len, highs))
        for index, one in enumerate(bins):
            self.line(
                f"{lows[index]:>{low}} – {highs[index]:>{high}} {self._bar(one.count / most)} "
                f"{one.count:>9,} {one.count / total:>6.1%}" + (f" {what}" if index == 0 else "")
            )

    def _bar(self, share: float) -> str:
        if not self._blocks:
            return ("#" * round(share * _BAR_CELLS)).ljust(_BAR_CELLS)
        eighths = round(share * _BAR_CELLS * 8)
        if share > 0:
            eighths = max(eighths, 1)
        whole, rest = divmod(eighths, 8)
        return ("█" * whole + _EIGHTHS[rest].strip()).ljust(_BAR_CELLS)

    def _over_time(self, series: Sequence[Second], seconds: float) -> None:
        if seconds < 2:
            return
        values = _tokens_per_second(series, seconds)
        top = max(values)
        if not top:
            return
        self.line()
        self.line("output tok/s over time", "bold")
        label = f"{top:,.0f}"
        margin = len(label)
        for row in reversed(range(_CHART_ROWS)):
            cells = "".join(self._cell(value / top * _CHART_ROWS - row) for value in values)
            left = label if row == _CHART_ROWS - 1 else "0" if row == 0 else ""
            self.line(f"{left:>{margin}} {cells}".rstrip())
        self.line(" " * (margin + 1) + "0 s" + f"{of_seconds(seconds):>{max(len(values) - 3, 0)}}")

    def _cell(self, height: float) -> str:
        if not self._blocks:
            return "#" if height >= 0.5 else " "
        return _LEVELS[max(0, min(8, round(8 * height)))]


def _few_requests(trial: Trial) -> list[str]:
    """What a trial with so few requests cannot tell."""
    requests, notes = trial.requests, []
    if (beyond := trial.resolution) > _FINE:
        notes.append(
            f"with {requests:,} requests a trial, a rate may pass that is up to {beyond:.0%} beyond what the "
            f"server can do: a longer --duration is finer"
        )
    if requests < _FEWEST_FOR_P99:
        notes.append(f"a p99 of {requests:,} requests is the slowest of them")
    return notes


class ProgressBar:
    """One line that is written over and over, where a person sits at the stream; nothing elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shows = is_terminal(self._stream)
        self._drawn = False

    def show(self, aim: Aim, standing: Standing | None) -> None:
        """Draw how far a run is; None wipes the line."""
        if not self._shows:
            return
        if standing is None:
            if self._drawn:
                print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._drawn = False
            return
        gone = max(0.0, time.monotonic() - standing.started_at)
        ended = len(standing.records)
        share = max(
            ended / aim.requests, min(standing.chunks / aim.tokens, 0.999) if ended < aim.requests else 0
        )
        if aim.seconds is not None:
            share = min(gone / aim.seconds, 1.0) if ended < aim.requests else 1.0
        failed = sum(bool(record.failure) for record in standing.records)
        filled = round(16 * share)
        parts = [
            f"{ended:,}/{aim.requests:,}",
            f"{standing.running:,} running",
            f"{standing.chunks / gone if gone else 0:,.0f} chunks/s",
            of_seconds(gone),
        ]
        if failed:
            parts.insert(1, f"{failed:,} failed")
        line = f"{aim.title} [{'#' * filled}{'.' * (16 - filled)}] " + " · ".join(parts)
        # A line that wraps could not be written over.
        room = min(_WIDTH, terminal_width(self._stream) or _WIDTH) - 1
        print(f"\r{line[:room]}\x1b[K", end="", file=self._stream, flush=True)
        self._drawn = True


def _tokens_per_second(series: Sequence[Second], seconds: float) -> list[float]:
    """At most _CHART_CELLS means over equal spans; a last second that was cut short counts for its length."""
    values = [second.output_tokens for second in series]
    rest = seconds - (len(values) - 1)
    if len(values) > 1 and rest < 0.25:
        values[-2] += values.pop()
        values[-1] /= 1 + max(rest, 0.0)
    elif values:
        values[-1] /= min(1.0, max(rest, 1e-9))
    if len(values) <= _CHART_CELLS:
        repeat = _CHART_CELLS // len(values)
        return [value for value in values for _ in range(repeat)]
    spans = [
        values[index * len(values) // _CHART_CELLS : (index + 1) * len(values) // _CHART_CELLS]
        for index in range(_CHART_CELLS)
    ]
    return [sum(span) / len(span) for span in spans]


def _places(bins: Sequence[Bin]) -> int:
    """Decimal places that tell all edges apart."""
    least = min((one.high - one.low for one in bins), default=1.0)
    return 0 if least >= 1 else 1 if least >= 0.1 else 2


def _ms(spread: Spread | None, rank: str) -> str:
    if spread is None:
        return ""
    value: float = getattr(spread, rank)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"
