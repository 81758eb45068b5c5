"""Slopes of measurements over time, with confidence intervals that allow for autocorrelation."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

BLOCKS = 30
"""Number of periods into which the samples are divided. The regression uses one level per period. A period is
longer than a cycle of the traffic."""
_T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Two-sided 95% quantiles of Student's t distribution for 1 to 14 degrees of freedom."""


class Slope(NamedTuple):
    """A slope per minute, with the limits of its 95% confidence interval."""

    per_minute: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def slope_of(
    times_s: Sequence[float],
    values: Sequence[float],
    level: Callable[[list[float]], float] = statistics.fmean,
) -> Slope:
    """Fit a line by ordinary least squares to the levels of `BLOCKS` periods of equal length. `level` reduces
    a period's values to one level.

    The interval allows for levels that stay above or below the line for several periods: it uses the
    effective number of levels, which follows from the autocorrelation of the residuals at lag 1 (Santer et
    al., "Statistical significance of trends and trend differences in layer-average atmospheric temperature
    time series", Journal of Geophysical Research 105, 2000).

    Raises ValueError if fewer than three periods have values.
    """
    start, end = min(times_s), max(times_s)
    blocks: list[list[tuple[float, float]]] = [[] for _ in range(BLOCKS)]
    for time_s, value in zip(times_s, values, strict=True):
        number = int(BLOCKS * (time_s - start) / (end - start)) if end > start else 0
        blocks[min(number, BLOCKS - 1)].append((time_s / 60.0, value))
    points = [
        (statistics.fmean(minute for minute, _ in block), level([value for _, value in block]))
        for block in blocks
        if block
    ]
    if len(points) < 3:
        raise ValueError(f"{len(times_s)} samples fill {len(points)} blocks; a slope needs at least 3")
    minutes, levels = zip(*points, strict=True)
    middle = statistics.fmean(minutes)
    spread = sum((minute - middle) ** 2 for minute in minutes)
    fit = statistics.linear_regression(minutes, levels)
    residuals = [level - fit.slope * minute - fit.intercept for minute, level in points]
    squares = sum(residual**2 for residual in residuals)
    freedom = _effective_count(residuals, squares) - 2.0
    half_width = _T_95[min(int(freedom), len(_T_95)) - 1] * math.sqrt(squares / freedom / spread)
    return Slope(fit.slope, fit.slope - half_width, fit.slope + half_width)


def _effective_count(residuals: Sequence[float], squares: float) -> float:
    """Return the number of independent residuals that would determine a line as precisely as these
    autocorrelated ones, at least 3. `squares` is the sum of the residuals' squares."""
    products = sum(one * following for one, following in itertools.pairwise(residuals))
    correlation = max(0.0, products / squares) if squares else 0.0
    return max(3.0, len(residuals) * (1.0 - correlation) / (1.0 + correlation))
