"""Predicts a step's duration from its size and the speed measured in earlier steps. Rank 0 announces long
steps to the core, which would otherwise assume that the replica is hung. The prediction need not be exact,
because the core multiplies it by a safety factor before killing a replica.
"""

from __future__ import annotations

from engine.plan import StepPlan

MIN_CPU_FLOPS, MIN_GPU_FLOPS = 1e9, 1e12
"""Conservative rates, in operations per second, that any CPU and any GPU can reach. Used until a step of the
same kind has been measured."""
_KEEP = 0.8
"""Factor by which the totals of earlier steps are multiplied at each new step. With this value, the average
depends mainly on the last five steps."""


class _Speed:
    """Speed of decode-only or mixed steps in operations per second, averaged over recent steps."""

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._work = self._seconds = 0.0

    def learn(self, work: float, seconds: float) -> None:
        self._work = _KEEP * self._work + work
        self._seconds = _KEEP * self._seconds + seconds

    def seconds(self, work: float) -> float:
        return work * self._seconds / self._work if self._work > 0 else work / self._assumed


class StepForecast:
    """Predicts step durations. Decode-only steps, which are limited by memory bandwidth, and steps with
    prompts, which are limited by arithmetic, are measured separately."""

    def __init__(self, *, parameters: int, attention_width: int, on_gpu: bool) -> None:
        """Create a forecast for one model. `attention_width` is layers × heads × head_dim, summed over all
        ranks."""
        self._per_token = 2.0 * parameters
        self._per_pair = 4.0 * attention_width
        assumed = MIN_GPU_FLOPS if on_gpu else MIN_CPU_FLOPS
        self._decode, self._mixed = _Speed(assumed), _Speed(assumed)

    def predict_s(self, plan: StepPlan) -> float:
        """Return the predicted duration of the step in seconds."""
        return self._speed(plan).seconds(self._work(plan))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Record the measured duration of the step in seconds."""
        self._speed(plan).learn(self._work(plan), seconds)

    def _speed(self, plan: StepPlan) -> _Speed:
        return self._mixed if plan.chunks else self._decode

    def _work(self, plan: StepPlan) -> float:
        """Return the number of arithmetic operations in the step. Every token in a chunk is assumed to attend
        to all tokens up to the chunk's end."""
        work = len(plan.decodes) * self._per_token
        for chunk in plan.chunks:
            tokens = len(chunk.token_ids)
            work += tokens * (self._per_token + self._per_pair * (chunk.start + tokens))
        return work
