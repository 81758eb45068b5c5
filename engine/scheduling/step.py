"""A scheduled step: its plan, and the sequences to which its results belong."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import StepPlan
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """A chunk of a plan: its sequence, and the positions that it covers."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    samples: bool
    """Whether tokens are sampled after the chunk. Those tokens then show whether the chunk's values are
    finite."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and the sequences to which its results belong."""

    plan: StepPlan
    sampling: list[Sequence]
    """The sequence of each sampling slot, in the order of `StepTokens`."""
    chunks: list[ScheduledChunk]
    """One for each chunk of the plan."""
    had_work: bool = False
    """Whether a sequence of this step had already arrived when the previous step was planned."""
