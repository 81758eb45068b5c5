"""Defines a scheduled step: a plan and the sequences that receive its results."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import StepPlan
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """A prefill chunk in a plan, with its sequence and its range of positions."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    samples: bool
    """Whether tokens are sampled at the end of the chunk. If so, a sampled BAD_TOKEN shows that the chunk
    computed non-finite values."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan and the sequences that receive its results."""

    plan: StepPlan
    sampling: list[Sequence]
    """The sequence of each sampling slot, in the order of `StepTokens`."""
    chunks: list[ScheduledChunk]
    """One entry per chunk of the plan."""
    had_work: bool = False
    """Whether any sequence of this step had already arrived when the previous step was planned."""
