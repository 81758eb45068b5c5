"""Estimates answer lengths from the lengths of finished answers, for one tenant or for all tenants
together."""

from __future__ import annotations

import math

_OF_THE_NEW = 0.05
"""Minimum weight of the newest answer in the running means."""
_ENOUGH = 8
"""Number of finished answers required before lengths are predicted."""
_FOR_EACH_RUNNING = 2
"""Number of additional finished answers required per running answer before lengths are predicted. Short
answers finish first, so early lengths are biased."""
_BUCKET = math.log(1.15)
"""Histogram bucket width on a logarithmic scale."""
_BEYOND = 0.01
"""Fraction of answers that may be longer than `likely_most` predicts."""
_KEPT = 2000.0
"""All counts are halved when the histogram's total weight exceeds this value."""
_FEW = 20.0
"""Determines the safety factor of `likely_most`: with this many answers in the histogram, the result is twice
the longest answer. With more answers, the factor approaches 1."""
_ALL_BUT = 0.98
"""Answers that reach this fraction of their token limit count as having reached the limit."""
UNKNOWN_TOKENS = 256.0
"""Assumed answer length until enough answers have finished."""
_UNKNOWN_MAX_TOKENS = 2048.0
"""Assumed maximum answer length until enough answers have finished."""


class OutputLengths:
    """Answer length statistics: the fraction of answers that reach their token limit, and the mean and
    distribution of the other answers' lengths."""

    __slots__ = ("_buckets", "_likely_most", "count", "known", "mean", "others", "running", "used_up")

    def __init__(self) -> None:
        self.count = 0
        self.running = 0
        """Number of answers in progress."""
        self.known = False
        """Whether enough answers have finished to predict lengths."""
        self.used_up = 0.0
        """Fraction of answers that reached their token limit."""
        self.others = 0
        self.mean = 0.0
        self._buckets: list[float] = []
        self._likely_most = 0.0

    def learn(self, tokens: int, max_tokens: float) -> None:
        """Update the statistics with a finished answer whose token limit was `max_tokens`."""
        self.count += 1
        self.known = self.known or self.count >= _ENOUGH + _FOR_EACH_RUNNING * self.running
        share = max(_OF_THE_NEW, 1.0 / self.count)
        whole = tokens >= _ALL_BUT * max_tokens
        self.used_up += share * (whole - self.used_up)
        if whole:
            return
        self.others += 1
        share = max(_OF_THE_NEW, 1.0 / self.others)
        self.mean += share * (tokens - self.mean)
        self._count(tokens)

    def expected(self, max_tokens: float) -> float:
        """Return the expected length of an answer with the token limit `max_tokens`."""
        return self.used_up * max_tokens + (1.0 - self.used_up) * min(max_tokens, self.mean)

    def likely_most(self, max_tokens: float) -> float:
        """Return a length that only a few answers with the token limit `max_tokens` exceed."""
        if self.others < _ENOUGH or self.used_up > _OF_THE_NEW:
            return max_tokens
        return min(max_tokens, self._likely_most)

    def _count(self, tokens: int) -> None:
        buckets = self._buckets
        bucket = int(math.log(max(1, tokens)) / _BUCKET)
        buckets.extend([0.0] * (bucket + 1 - len(buckets)))
        buckets[bucket] += 1.0
        total = sum(buckets)
        if total > _KEPT:
            self._buckets = buckets = [0.5 * count for count in buckets]
            total *= 0.5
        beyond, last = 0.0, len(buckets) - 1
        while beyond + buckets[last] <= _BEYOND * total:
            beyond += buckets[last]
            last -= 1
        self._likely_most = math.exp((last + 1) * _BUCKET) * (1.0 + _FEW / total)


def expected_tokens(lengths: OutputLengths, of_all: OutputLengths, max_tokens: float) -> float:
    """Return the expected length of an answer with the token limit `max_tokens`, based on the tenant's
    answers (`lengths`) if enough of them have finished, otherwise on all tenants' answers (`of_all`)."""
    known = lengths if lengths.known else of_all
    return known.expected(max_tokens) if known.known else min(max_tokens, UNKNOWN_TOKENS)


def most_tokens(lengths: OutputLengths, of_all: OutputLengths, max_tokens: float) -> float:
    """Return a length that only a few answers with the token limit `max_tokens` exceed, based on the same
    answers as the result of `expected_tokens`."""
    known = lengths if lengths.known else of_all
    return known.likely_most(max_tokens) if known.known else min(max_tokens, _UNKNOWN_MAX_TOKENS)
