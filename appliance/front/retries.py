"""The runs of requests with an `Idempotency-Key`, which retries join or repeat: those of this front.

    claim ──► the core says: run ──► running ──► kept ──► expired, or dropped for want of room
                 │                      │
                 │                      └──► failed, or nobody came back: void
                 └► elsewhere (another front has it), or another body: forgotten here

The core keeps who runs what (`appliance.front_pool.claims`), this front the answers. What is here is only as
good as this process: after its death a retry runs anew.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from appliance.front.recording import Recording
from appliance.messages import Claim, Claimed, FrontToCore, Release, RetryRules

_RECORD_BYTES = 1024
"""What a record takes beside its answer."""

Verdict = Literal["run", "elsewhere", "conflict"]


class Record:
    """One run and its answer."""

    def __init__(self, scope: bytes, fingerprint: bytes, request_id: str, recording: Recording) -> None:
        self.scope = scope
        self.fingerprint = fingerprint
        self.request_id = request_id
        """The request that runs. Nothing else of it is kept: its prompt and connection are not in `bytes`."""
        self.request_class: int | None = None
        """What that got, once its body has said what it asks for."""
        self.recording = recording
        self.claimed = asyncio.Event()
        """The core has said who runs it."""
        self.verdict: Verdict = "run"
        self.retry_of = ""
        """An earlier run of the same request, whose answer is not there any more."""
        self.status = 500
        """What the run ended with, and how its samples did."""
        self.finish_reason = ""
        self.bytes = _RECORD_BYTES
        self.kept_at: float | None = None
        """Set when it has ended and is kept: seconds of the event loop's clock."""


class Retries:
    """Every record of this front, by scope: whose key it is, for which endpoint."""

    def __init__(self, to_core: Callable[[FrontToCore], None]) -> None:
        self.rules = RetryRules()
        self.kept_bytes = 0
        self._to_core = to_core
        self._records: dict[bytes, Record] = {}
        self._kept: OrderedDict[bytes, Record] = OrderedDict()
        """Those that have ended, oldest first."""
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        """Of runs that nobody follows."""
        self._stopping = False

    def __len__(self) -> int:
        return len(self._records)

    def find(self, scope: bytes) -> Record | None:
        """The record of this scope, if it is here."""
        record = self._records.get(scope)
        if record is not None and self._expired(record):
            self._drop(record)
            return None
        return record

    def claim(self, scope: bytes, fingerprint: bytes, request_id: str) -> Record:
        """A record for a request that is not known here; `claimed` is set when the core has said who runs
        it."""
        recording = Recording(lambda size: self._grew(record, size), lambda: self._orphaned(record))
        record = Record(scope, fingerprint, request_id, recording)
        self._records[scope] = record
        self.kept_bytes += record.bytes
        self._to_core(Claim(scope=scope, fingerprint=fingerprint, request_id=request_id))
        return record

    def take(self, message: Claimed) -> None:
        """The core's answer to a claim."""
        record = self._records.get(message.scope)
        if record is None or record.claimed.is_set():
            return
        record.verdict, record.retry_of = message.verdict, message.retry_of
        if message.verdict != "run":
            self._forget(record)
        record.claimed.set()

    def joined(self, record: Record) -> None:
        """Somebody follows the record's run (again)."""
        timer = self._timers.pop(record.scope, None)
        if timer is not None:
            timer.cancel()

    def ended(self, record: Record, good: bool) -> None:
        """Its run is over; a good one is kept for a while."""
        self.joined(record)
        if self._records.get(record.scope) is not record:
            return
        if not good or self._stopping:
            self._drop(record, void=not good)
            return
        record.kept_at = asyncio.get_running_loop().time()
        self._kept[record.scope] = record
        self._make_room()

    def expire(self) -> None:
        """Drop what was kept for long enough. To be called now and then."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if not self._expired(oldest):
                return
            self._drop(oldest)

    def stop(self) -> None:
        """The front is stopping: nobody will come back, so runs that nobody follows end."""
        self._stopping = True
        for scope in list(self._timers):
            self._give_up(self._records[scope])

    def _orphaned(self, record: Record) -> None:
        known = self._records.get(record.scope) is record
        if not known or self._stopping or self.rules.grace_s <= 0:
            self._give_up(record)
            return
        loop = asyncio.get_running_loop()
        self._timers[record.scope] = loop.call_later(self.rules.grace_s, self._give_up, record)

    def _give_up(self, record: Record) -> None:
        self.joined(record)
        if self._records.get(record.scope) is record:
            self._drop(record, void=True)
        record.recording.give_up()

    def _grew(self, record: Record, size: int) -> None:
        if self._records.get(record.scope) is record:
            record.bytes += size
            self.kept_bytes += size
            self._make_room(record)

    def _make_room(self, growing: Record | None = None) -> None:
        while self.kept_bytes > self.rules.max_bytes and self._kept:
            self._drop(next(iter(self._kept.values())), void=True)
        if growing is not None and self.kept_bytes > self.rules.max_bytes:
            self._drop(growing, void=True)
            growing.recording.stop_keeping()
            if not growing.recording.followers:
                growing.recording.give_up()

    def _drop(self, record: Record, void: bool = False) -> None:
        """Let go of it here and in the core; `void`: before its time."""
        self._forget(record)
        self._to_core(Release(scope=record.scope, request_id=record.request_id, void=void))

    def _forget(self, record: Record) -> None:
        del self._records[record.scope]
        self._kept.pop(record.scope, None)
        self.kept_bytes -= record.bytes
        self.joined(record)

    def _expired(self, record: Record) -> bool:
        if record.kept_at is None:
            return False
        return asyncio.get_running_loop().time() >= record.kept_at + self.rules.keep_s
