"""Sums the results of shadow traffic: requests that were copied to a second model or version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from appliance.channel.front_messages import ShadowDone, ShadowMeasure


@dataclass
class MeasureSum:
    """Measurements summed over either the original answers or the answers to copied requests."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    tokens: int = 0

    def add(self, measure: ShadowMeasure) -> None:
        """Add one answer's measurements to the sums."""
        self.ttft_s += measure.ttft_s
        self.e2e_s += measure.e2e_s
        self.tokens += measure.tokens


@dataclass
class ShadowSums:
    """One shadow's results since it was configured. `name` is the model name that clients request, and `unit`
    is the model or version to which requests are copied."""

    name: str
    unit: str
    compared: int = 0
    dropped: int = 0
    failed: int = 0
    originals: MeasureSum = field(default_factory=MeasureSum)
    copies: MeasureSum = field(default_factory=MeasureSum)
    greedy: int = 0
    """Number of compared requests with greedy sampling and the same prompt tokens for both models."""
    greedy_tokens: int = 0
    """Number of answer tokens of the requests counted in `greedy`. For each request, only the longer of the
    two answers counts."""
    equal_tokens: int = 0
    """Number of tokens before the first difference between the two answers, summed over the requests counted
    in `greedy`."""


class ShadowResults:
    """The results of all shadow traffic."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], ShadowSums] = {}

    def __iter__(self) -> Iterator[ShadowSums]:
        return iter(self._sums.values())

    def end(self, name: str) -> None:
        """Drop the results of all shadows configured for `name`."""
        self._sums = {key: sums for key, sums in self._sums.items() if key[0] != name}

    def of(self, name: str, unit: str) -> ShadowSums:
        """Return a shadow's results since it was configured or the service started, whichever is later."""
        return self._sums.get((name, unit)) or ShadowSums(name, unit)

    def add(self, done: ShadowDone) -> None:
        """Add the result of one copied request."""
        sums = self._sums.setdefault((done.name, done.unit), ShadowSums(done.name, done.unit))
        if done.outcome == "dropped":
            sums.dropped += 1
        elif done.original is None or done.copy is None:
            sums.failed += 1
        else:
            sums.compared += 1
            sums.originals.add(done.original)
            sums.copies.add(done.copy)
            if done.equal_tokens is not None:
                sums.greedy += 1
                sums.greedy_tokens += max(done.original.tokens, done.copy.tokens)
                sums.equal_tokens += done.equal_tokens
