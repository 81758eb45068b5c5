"""Computes how long an on-demand model stays loaded, based on each tenant's use. A request's `keep_alive`
affects only its own tenant's use, so that no tenant can unload a model that others use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class _Use:
    """One tenant's use of a model."""

    used_at: float
    """When the tenant's latest request was accepted or ended."""
    keep_alive_s: float | None
    """`Admit.keep_alive_s` of the tenant's latest accepted request."""


class ModelUses:
    """Every tenant's use of one model. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def accept(self, tenant: str, keep_alive_s: float | None, now: float) -> None:
        """Record that a request was accepted, with its `Admit.keep_alive_s`."""
        self._uses[tenant] = _Use(now, keep_alive_s)

    def end(self, tenant: str, now: float) -> None:
        """Record that a request has ended."""
        if (use := self._uses.get(tenant)) is not None:
            use.used_at = now

    def leaves_at(self, idle_s: float, loaded_at: float, not_before: float) -> float:
        """Return the time at which to unload the model if no more requests arrive, or infinity to keep it
        loaded. A model stays loaded as long as any tenant's use requires it.

        - `idle_s` is the time to live for tenants whose latest request set no `keep_alive`, or infinity.
        - `loaded_at` is when the model began to load. Earlier uses do not count.
        - `not_before` is the earliest time at which the time to live can begin.
        """
        found = [
            _leaves_at(use, idle_s, not_before) for use in self._uses.values() if use.used_at >= loaded_at
        ]
        return max(found, default=not_before + idle_s)


def _leaves_at(use: _Use, idle_s: float, not_before: float) -> float:
    stays_s = idle_s if use.keep_alive_s is None else use.keep_alive_s
    return max(use.used_at, not_before) + (math.inf if stays_s < 0 else stays_s)
