"""Logs requests without a valid identity: one line for many, so that a flood cannot fill the journal."""

from __future__ import annotations

import asyncio
import logging

from appliance.http import Peer

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


class DenialLog:
    """Counts denied requests and logs them together."""

    def __init__(self) -> None:
        self.total = 0
        self._logged = 0
        self._latest = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, peer: Peer) -> None:
        """Count a denied request."""
        self.total += 1
        self._latest = str(peer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def _write(self) -> None:
        self._timer = None
        count, self._logged = self.total - self._logged, self.total
        log.warning(
            "%d request%s without a valid key or user denied within %.0f s, the latest from %s",
            count,
            "" if count == 1 else "s",
            LOG_EVERY_S,
            self._latest,
        )
