"""Computes how long a model that was loaded on demand stays loaded, based on each tenant's use.

`keep_alive` in a request applies only to the use by the request's own tenant. Otherwise, a tenant could
unload a model that other tenants use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class _Use:
    """One tenant's use of a model."""

    used_at: float
    """When the latest request was accepted or ended."""
    keep_alive_s: float | None
    """`Admit.keep_alive_s` of the latest accepted request."""


class ModelUses:
    """All tenants' use of one model. All times are in seconds on the same clock, which never jumps."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def accept(self, tenant: str, keep_alive_s: float | None, now: float) -> None:
        """Count an accepted request, with its `Admit.keep_alive_s`."""
        self._uses[tenant] = _Use(now, keep_alive_s)

    def end(self, tenant: str, now: float) -> None:
        """Count the end of a request."""
        if (use := self._uses.get(tenant)) is not None:
            use.used_at = now

    def leaves_at(self, idle_s: float, loaded_at: float, not_before: float) -> float:
        """Return the time until which the model stays loaded if no further request arrives: the latest of the
        tenants' times. Infinite if it stays loaded.

        - `idle_s` is the time to live of a use without `keep_alive`; infinite if there is no limit.
        - `loaded_at` is the time at which loading the model began. Uses that ended earlier do not count.
        - `not_before` is the earliest time from which the time to live is counted.
        """
        found = [
            _leaves_at(use, idle_s, not_before) for use in self._uses.values() if use.used_at >= loaded_at
        ]
        return max(found, default=not_before + idle_s)


def _leaves_at(use: _Use, idle_s: float, not_before: float) -> float:
    stays_s = idle_s if use.keep_alive_s is None else use.keep_alive_s
    return max(use.used_at, not_before) + (math.inf if stays_s < 0 else stays_s)
