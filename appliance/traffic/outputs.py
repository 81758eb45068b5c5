"""How long answers are: learned from those that ended, for a tenant or for all."""

from __future__ import annotations

_OF_THE_NEW = 0.05
"""Weight of the latest answer, once there are enough for their mean not to be better."""
_ENOUGH = 8
"""Answers after which their lengths tell something."""
_DEVIATIONS = 5.0
UNKNOWN_TOKENS = 256.0
"""Expected of an answer before any has ended."""


class OutputLengths:
    """Running mean and mean deviation of answers' tokens (as TCP estimates round trips, RFC 6298)."""

    __slots__ = ("count", "deviation", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def learn(self, tokens: int) -> None:
        """An answer of so many tokens has ended."""
        self.count += 1
        share = max(_OF_THE_NEW, 1.0 / self.count)
        self.deviation += share * (abs(tokens - self.mean) - self.deviation) if self.count > 1 else 0.0
        self.mean += share * (tokens - self.mean)

    @property
    def known(self) -> bool:
        """Whether enough answers have ended."""
        return self.count >= _ENOUGH

    def likely_most(self) -> float:
        """Tokens that hardly any answer is longer than."""
        return self.mean + _DEVIATIONS * self.deviation


def expected_tokens(lengths: OutputLengths, of_all: OutputLengths, most: float) -> float:
    """What an answer of at most `most` tokens is expected to have: by its tenant's answers, or else by
    everybody's."""
    known = lengths if lengths.known else of_all
    return min(most, known.mean if known.known else UNKNOWN_TOKENS)


def most_tokens(lengths: OutputLengths, of_all: OutputLengths, most: float) -> float:
    """What an answer of at most `most` tokens hardly exceeds; `most` while nobody knows better."""
    known = lengths if lengths.known else of_all
    return min(most, known.likely_most()) if known.known else most
