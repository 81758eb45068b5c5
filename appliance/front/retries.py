"""This front's runs of requests with an `Idempotency-Key`, which retries join or repeat.

    claimed ──► running ──► kept ──► dropped after its time, or for lack of memory
        │          └──► dropped: it failed, or no client came back in time
        └──► forgotten: another front has the run

The core records which front has which run (`appliance.front_pool.claims`), and the front keeps the answers.
When the front's process ends, its answers are lost, and retries run again from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable

from appliance.front.keyed_run import KeyedRun
from appliance.messages import Claim, Claimed, FrontToCore, Release, RetryRules

_RUN_BYTES = 1024
"""Memory in bytes that a run takes in addition to its answer."""


class Retries:
    """This front's runs, by scope."""

    def __init__(self, to_core: Callable[[FrontToCore], None]) -> None:
        self.rules = RetryRules()
        self.kept_bytes = 0
        self._to_core = to_core
        self._runs: dict[bytes, KeyedRun] = {}
        """The runs by scope. Among ended runs, the oldest comes first."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, scope: bytes) -> KeyedRun | None:
        """Return the run for this scope, if this front knows one."""
        return self._runs.get(scope)

    def claim(self, scope: bytes, fingerprint: bytes, request_id: str) -> KeyedRun:
        """Add a run, and ask the core whether this front may have it (`KeyedRun.claimed`)."""
        run = self._runs[scope] = KeyedRun(scope, fingerprint, request_id, self._grew, self._orphaned)
        run.held_bytes = _RUN_BYTES
        self.kept_bytes += run.held_bytes
        self._to_core(Claim(scope, request_id))
        return run

    def take(self, message: Claimed) -> None:
        """Handle the core's answer to a claim."""
        run = self._runs.get(message.scope)
        if run is not None and not run.claimed.done():
            if message.is_elsewhere:
                self._forget(run)
            run.claimed.set_result(message)

    def ended(self, run: KeyedRun) -> None:
        """Keep a run's answer for a while if it succeeded; otherwise drop it."""
        run.stop_timer()
        if not run.is_kept:
            return
        good = run.status == 200
        if not good or self._stopping:
            self._drop(run, void=not good)
            return
        self._runs[run.scope] = self._runs.pop(run.scope)
        run.set_timer(self.rules.keep_s, lambda: self._drop(run))
        self._make_room()

    def stop(self) -> None:
        """End the runs that have no followers, because the front is stopping."""
        self._stopping = True
        for run in list(self._runs.values()):
            if run.timer is not None and not run.ended:
                self._give_up(run)

    def _orphaned(self, run: KeyedRun) -> None:
        if not run.is_kept or self._stopping or self.rules.grace_s <= 0:
            self._give_up(run)
        else:
            run.set_timer(self.rules.grace_s, lambda: self._give_up(run))

    def _give_up(self, run: KeyedRun) -> None:
        if run.is_kept:
            self._drop(run, void=True)
        run.give_up()

    def _grew(self, run: KeyedRun, size: int) -> None:
        if not run.is_kept:
            return
        run.held_bytes += size
        self.kept_bytes += size
        self._make_room()
        if self.kept_bytes > self.rules.max_bytes:
            self._drop(run, void=True)
            if not run.followers:
                run.give_up()

    def _make_room(self) -> None:
        while self.kept_bytes > self.rules.max_bytes:
            oldest = next((run for run in self._runs.values() if run.ended), None)
            if oldest is None:
                return
            self._drop(oldest, void=True)

    def _drop(self, run: KeyedRun, void: bool = False) -> None:
        """Remove the run from this front and from the core. `void` means that the answer is dropped early."""
        self._forget(run)
        self._to_core(Release(scope=run.scope, request_id=run.request_id, void=void))

    def _forget(self, run: KeyedRun) -> None:
        del self._runs[run.scope]
        self.kept_bytes -= run.held_bytes
        run.is_kept = False
        run.stop_timer()
