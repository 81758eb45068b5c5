"""Detects that a replica has stopped sending messages."""

from __future__ import annotations

import time

from engine.messages import LongStep, RankOutbound

SILENT_AFTER_S = 3.0
"""A ready replica that has not reported for this long gets no new requests. Replicas report at least twice a
second. If a replica has announced a long step, the predicted time of the step is added to this limit."""
_MAX_STEP_FACTOR = 10.0
"""A replica is considered hung if a step takes longer than this multiple of the step's predicted time."""


class ReplicaHeartbeat:
    """When a replica's processes sent their latest message."""

    def __init__(self) -> None:
        self.silent = False
        """Whether the replica is ready but has not sent a message for `SILENT_AFTER_S`."""
        self._latest_at = 0.0
        self._expected_s = 0.0
        """Predicted duration of a long step that the replica has announced."""

    @property
    def silent_s(self) -> float:
        """Time since the latest message, or since the start if there was none, in seconds."""
        return time.monotonic() - self._latest_at

    def hang_limit_s(self, timeout_s: float) -> float:
        """Return how long the replica may go without sending a message before it is killed, in seconds. The
        limit is `timeout_s`, but longer than any announced step."""
        return max(timeout_s, _MAX_STEP_FACTOR * self._expected_s)

    def start(self) -> None:
        """Handle a start of the processes."""
        self._latest_at, self._expected_s = time.monotonic(), 0.0

    def end(self) -> None:
        """Handle the exit of the processes."""
        self.silent = False

    def received(self, message: RankOutbound) -> bool:
        """Handle a message. Return whether it ends a silence."""
        self._latest_at = time.monotonic()
        self._expected_s = message.expected_s if isinstance(message, LongStep) else 0.0
        was_silent, self.silent = self.silent, False
        return was_silent

    def falls_silent(self) -> bool:
        """Check a ready replica. Return whether a silence has begun since the last call."""
        if self.silent or self.silent_s <= SILENT_AFTER_S + self._expected_s:
            return False
        self.silent = True
        return True
