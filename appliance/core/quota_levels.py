"""Keeps what is left of quotas over restarts: in `history.db`, beside the requests that used the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from appliance.traffic.quotas import Quotas
from store.errors import StoreError
from store.quotas import QuotaLog, read_quotas

log = logging.getLogger(__name__)

_SAVE_EVERY_S = 2.0
"""What comes in between is in the request log: only a start after a crash reads it from there."""


class LevelKeeper:
    """Writes the levels down while the service runs. Belongs to the event loop's thread."""

    def __init__(self, quotas: Quotas, quota_log: QuotaLog) -> None:
        self._quotas = quotas
        self._log = quota_log
        self._timer: asyncio.TimerHandle | None = None

    def restore(self, path: Path) -> None:
        """Go on where the last run ended, by the database at `path`. To be called once, when the quotas know
        their policies and before the first request."""
        try:
            state = read_quotas(path)
        except StoreError as error:
            log.error("what is left of quotas cannot be read, all of them begin full: %s", error)
            return
        self._quotas.restore(state, time.time())

    def start(self) -> None:
        """Write every few seconds from now on."""
        self._timer = asyncio.get_running_loop().call_later(_SAVE_EVERY_S, self.start)
        self.save()

    def save(self) -> None:
        """Write what has changed."""
        levels, gone = self._quotas.news(time.time())
        if (levels or gone) and not self._log.save(levels, gone):
            self._quotas.remember(gone)

    def close(self) -> None:
        """Write for the last time, after the last request has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self.save()
