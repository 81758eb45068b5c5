"""The table of a benchmark: a line for each workload, ours beside the limit, and how its steps went."""

from __future__ import annotations

from collections.abc import Sequence

from engine.bench.workloads import Measured, Steps, Workload

HEADS = (
    f"{'workload':14}{'ours':>11}{'unit':>8}{'limit':>9}{'of it':>7}"
    f"{'decode':>8}{'ms':>8}{'idle':>7}{'most':>7}{'mixed':>7}{'ms':>8}{'idle':>7}{'most':>7}"
)
"""Steps by kind: how many, their mean time, and how much of it the device waited for the host, in that run
and in the run where it was most."""


def median_run(workload: Workload, runs: Sequence[Measured]) -> Measured:
    """The run whose figure is the median; of an even number, the worse of the two in the middle."""
    ranked = sorted(runs, key=lambda run: run.figure, reverse=workload.less_is_better)
    return ranked[(len(ranked) - 1) // 2]


def line(name: str, workload: Workload, runs: Sequence[Measured], limit: float | None) -> str:
    """limit: None where the device's is not known."""
    run = median_run(workload, runs)
    of_it = ""
    if limit is not None:
        of_it = f"{limit / run.figure if workload.less_is_better else run.figure / limit:.0%}"
    decode = _steps(run.decode, max(one.decode.idle_fraction for one in runs), 8)
    mixed = _steps(run.mixed, max(one.mixed.idle_fraction for one in runs), 7)
    limit_text = "" if limit is None else f"{limit:,.0f}"
    return f"{name:14}{run.figure:>11,.1f}{workload.unit:>8}{limit_text:>9}{of_it:>7}{decode}{mixed}"


def _steps(steps: Steps, most_idle: float, width: int) -> str:
    return f"{steps.count:>{width}}{steps.ms:>8.2f}{steps.idle_fraction:>7.1%}{most_idle:>7.1%}"
