"""The table of a profile: each kernel's time beside what it moved and computed, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from engine.bench.limits import Ceilings
from engine.profile.trace import Timeline
from engine.profile.work import Work

_GAPS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel, on average over the steps."""

    name: str
    calls: float
    us: float
    share: float
    """Of the time line, gaps included."""
    work: Work | None
    """None where it is unknown."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which nothing ran between two kernels, on average over the steps."""

    after: str
    before: str
    us: float


def rows_of(names: list[str], timeline: Timeline, works: dict[str, Work], steps: int) -> list[Row]:
    """names: of the time line's calls, as `label_products` made them. Most time first."""
    us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, call in zip(names, timeline.calls, strict=True):
        us[name] += call.us
        calls[name] += 1
    # An operation's own time may be spent on several threads at once.
    whole = timeline.us if timeline.on_gpu else sum(us.values())
    kinds: dict[str, int] = defaultdict(int)
    for name in us:
        kinds[_kind(name)] += calls[name]
    return [
        Row(
            name,
            calls[name] / steps,
            us[name] / steps,
            us[name] / whole if whole else 0.0,
            _part(works.get(_kind(name)), calls[name] / kinds[_kind(name)] / steps),
        )
        for name in sorted(us, key=lambda name: -us[name])
    ]


def gaps_of(names: list[str], timeline: Timeline, steps: int) -> list[Gap]:
    """The largest first."""
    us: dict[tuple[str, str], float] = defaultdict(float)
    for before, after, call in zip(names, names[1:], timeline.calls[1:], strict=False):
        us[before, after] += call.gap_us
    return [
        Gap(before, after, total / steps)
        for (before, after), total in sorted(us.items(), key=lambda item: -item[1])
        if total > 0
    ]


def lines(
    rows: list[Row], gaps: list[Gap], timeline: Timeline, steps: int, device: Ceilings | None
) -> list[str]:
    """For a person. "of limit" needs a GPU's ceilings; on a CPU there are no bytes, operations or gaps."""
    heads = f"{'kernel':40}{'calls':>7}{'µs':>10}{'share':>8}"
    if timeline.on_gpu:
        heads += f"{'MB':>10}{'GB/s':>8}{'TFLOP/s':>9}{'of limit':>10}"
    made = [f"a step, of {steps}: {timeline.us / steps:,.1f} µs", heads]
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
    """By which `work_by_kernel` knows a kernel."""
    return name.partition(" (")[0]


def _part(work: Work | None, part: float) -> Work | None:
    return None if work is None else Work(work.bytes * part, work.operations * part, work.per_s)
