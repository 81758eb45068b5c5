"""Coordinate descent over the products of a layer, by the time of the whole layer.

A plan that is fast alone may be slow between others: with programmatic dependent launch each product fetches
weights while the one in front drains, and what one takes of a multiprocessor the next one lacks. So each
product's plans are tried in turn while the others keep theirs, and what makes the *layer* faster stays, until
a round brings next to nothing; from several starts, since every descent ends in a valley of its own.

Nothing here knows a GPU: what is measured is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from kernels.triton.linear_plans import GemmPlan

Choice = Mapping[str, GemmPlan | None]
"""A plan for each product; None: the library."""
Compare = Callable[[Sequence[Choice]], list[float]]
"""Microseconds of a layer with each choice, measured in turns; infinite for one that does not run."""
Replay = Callable[[Sequence[int]], list[float]]
"""Microseconds of each replay, in this order of runners."""

ENOUGH = 0.003
"""A round that brings less is the last, and what brings less is not worth another table."""
NOISE = 0.001
"""By which medians of the same, measured in turns, differ."""

_SCREENING, _MORE = 4, 12
"""Turns of all runners, and further ones of those that are near the fastest."""
_NEAR = 0.015


def race(replay: Replay, runners: int) -> list[float]:
    """The median of each of some runners. They run in turns, every other time backwards; those that are
    not near the fastest after a few turns leave."""
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


def descend(start: Choice, options: Mapping[str, Sequence[GemmPlan | None]], compare: Compare) -> Choice:
    """The valley below `start`. Products are tried in the order of `options`; a plan stays that is faster
    than what was there when all are compared, and again when the two are. A product whose surroundings have
    not changed since its plans were tried is not tried again."""
    best, judged = dict(start), dict[str, Choice]()
    while True:
        gained = 1.0
        for name, plans in options.items():
            if judged.get(name) == best:
                continue
            others = [{**best, name: plan} for plan in plans if plan != best[name]]
            before, *after = compare([best, *others])
            if after and min(after) < before * (1 - NOISE):
                fastest = others[after.index(min(after))]
                before, again = compare([best, fastest])
                if again < before * (1 - NOISE):
                    best = fastest
                    gained *= again / before if math.isfinite(before) else 0.0
            judged[name] = best
        if gained > 1 - ENOUGH:
            return best


def search(
    starts: Sequence[Choice], options: Mapping[str, Sequence[GemmPlan | None]], compare: Compare
) -> tuple[Choice, float, float]:
    """The fastest of the valleys below some starts, its microseconds and the first start's. The first start
    is what there is: it stays where no valley is faster by more than ENOUGH."""
    found: list[Choice] = [starts[0]]
    for start in starts:
        valley = descend(start, options, compare)
        if valley not in found:
            found.append(valley)
    if len(found) == 1:
        us = compare(found)[0]
        return found[0], us, us
    times = compare(found)
    best = times.index(min(times))
    if times[best] > times[0] * (1 - ENOUGH):
        best = 0
    return found[best], times[best], times[0]
