"""Saves quota levels in `history.db`, alongside the request log, so that they survive a restart."""

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
"""Interval between saves, in seconds. After a crash, changes since the last save are reconstructed from the
request log."""


class LevelKeeper:
    """Saves the quota levels periodically. Must be used on the event loop thread."""

    def __init__(self, quotas: Quotas, quota_log: QuotaLog) -> None:
        self._quotas = quotas
        self._log = quota_log
        self._timer: asyncio.TimerHandle | None = None

    def restore(self, path: Path) -> None:
        """Restore the quota levels saved by the previous run in the database at `path`. Call this once, after
        setting the quota policies and before the first request."""
        try:
            state = read_quotas(path)
        except StoreError as error:
            log.error("the saved quota levels cannot be read, so all quotas start unused: %s", error)
            return
        self._quotas.restore(state, time.time())

    def start(self) -> None:
        """Save the quota levels now, and again every few seconds."""
        self._timer = asyncio.get_running_loop().call_later(_SAVE_EVERY_S, self.start)
        self.save()

    def save(self) -> None:
        """Save the quota levels that have changed since the last save."""
        levels, deleted = self._quotas.news(time.time())
        if (levels or deleted) and not self._log.save(levels, deleted):
            self._quotas.remember(deleted)

    def close(self) -> None:
        """Save the quota levels one last time. Call this after the last request has finished."""
        if self._timer is not None:
            self._timer.cancel()
        self.save()
