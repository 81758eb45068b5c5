"""Formats the benchmark's table. Each line shows a workload's result, its limit, and step statistics."""

from __future__ import annotations

from collections.abc import Sequence

from engine.bench.workloads import EngineWorkload, StepStats, WorkloadResult

HEADING = (
    f"{'workload':14}{'result':>11}{'unit':>8}{'limit':>9}{'%':>7}"
    f"{'decode':>8}{'ms':>8}{'idle':>7}{'max':>7}{'mixed':>7}{'ms':>8}{'idle':>7}{'max':>7}"
)
"""Column headings. "%" is the result as a percentage of the limit. Decode-only and mixed steps have four
columns each: the number of steps, their mean duration, the median run's idle fraction, and the highest idle
fraction of any run."""


def median_run(workload: EngineWorkload, runs: Sequence[WorkloadResult]) -> WorkloadResult:
    """Return the run with the median result. If the number of runs is even, this is the slower of the two
    middle ones."""
    ranked = sorted(runs, key=lambda run: run.result, reverse=workload.lower_is_better)
    return ranked[(len(ranked) - 1) // 2]


def line(name: str, workload: EngineWorkload, runs: Sequence[WorkloadResult], limit: float | None) -> str:
    """Format a workload's line of the table. `limit` is None if the device's peak rates are unknown."""
    run = median_run(workload, runs)
    fraction = ""
    if limit is not None:
        fraction = f"{limit / run.result if workload.lower_is_better else run.result / limit:.0%}"
    decode = _steps(run.decode, max(other.decode.idle_fraction for other in runs), 8)
    mixed = _steps(run.mixed, max(other.mixed.idle_fraction for other in runs), 7)
    limit_text = "" if limit is None else f"{limit:,.0f}"
    return f"{name:14}{run.result:>11,.1f}{workload.unit:>8}{limit_text:>9}{fraction:>7}{decode}{mixed}"


def plans_line(workload: EngineWorkload, runs: Sequence[WorkloadResult]) -> str:
    """Format the mean time per step that rank 0 spent sending plans to the other ranks, taken from the median
    run."""
    run = median_run(workload, runs)
    kinds = [(name, steps) for name, steps in (("decode", run.decode), ("mixed", run.mixed)) if steps.count]
    spent = ", ".join(f"{steps.plan_us:.0f} µs per {name} step" for name, steps in kinds)
    return f"{'':14}  sending plans to the other ranks: {spent}"


def _steps(steps: StepStats, max_idle: float, width: int) -> str:
    return f"{steps.count:>{width}}{steps.ms:>8.2f}{steps.idle_fraction:>7.1%}{max_idle:>7.1%}"
