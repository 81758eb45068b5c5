"""Defines a scheduled step, which consists of a plan and the sequences that receive the results."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import StepPlan
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """A prefill chunk of a plan, with its sequence and its range of positions."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    samples: bool
    """Whether tokens are sampled from the end of the chunk. If so, a sampled BAD_TOKEN shows that the chunk's
    values are not finite."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan with the sequences that receive its results."""

    plan: StepPlan
    sampling: list[Sequence]
    """Sequence of each sampling slot, in the order of `StepTokens`."""
    chunks: list[ScheduledChunk]
    """One entry per chunk of the plan."""
    had_work: bool = False
    """Whether at least one sequence of this step had already arrived when the previous step was planned."""
