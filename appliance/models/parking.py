"""The state of models that accept requests although none of their replicas is awake."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Parked:
    """A model without replicas, or with sleeping replicas. Its requests wait until the model is loaded or
    woken."""

    drain_ends_at: float = 0.0
    """Deadline for running requests to finish, on the event loop's clock."""
    asleep: bool = False
    """Whether to put the model's replicas to sleep instead of stopping them."""

    @property
    def drain_left_s(self) -> float:
        """Time in seconds left for running requests to finish."""
        return max(0.0, self.drain_ends_at - asyncio.get_running_loop().time())
