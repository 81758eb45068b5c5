"""Detects when a replica has stopped sending messages."""

from __future__ import annotations

import time

from engine.rank_messages import LongStep, RankOutbound

SILENT_AFTER_S = 3.0
"""A ready replica that has not reported for this long gets no new requests. Replicas report at least twice a
second. If a replica has announced a long step, the step's predicted time is added to this limit."""
_MAX_STEP_FACTOR = 10.0
"""A replica counts as hung if an announced step takes longer than this multiple of its predicted time."""


class ReplicaHeartbeat:
    """Tracks when a replica's processes last sent a message."""

    def __init__(self) -> None:
        self.silent = False
        """Whether the replica is ready but has sent no message for `SILENT_AFTER_S`."""
        self._latest_at = 0.0
        self._expected_s = 0.0
        """Predicted duration of a long step announced by the replica."""

    @property
    def silent_s(self) -> float:
        """Time in seconds since the replica's latest message or, if it has sent none, since its start."""
        return time.monotonic() - self._latest_at

    def hang_limit_s(self, timeout_s: float) -> float:
        """Return the number of seconds without a message after which the replica is killed: `timeout_s`, or
        more if the replica has announced a longer step."""
        return max(timeout_s, _MAX_STEP_FACTOR * self._expected_s)

    def start(self) -> None:
        """Record that the replica's processes have been started."""
        self._latest_at, self._expected_s = time.monotonic(), 0.0

    def end(self) -> None:
        """Record that the replica's processes have exited."""
        self.silent = False

    def received(self, message: RankOutbound) -> bool:
        """Record that the replica has sent a message. Return whether the replica had been silent."""
        self._latest_at = time.monotonic()
        self._expected_s = message.expected_s if isinstance(message, LongStep) else 0.0
        was_silent, self.silent = self.silent, False
        return was_silent

    def falls_silent(self) -> bool:
        """True if a ready replica has become silent since the last call."""
        if self.silent or self.silent_s <= SILENT_AFTER_S + self._expected_s:
            return False
        self.silent = True
        return True
