"""Formats a profile as a table with each kernel's time, memory traffic and number of operations, and the idle
gaps between kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from engine.ceilings import Ceilings
from engine.profile.trace import TraceTimeline
from engine.profile.work import KernelWork

_GAPS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Measurements for one kernel, averaged over the recorded steps."""

    name: str
    calls: float
    us: float
    share: float
    """The kernel's fraction of the total time, which includes idle gaps."""
    work: KernelWork | None
    """The kernel's minimum memory traffic and number of operations, or None if unknown."""


@dataclass(frozen=True, slots=True)
class IdleGap:
    """Idle time between two kernels, averaged over the recorded steps."""

    after: str
    before: str
    us: float


def kernel_rows(
    names: list[str], timeline: TraceTimeline, works: dict[str, KernelWork], steps: int
) -> list[KernelRow]:
    """Return one row per kernel, in descending order of total time. `names` contains the label of each call,
    as returned by `label_kernels`."""
    us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, call in zip(names, timeline.calls, strict=True):
        us[name] += call.us
        calls[name] += 1
    # On a CPU, operations run in parallel on several threads, so their times may add up to more than the
    # elapsed time.
    whole = timeline.us if timeline.on_gpu else sum(us.values())
    kinds: dict[str, int] = defaultdict(int)
    for name in us:
        kinds[_kind(name)] += calls[name]
    return [
        KernelRow(
            name,
            calls[name] / steps,
            us[name] / steps,
            us[name] / whole if whole else 0.0,
            _part(works.get(_kind(name)), calls[name] / kinds[_kind(name)] / steps),
        )
        for name in sorted(us, key=lambda name: -us[name])
    ]


def idle_gaps(names: list[str], timeline: TraceTimeline, steps: int) -> list[IdleGap]:
    """Return the idle gaps between kernels, longest first."""
    us: dict[tuple[str, str], float] = defaultdict(float)
    for before, after, call in zip(names, names[1:], timeline.calls[1:], strict=False):
        us[before, after] += call.gap_us
    return [
        IdleGap(before, after, total / steps)
        for (before, after), total in sorted(us.items(), key=lambda item: -item[1])
        if total > 0
    ]


def lines(
    rows: list[KernelRow], gaps: list[IdleGap], timeline: TraceTimeline, steps: int, device: Ceilings | None
) -> list[str]:
    """Format the table. The "of limit" column requires the GPU's peak rates. On a CPU, the columns for bytes,
    operations and gaps are omitted."""
    heading = f"{'kernel':40}{'calls':>7}{'µs':>10}{'share':>8}"
    if timeline.on_gpu:
        heading += f"{'MB':>10}{'GB/s':>8}{'TFLOP/s':>9}{'of limit':>10}"
    made = [f"mean step of {steps}: {timeline.us / steps:,.1f} µs", heading]
    for row in rows:
        line = f"{row.name[:39]:40}{row.calls:>7.1f}{row.us:>10,.1f}{row.share:>8.1%}"
        if timeline.on_gpu and row.work is not None and row.us:
            line += f"{row.work.bytes / 1e6:>10,.1f}{row.work.bytes / row.us / 1e3:>8,.0f}"
            line += f"{row.work.operations / row.us / 1e6:>9,.1f}"
            line += "" if device is None else f"{row.work.limit_us(device) / row.us:>10.0%}"
        made.append(line)
    if timeline.on_gpu:
        idle = sum(gap.us for gap in gaps)
        made.append(f"gaps: {idle:,.1f} µs, {idle * steps / timeline.us if timeline.us else 0:.1%}")
        made += [f"  {gap.us:8,.1f}  {gap.after} → {gap.before}" for gap in gaps[:_GAPS_SHOWN]]
    return made


def _kind(name: str) -> str:
    """Return the kernel's name as used by `work_by_kernel`."""
    return name.partition(" (")[0]


def _part(work: KernelWork | None, part: float) -> KernelWork | None:
    return None if work is None else KernelWork(work.bytes * part, work.operations * part, work.per_s)
