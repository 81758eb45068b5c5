"""Coordinate descent over the linears of a layer, by the time of the whole layer.

A plan that is fast alone may be slow between others: with programmatic dependent launch, each linear fetches
weights while the kernel in front drains, and what one takes of a multiprocessor the next one lacks. So the
plans of each linear are tried in turn while the others keep theirs, and a plan that makes the *layer* faster
stays, until a round gains next to nothing. A descent ends in a local minimum, so there are several starts.

This module does not know a GPU: the measurement is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product

Choice = Mapping[Product, GemmPlan | None]
"""A plan for each linear; None: the library."""
Compare = Callable[[Sequence[Choice]], list[float]]
"""Returns the microseconds of a layer with each choice, measured in turns; infinite for one that does not
run."""
Replay = Callable[[Sequence[int]], list[float]]
"""Returns the microseconds of each replay, for runners in this order."""

ENOUGH = 0.003
"""A round that gains less is the last, and a gain below this is not worth another table."""
NOISE = 0.001
"""The relative difference between medians of the same choice, measured in turns."""

_SCREENING, _MORE = 4, 12
"""Rounds of all runners, and further rounds of those that are near the fastest."""
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
    """Return the local minimum that a descent from `start` reaches. Linears are tried in the order of
    `options`; a plan stays if it is faster than the one before when all are compared, and again when the two
    are. A linear whose surroundings have not changed since its plans were tried is not tried again."""
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
    """Return the fastest of the local minima that descents from some starts reach, its microseconds, and
    those of the first start. The first start is the present choice: it stays if no minimum is faster by more
    than ENOUGH."""
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
