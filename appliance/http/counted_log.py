"""Logs events that are caused by clients. Many events are combined into one line, so that a flood of events
cannot fill the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from appliance.http.peers import Peer

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
MANY = 100
"""A problem is reported to operators if this many events occur within `LOG_EVERY_S` seconds."""


class CountedLog:
    """Counts one kind of event and logs the events in batches."""

    def __init__(self, text: str, on_many: Callable[[str], None] = lambda _: None) -> None:
        """`text` describes the kind of event. `on_many` reports a batch of at least `MANY` events as a
        problem."""
        self.total = 0
        self._on_many = on_many
        self._text = text
        self._logged = 0
        self._latest = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, peer: Peer | None, description: str = "") -> None:
        """Count an event. `description` describes this particular event."""
        self.total += 1
        self._latest = ("an unknown address" if peer is None else str(peer)) + (
            description and f": {description}"
        )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def _write(self) -> None:
        self._timer = None
        count, self._logged = self.total - self._logged, self.total
        log.warning("%s: %d within %.0f s, the latest from %s", self._text, count, LOG_EVERY_S, self._latest)
        if count >= MANY:
            self._on_many(f"{self._text}: at least {MANY} within {LOG_EVERY_S:.0f} s; see the log")
