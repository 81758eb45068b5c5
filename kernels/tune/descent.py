"""Coordinate descent over the linears of a layer, by the time of the whole layer.

A plan that is fast alone may be slow inside a layer: with programmatic dependent launch, each linear fetches
weights while the previous kernel finishes, so neighbouring kernels compete for a multiprocessor. Therefore
the plans of one linear at a time are tried while the other linears keep theirs, and a plan stays if it makes
the *layer* faster. The descent ends when a round gains next to nothing. It finds a local minimum, so it is
run from several starting points.

The measurement is a parameter, so this module needs no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product

Choice = Mapping[Product, GemmPlan | None]
"""The plan of each linear; None: the library's GEMM."""
Compare = Callable[[Sequence[Choice]], list[float]]
"""Measures choices in interleaved runs and returns the microseconds of a layer with each; infinite for a
choice that does not run."""
Replay = Callable[[Sequence[int]], list[float]]
"""Runs the runners with these indices in this order, and returns the microseconds of each replay."""

ENOUGH = 0.003
"""Minimum relative gain. A round that gains less is the last one, and a smaller gain does not justify a new
table."""
NOISE = 0.001
"""Relative difference between medians of the same choice in interleaved runs."""

_SCREENING, _MORE = 4, 12
"""Number of rounds for all runners, and of further rounds for those near the fastest."""
_NEAR = 0.015


def race(replay: Replay, runners: int) -> list[float]:
    """Return each runner's median time. Runs are interleaved, in reverse order every other round; after a few
    rounds, slow runners are dropped."""
    times: list[list[float]] = [[] for _ in range(runners)]

    def run(those: list[int], turns: int) -> None:
        order = [one for turn in range(turns) for one in (those if turn % 2 else those[::-1])]
        for one, us in zip(order, replay(order), strict=True):
            times[one].append(us)

    run(list(range(runners)), _SCREENING)
    medians = [median(one) for one in times]
    near = [one for one, us in enumerate(medians) if us <= min(medians) * (1 + _NEAR)]
    if len(near) > 1:
        run(near, _MORE)
    return [median(one) for one in times]


def descend(start: Choice, options: Mapping[Product, Sequence[GemmPlan | None]], compare: Compare) -> Choice:
    """Return the local minimum that a descent from `start` reaches.

    Linears are tried in the order of `options`. A new plan stays if it beats the previous plan twice: when
    all plans are compared, and when these two are compared alone. A linear is tried again only if the plans
    around it have changed.
    """
    best, judged = dict(start), dict[Product, Choice]()
    while True:
        gained = 1.0
        for product, plans in options.items():
            if judged.get(product) == best:
                continue
            others = [{**best, product: plan} for plan in plans if plan != best[product]]
            before, *after = compare([best, *others])
            if after and min(after) < before * (1 - NOISE):
                fastest = others[after.index(min(after))]
                before, again = compare([best, fastest])
                if again < before * (1 - NOISE):
                    best = fastest
                    gained *= again / before if math.isfinite(before) else 0.0
            judged[product] = best
        if gained > 1 - ENOUGH:
            return best


def search(
    starts: Sequence[Choice], options: Mapping[Product, Sequence[GemmPlan | None]], compare: Compare
) -> tuple[Choice, float, float]:
    """Return the fastest local minimum that descents from several starting points reach, its microseconds,
    and those of the first starting point. The first starting point is the current choice: it is kept unless a
    minimum is faster by more than ENOUGH."""
    found: list[Choice] = [starts[0]]
    for start in starts:
        minimum = descend(start, options, compare)
        if minimum not in found:
            found.append(minimum)
    if len(found) == 1:
        us = compare(found)[0]
        return found[0], us, us
    times = compare(found)
    best = times.index(min(times))
    if times[best] > times[0] * (1 - ENOUGH):
        best = 0
    return found[best], times[best], times[0]
