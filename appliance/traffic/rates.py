"""A replica's speed: predicted at first, then measured from the replica's reports.

All measurements are decaying sums over recent steps, so they do not depend on how often the replica reports.
A replica's initial (warm-up) steps are ignored, because they can take many times longer than later ones.
Until enough steps have been measured, the engine's predictions are used. The predictions are lower bounds, so
a request that is refused because of them would also be refused based on measured times. Without a prediction,
no rate is known, and no request is refused because of its waiting time.
"""

from __future__ import annotations

from engine.rank_messages import Report

_HALF_LIFE_S = 2.0
"""Default half-life, in seconds. Admission must notice quickly when a replica becomes slower."""
_ENOUGH_S = 0.1
"""Total measured step time, in seconds, after which measurements replace the prediction."""
FIRST_STEPS = 16
"""Number of warm-up steps of each kind to ignore after a replica has started. They are slow because kernels
are being loaded, memory is being allocated, and caches are empty."""
_SPREAD_SEQS = 2.0
"""Minimum variance of the batch size. Below this, the time that each additional sequence adds to a step
cannot be measured."""


class DecayingMean:
    """A mean that discounts older values: a decaying sum of `value` divided by a decaying sum of `weight`."""

    __slots__ = ("value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.weight = 0.0

    def add(self, value: float, weight: float, keep: float) -> None:
        """Add a value and multiply the weights of all earlier values by `keep` (0 to 1)."""
        self.value = self.value * keep + value
        self.weight = self.weight * keep + weight

    @property
    def ratio(self) -> float:
        """The mean; 0 before the first value."""
        return self.value / self.weight if self.weight > 0 else 0.0


class _FirstSteps:
    """Identifies reports that include any of a replica's warm-up steps of one kind."""

    def __init__(self) -> None:
        self._seen = 0

    def contains(self, steps: int) -> bool:
        """True if the next report, which covers `steps` steps, includes any warm-up steps."""
        first = self._seen < FIRST_STEPS
        self._seen += steps
        return first


class ReplicaRates:
    """A replica's times per step and per prompt token. `step_s` is the mean step time, including the time for
    prompts computed in the step. A running sequence therefore waits this long for each token.
    `prompt_token_s` is the time that a prompt token adds to a step.
    """

    def __init__(self, half_life_s: float = _HALF_LIFE_S) -> None:
        """`half_life_s` is the busy time, in seconds, after which a measurement's weight has halved."""
        self._half_life_s = half_life_s
        self.busy_s = 0.0
        """Total measured step time since the replica started, in seconds."""
        self.running = 0
        """Number of running sequences as of the last report."""
        self._predicted_step_s = 0.0
        self._predicted_prompt_token_s = 0.0
        self._first_decodes, self._first_mixed = _FirstSteps(), _FirstSteps()
        self._steps = DecayingMean()
        self._decode = DecayingMean()
        self._batch_size = DecayingMean()
        self._batch_size_squared = DecayingMean()
        self._batch_size_by_s = DecayingMean()
        self._prompts = DecayingMean()
        self._cached = DecayingMean()
        self._computed_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def predict(self, step_s: float, prompt_token_s: float) -> None:
        """Set lower bounds for the step time and for the time that a prompt token adds to it (0 if unknown).
        They are used until enough steps have been measured."""
        self._predicted_step_s, self._predicted_prompt_token_s = step_s, prompt_token_s

    @property
    def known(self) -> bool:
        """Whether the rates have been measured or predicted."""
        return self.measured or self._predicted_step_s > 0

    @property
    def measured(self) -> bool:
        """Whether enough steps have been measured to replace the prediction."""
        return self.busy_s >= _ENOUGH_S

    @property
    def step_s(self) -> float:
        """Mean recent step time."""
        return self._steps.ratio if self.measured else self._predicted_step_s

    @property
    def prompt_token_s(self) -> float:
        """Time that a computed prompt token adds to a step; 0 while unknown."""
        return self._prompts.ratio or self._predicted_prompt_token_s

    @property
    def computed_share(self) -> float:
        """Fraction of prompt tokens that had to be computed because they were not in the prefix cache."""
        return 1.0 - min(1.0, self._cached.ratio)

    def step_at(self, size: float) -> float:
        """Return the step time with `size` sequences: the recent mean, scaled from the recent batch size to
        `size`."""
        now = self.decode_s(self.running)
        return self.step_s * max(1.0, self.decode_s(size) / now) if now > 0 else self.step_s

    def learn(self, report: Report) -> None:
        """Update the rates with the steps since the previous report."""
        self.running = report.running
        computed = report.computed_tokens - self._computed_tokens
        started = report.prompt_tokens - self._prompt_tokens
        found = report.cached_tokens - self._cached_tokens
        self._computed_tokens = report.computed_tokens
        self._prompt_tokens, self._cached_tokens = report.prompt_tokens, report.cached_tokens
        learn_decodes = not self._first_decodes.contains(report.decode_steps)
        learn_mixed = not self._first_mixed.contains(report.mixed_steps)
        decode_steps = report.decode_steps if learn_decodes else 0
        mixed_steps = report.mixed_steps if learn_mixed else 0
        decode_s = decode_steps * report.step_ms / 1e3
        mixed_s = mixed_steps * report.mixed_step_ms / 1e3
        busy_s = decode_s + mixed_s
        self.busy_s += busy_s
        keep = self._keep(busy_s)
        self._steps.add(busy_s, decode_steps + mixed_steps, keep)
        self._cached.add(found, started, keep)
        if decode_steps:
            self._learn_decode(decode_steps, decode_s, report.running)
        if learn_mixed and (computed or mixed_s):
            # How much longer mixed steps took than decode-only steps. A report counts the tokens of planned
            # steps but the time of completed steps, so a step's tokens and time may appear in different
            # reports.
            extra_s = mixed_s - mixed_steps * self.decode_s(report.running)
            self._prompts.add(max(extra_s, 0.1 * mixed_s), computed, self._keep(mixed_s))

    def _learn_decode(self, steps: int, seconds: float, size: int) -> None:
        keep = self._keep(seconds)
        self._decode.add(seconds, steps, keep)
        self._batch_size.add(size * steps, steps, keep)
        self._batch_size_squared.add(size * size * steps, steps, keep)
        self._batch_size_by_s.add(size * seconds, steps, keep)

    def decode_s(self, size: float) -> float:
        """Return the decode-only step time with `size` sequences, by linear regression over the measured
        steps, or the predicted time if none have been measured."""
        if not self._decode.weight:
            return self._predicted_step_s
        mean_s, mean_size = self._decode.ratio, self._batch_size.ratio
        spread = self._batch_size_squared.ratio - mean_size * mean_size
        if spread < _SPREAD_SEQS:
            return mean_s
        slope = max(0.0, (self._batch_size_by_s.ratio - mean_size * mean_s) / spread)
        return max(mean_s + slope * (size - mean_size), 0.1 * mean_s)

    def _keep(self, seconds: float) -> float:
        """Return the factor by which to multiply the weights of earlier measurements after `seconds` of busy
        time."""
        # Annotated because mypy infers Any when a float is raised to a float power.
        kept: float = 0.5 ** (seconds / self._half_life_s)
        return kept
