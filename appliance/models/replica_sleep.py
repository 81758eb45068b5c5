"""One replica's sleep state, and any transition in progress."""

from __future__ import annotations

import asyncio
import time

from appliance.quantities import of_bytes
from engine.client import ReplicaGroup
from engine.rank_messages import MemoryChanged

KILLED_WITHIN_S = 30.0
"""Time limit for processes to exit after SIGKILL. A process waiting for a device or disk (process state D)
may take longer."""


class ReplicaSleep:
    """Puts a replica's processes to sleep or wakes them. All methods must be called on the event loop
    thread."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the replica is asleep, about to go to sleep, or waking up. `appliance.models.unit_sleep`
        sets this field."""
        self.asleep = False
        """Whether the replica has released its memory and not yet restored it."""
        self.sleeps = self.wakes = 0
        """How often the replica has gone to sleep, and how often it has been woken."""
        self.wake_s = 0.0
        """Total time spent waking the replica, in seconds."""
        self._latest = MemoryChanged(False)
        self._since = 0.0
        self._pending: asyncio.Future[MemoryChanged] | None = None

    @property
    def freed_bytes(self) -> int:
        """Device memory that the sleeping replica has released, in bytes."""
        return self._latest.freed_bytes if self.asleep else 0

    @property
    def host_bytes(self) -> int:
        """Host memory occupied by copies of the sleeping replica's weights, in bytes."""
        return self._latest.host_bytes if self.asleep else 0

    @property
    def detail(self) -> str:
        """Explanation of the sleep state, for operators."""
        if not self._latest.asleep:
            return "its processes have exited; waking reloads the model"
        held = f"; weights in host memory: {of_bytes(self.host_bytes)}" if self.host_bytes else ""
        minutes = (time.monotonic() - self._since) / 60
        return f"asleep for {minutes:.0f} min, {of_bytes(self.freed_bytes)} released{held}"

    async def change(self, group: ReplicaGroup, asleep: bool, timeout_s: float) -> str:
        """Put the replica to sleep if `asleep` is true; otherwise, wake it. Return the reason if this fails,
        otherwise an empty string. A replica that does not answer within `timeout_s` is killed, and this
        method waits for its exit for up to `KILLED_WITHIN_S`."""
        pending = self._pending = asyncio.get_running_loop().create_future()
        try:
            group.change_memory(asleep)
            await asyncio.wait([pending], timeout=timeout_s)
            if pending.done():
                return pending.result().problem
            group.kill(problem := f"it did not {'go to sleep' if asleep else 'wake'} within {timeout_s:g} s")
            await asyncio.wait([pending], timeout=KILLED_WITHIN_S)
            return problem
        finally:
            self._pending = None

    def stats(self) -> dict[str, float]:
        """Return the sleep-related fields of `ReplicaStatus`."""
        return {
            "freed_bytes": self.freed_bytes,
            "host_bytes": self.host_bytes,
            "sleeps": self.sleeps,
            "wakes": self.wakes,
            "wake_s": self.wake_s,
        }

    def changed(self, message: MemoryChanged) -> None:
        """Record the engine's answer to a request to sleep or wake and pass the answer to the waiting
        caller."""
        if message.asleep and not self.asleep:
            self.sleeps += 1
        elif self.asleep and not message.asleep:
            self.wakes += 1
            self.wake_s += message.seconds
        if not message.problem:
            self._latest, self._since = message, time.monotonic()
        self.asleep = message.asleep
        self._answer(message)

    def ended(self, reason: str) -> bool:
        """Record that the replica's processes have exited. Return whether the replica stays asleep. If so,
        the processes are restarted only when the replica is woken, because a different model may now be using
        the memory."""
        waking = self._pending is not None
        self._latest = MemoryChanged(False)
        self.asleep = self.asleep and not waking
        self._answer(MemoryChanged(False, problem=reason))
        return self.asleep

    def _answer(self, message: MemoryChanged) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(message)
