"""Logs client-caused events in batches, one line for many events, so that a flood cannot fill the journal."""

from __future__ import annotations

import asyncio
import logging

from appliance.http.peers import Peer

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


class CountedLog:
    """Counts events of one kind and logs them in batches."""

    def __init__(self, text: str) -> None:
        """`text` describes the event, in the plural."""
        self.total = 0
        self._text = text
        self._logged = 0
        self._latest = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, peer: Peer | None) -> None:
        """Count an event."""
        self.total += 1
        self._latest = "an unknown address" if peer is None else str(peer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def _write(self) -> None:
        self._timer = None
        count, self._logged = self.total - self._logged, self.total
        log.warning("%s: %d within %.0f s, the latest from %s", self._text, count, LOG_EVERY_S, self._latest)
