"""How long answers are: learned from those that ended, for a tenant or for all."""

from __future__ import annotations

import math

_OF_THE_NEW = 0.05
"""Weight of the latest answer, once there are enough for their mean not to be better."""
_ENOUGH = 8
"""Answers after which their lengths tell something."""
_FOR_EACH_RUNNING = 2
"""And as many for each one that runs: short answers end first, and the first that ended mislead."""
_BUCKET = math.log(1.15)
"""Lengths are counted in buckets, each so much (as a logarithm) wider than the one before."""
_BEYOND = 0.01
"""Part of the answers that are longer than what hardly any is."""
_KEPT = 2000.0
"""Answers that the buckets hold before all count half."""
_FEW = 20.0
"""With so many answers in the buckets, what hardly any exceeds is twice the longest."""
_ALL_BUT = 0.98
"""An answer with this part of its most tokens has used them."""
UNKNOWN_TOKENS = 256.0
"""Expected of an answer while nothing is known."""
_UNKNOWN_MOST_TOKENS = 2048.0
"""What hardly any answer exceeds, while nothing is known."""


class OutputLengths:
    """How often answers are as long as they may be; and of the others, the running mean and how they are
    distributed."""

    __slots__ = ("_buckets", "_likely_most", "count", "known", "mean", "others", "running", "used_up")

    def __init__(self) -> None:
        self.count = 0
        self.running = 0
        """Answers that are being made."""
        self.known = False
        """Whether enough have ended to tell something."""
        self.used_up = 0.0
        """Part of the answers that used all tokens that they might."""
        self.others = 0
        self.mean = 0.0
        self._buckets: list[float] = []
        self._likely_most = 0.0

    def learn(self, tokens: int, most: float) -> None:
        """An answer has ended with so many tokens, which might have had `most`."""
        self.count += 1
        self.known = self.known or self.count >= _ENOUGH + _FOR_EACH_RUNNING * self.running
        share = max(_OF_THE_NEW, 1.0 / self.count)
        whole = tokens >= _ALL_BUT * most
        self.used_up += share * (whole - self.used_up)
        if whole:
            return
        self.others += 1
        share = max(_OF_THE_NEW, 1.0 / self.others)
        self.mean += share * (tokens - self.mean)
        self._count(tokens)

    def expected(self, most: float) -> float:
        """Of an answer that may have `most`."""
        return self.used_up * most + (1.0 - self.used_up) * min(most, self.mean)

    def likely_most(self, most: float) -> float:
        """Tokens that hardly any answer that may have `most` is longer than."""
        if self.others < _ENOUGH or self.used_up > _OF_THE_NEW:
            return most
        return min(most, self._likely_most)

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


def expected_tokens(lengths: OutputLengths, of_all: OutputLengths, most: float) -> float:
    """What an answer of at most `most` tokens is expected to have: by its tenant's answers, or else by
    everybody's."""
    known = lengths if lengths.known else of_all
    return known.expected(most) if known.known else min(most, UNKNOWN_TOKENS)


def most_tokens(lengths: OutputLengths, of_all: OutputLengths, most: float) -> float:
    """What an answer of at most `most` tokens hardly exceeds."""
    known = lengths if lengths.known else of_all
    return known.likely_most(most) if known.known else min(most, _UNKNOWN_MOST_TOKENS)
