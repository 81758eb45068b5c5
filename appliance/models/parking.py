"""The state of a model that accepts requests although it has no awake replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Parked:
    """A model without replicas, or with sleeping replicas. Its requests wait until the model is loaded or
    woken."""

    drain_ends_at: float = 0.0
    """Time on the event loop's clock until which running requests may finish."""
    asleep: bool = False
    """Whether the model's replicas are put to sleep instead of being stopped."""

    @property
    def drain_left_s(self) -> float:
        """Time in seconds that the running requests have left to finish."""
        return max(0.0, self.drain_ends_at - asyncio.get_running_loop().time())
