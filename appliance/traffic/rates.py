"""How fast a replica was measured to be, learned from its reports.

All figures are decaying sums over what it did lately, so none depends on how often it reports. Nothing is
known before it has worked for a moment; until then nothing is predicted, and so nothing refused.
"""

from __future__ import annotations

from engine.messages import Report

_HALF_LIFE_S = 2.0
"""Of busy time: how fast what was measured is forgotten."""
_ENOUGH_S = 0.1
"""Busy time after which a figure counts as known."""
_SPREAD_ROWS = 2.0
"""Variance of the batch above which the steps tell what one more row costs."""


class DecayingMean:
    """Sum of `value` over sum of `weight`, both decaying."""

    __slots__ = ("value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.weight = 0.0

    def add(self, value: float, weight: float, keep: float) -> None:
        """Count one more, and of those before it `keep` (0 to 1)."""
        self.value = self.value * keep + value
        self.weight = self.weight * keep + weight

    @property
    def ratio(self) -> float:
        """The mean; 0 before the first."""
        return self.value / self.weight if self.weight > 0 else 0.0


class ReplicaRates:
    """What one replica does in a second.

    `step_s` is the mean time of a step, prompts computed in it included: what a running sequence waits for
    each token. `prompt_token_s` is what a prompt's token adds to a step.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Since its start."""
        self.rows = 0
        """Sequences that ran at the last report."""
        self._steps = DecayingMean()
        self._decode = DecayingMean()
        self._rows = DecayingMean()
        self._rows_squared = DecayingMean()
        self._rows_by_s = DecayingMean()
        self._prompts = DecayingMean()
        self._cached = DecayingMean()
        self._computed_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    @property
    def known(self) -> bool:
        """Whether it has worked long enough to be predicted."""
        return self.busy_s >= _ENOUGH_S

    @property
    def step_s(self) -> float:
        """Seconds of a step, of late."""
        return self._steps.ratio

    @property
    def prompt_token_s(self) -> float:
        """Seconds that a computed prompt token costs; 0 while none has been."""
        return self._prompts.ratio

    @property
    def computed_share(self) -> float:
        """Part of the prompts' tokens that had to be computed: the others were in the prefix cache."""
        return 1.0 - min(1.0, self._cached.ratio)

    def step_at(self, rows: float) -> float:
        """Seconds of a step with so many rows: what is measured now, scaled by what steps of other batches
        took."""
        now = self.decode_s(self.rows)
        return self.step_s * max(1.0, self.decode_s(rows) / now) if now > 0 else self.step_s

    def learn(self, report: Report) -> None:
        """Take in what a report says about the steps since the one before."""
        self.rows = report.running
        decode_s = report.decode_steps * report.step_ms / 1e3
        mixed_s = report.mixed_steps * report.mixed_step_ms / 1e3
        computed = report.computed_tokens - self._computed_tokens
        started = report.prompt_tokens - self._prompt_tokens
        found = report.cached_tokens - self._cached_tokens
        self._computed_tokens = report.computed_tokens
        self._prompt_tokens, self._cached_tokens = report.prompt_tokens, report.cached_tokens
        busy_s = decode_s + mixed_s
        self.busy_s += busy_s
        keep = _keep(busy_s)
        self._steps.add(busy_s, report.decode_steps + report.mixed_steps, keep)
        self._cached.add(found, started, keep)
        if report.decode_steps:
            self._learn_decode(report.decode_steps, decode_s, report.running)
        if computed or mixed_s:
            # What a step with prompts takes longer than one that only decodes. Its tokens count from when it
            # is planned, its time from when it has ended: often in another report.
            extra_s = mixed_s - report.mixed_steps * self.decode_s(report.running)
            self._prompts.add(max(extra_s, 0.1 * mixed_s), computed, _keep(mixed_s))

    def _learn_decode(self, steps: int, seconds: float, rows: int) -> None:
        keep = _keep(seconds)
        self._decode.add(seconds, steps, keep)
        self._rows.add(rows * steps, steps, keep)
        self._rows_squared.add(rows * rows * steps, steps, keep)
        self._rows_by_s.add(rows * seconds, steps, keep)

    def decode_s(self, rows: float) -> float:
        """Seconds of a step that only decodes, by a straight line through what was measured; 0 if nothing."""
        mean_s, mean_rows = self._decode.ratio, self._rows.ratio
        spread = self._rows_squared.ratio - mean_rows * mean_rows
        if spread < _SPREAD_ROWS:
            return mean_s
        slope = max(0.0, (self._rows_by_s.ratio - mean_rows * mean_s) / spread)
        return max(mean_s + slope * (rows - mean_rows), 0.1 * mean_s)


def _keep(seconds: float) -> float:
    # A float, whatever ** of two floats may be.
    kept: float = 0.5 ** (seconds / _HALF_LIFE_S)
    return kept
