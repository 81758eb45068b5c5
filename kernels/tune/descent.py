"""Optimises the plans of a decoder layer's GEMMs by coordinate descent on the time of the whole layer.

A plan that is fast in isolation may be slow within a layer. With programmatic dependent launch (PDL), each
GEMM loads weights while the previous kernel finishes, so neighbouring kernels compete for the
multiprocessors. The search therefore changes one GEMM's plan at a time and keeps the new plan only if the
*layer* becomes faster. It stops after a round with almost no gain. It finds only a local minimum, so it is
run from several starting points. The measurement function is a parameter, so this module needs no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product

Choice = Mapping[Product, GemmPlan | None]
"""Each GEMM's plan. None selects the library (cuBLAS)."""
Compare = Callable[[Sequence[Choice]], list[float]]
"""Function that times several candidate plan combinations, interleaving their runs. It returns the layer's
time with each combination, in microseconds, or infinity if the combination cannot run."""
Replay = Callable[[Sequence[int]], list[float]]
"""Function that calls the runners with the given indices, in the given order, and returns the time of each
run in microseconds."""

ENOUGH = 0.003
"""Minimum relative gain. The search stops after a round with a smaller gain. If the total gain is smaller,
the original plans are kept."""
NOISE = 0.001
"""Expected relative difference between two medians measured for the same plans in interleaved runs."""

_SCREENING, _MORE = 4, 12
"""Number of rounds with all runners, followed by the number of additional rounds with only the runners that
were close to the fastest."""
_NEAR = 0.015


def race(replay: Replay, runners: int) -> list[float]:
    """Return each runner's median time. Runs are interleaved, with every other round in reverse order. Slow
    runners are dropped after the first rounds."""
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
    """Return the local minimum reached by a descent from `start`. GEMMs are visited in the order of
    `options`. A new plan replaces the current one only if it is faster in two comparisons: one of all plans,
    and one of just these two. A GEMM is revisited only if another GEMM's plan has changed since.
    """
    best, judged = dict(start), dict[Product, Choice]()
    while True:
        speedup = 1.0
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
                    speedup *= again / before if math.isfinite(before) else 0.0
            judged[product] = best
        if speedup > 1 - ENOUGH:
            return best


def search(
    starts: Sequence[Choice], options: Mapping[Product, Sequence[GemmPlan | None]], compare: Compare
) -> tuple[Choice, float, float]:
    """Run a descent from each starting point. Return the fastest local minimum, its time, and the first
    starting point's time, both in microseconds. The first starting point must be the current plans, which are
    kept unless a minimum is faster by more than ENOUGH."""
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
