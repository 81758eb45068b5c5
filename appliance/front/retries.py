"""This front's runs of requests with an `Idempotency-Key`, which retries join or repeat.

    claimed ──► running ──► kept ──► dropped after its time, or for lack of memory
        │          └──► dropped: it failed, or no client came back in time
        └──► forgotten: another front has the run

The core keeps which front has which run (`appliance.front_pool.claims`); the front keeps the answers. When
the front's process ends, its answers are lost, and retries run anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.front.recording import Recording
from appliance.messages import Claim, Claimed, FrontToCore, Release, RetryRules

_RUN_BYTES = 1024
"""Memory of a run in addition to its answer, in bytes."""


class KeyedRun:
    """One run and its answer. It holds neither the prompt nor the connection of its request, since they do
    not count in `bytes`."""

    def __init__(self, scope: bytes, fingerprint: bytes, request_id: str) -> None:
        self.scope = scope
        """A hash of the caller, the endpoint and the key."""
        self.fingerprint = fingerprint
        """A hash of the body."""
        self.request_id = request_id
        self.recording: Recording
        self.claimed = asyncio.Event()
        """Set when the core has answered, so that `is_elsewhere` and `retry_of` are known."""
        self.is_elsewhere = False
        """Whether another front has the run."""
        self.retry_of = ""
        """The request id of an earlier run with the same key, whose answer is lost."""
        self.request_class: int | None = None
        self.status = 500
        self.finish_reason = ""
        self.bytes = _RUN_BYTES
        self.timer: asyncio.TimerHandle | None = None
        """The timer that runs while no client follows a running request, and while an answer is kept."""

    def stop_timer(self) -> None:
        """Stop the timer, if it runs."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Retries:
    """The runs of this front, by scope."""

    def __init__(self, to_core: Callable[[FrontToCore], None]) -> None:
        self.rules = RetryRules()
        self.kept_bytes = 0
        self._to_core = to_core
        self._runs: dict[bytes, KeyedRun] = {}
        self._kept: dict[bytes, KeyedRun] = {}
        """The runs that have ended, oldest first."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, scope: bytes) -> KeyedRun | None:
        """Return the run of this scope, if it is known here."""
        return self._runs.get(scope)

    def claim(self, scope: bytes, fingerprint: bytes, request_id: str) -> KeyedRun:
        """Add a run, and ask the core whether it belongs to this front (`KeyedRun.claimed`)."""
        run = KeyedRun(scope, fingerprint, request_id)
        run.recording = Recording(lambda size: self._grew(run, size), lambda: self._orphaned(run))
        self._runs[scope] = run
        self.kept_bytes += run.bytes
        self._to_core(Claim(scope, request_id))
        return run

    def take(self, message: Claimed) -> None:
        """Handle the core's answer to a claim."""
        run = self._runs.get(message.scope)
        if run is None or run.claimed.is_set():
            return
        run.is_elsewhere, run.retry_of = message.is_elsewhere, message.retry_of
        if run.is_elsewhere:
            self._forget(run)
        run.claimed.set()

    def joined(self, run: KeyedRun) -> None:
        """Note that a client follows the run."""
        if not run.recording.ended:
            run.stop_timer()

    def ended(self, run: KeyedRun, good: bool) -> None:
        """Keep the answer of a run for a while if it is good, and drop it otherwise."""
        run.stop_timer()
        if self._runs.get(run.scope) is not run:
            return
        if not good or self._stopping:
            self._drop(run, void=not good)
            return
        self._kept[run.scope] = run
        run.timer = asyncio.get_running_loop().call_later(self.rules.keep_s, self._drop, run)
        self._make_room()

    def stop(self) -> None:
        """End the runs that no client follows, because the front is stopping."""
        self._stopping = True
        for run in list(self._runs.values()):
            if run.timer is not None and run.scope not in self._kept:
                self._give_up(run)

    def _orphaned(self, run: KeyedRun) -> None:
        known = self._runs.get(run.scope) is run
        if not known or self._stopping or self.rules.grace_s <= 0:
            self._give_up(run)
            return
        run.timer = asyncio.get_running_loop().call_later(self.rules.grace_s, self._give_up, run)

    def _give_up(self, run: KeyedRun) -> None:
        if self._runs.get(run.scope) is run:
            self._drop(run, void=True)
        run.recording.give_up()

    def _grew(self, run: KeyedRun, size: int) -> None:
        if self._runs.get(run.scope) is not run:
            return
        run.bytes += size
        self.kept_bytes += size
        self._make_room()
        if self.kept_bytes > self.rules.max_bytes:
            self._drop(run, void=True)
            run.recording.stop_keeping()
            if not run.recording.followers:
                run.recording.give_up()

    def _make_room(self) -> None:
        while self.kept_bytes > self.rules.max_bytes and self._kept:
            self._drop(next(iter(self._kept.values())), void=True)

    def _drop(self, run: KeyedRun, void: bool = False) -> None:
        """Remove the run here and in the core. `void`: the answer is dropped early."""
        self._forget(run)
        self._to_core(Release(scope=run.scope, request_id=run.request_id, void=void))

    def _forget(self, run: KeyedRun) -> None:
        del self._runs[run.scope]
        self._kept.pop(run.scope, None)
        self.kept_bytes -= run.bytes
        run.stop_timer()
