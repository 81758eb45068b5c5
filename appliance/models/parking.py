"""The state of a parked unit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass
class Parked:
    """A unit without replicas, or with sleeping replicas, whose requests wait until the unit is loaded or
    woken."""

    drain_ends_at: float = 0.0
    """The event loop's time until which running requests may finish."""
    asleep: bool = False
    """Whether the unit's replicas sleep instead of being stopped."""

    @property
    def drain_left_s(self) -> float:
        """Time that the running requests have left to finish, in seconds."""
        return max(0.0, self.drain_ends_at - asyncio.get_running_loop().time())
