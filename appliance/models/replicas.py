"""One replica's lives: start, load, serve, die, start again. Its ranks are `engine.client.ReplicaGroup`'s."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from appliance.backoff import Backoff
from appliance.protocol import ReplicaStatus
from appliance.rundir import new_meeting
from appliance.traffic.credits import CreditAccount
from engine.client import ReplicaGroup
from engine.messages import Fatal, Progress, RankOutbound, Ready, ReplicaInfo, ReplicaSpec, Report

log = logging.getLogger(__name__)

_AFTER_FATAL_S = 5.0

Launch = Callable[
    [ReplicaSpec, Callable[[int, RankOutbound], None], Callable[[str], None]],
    ReplicaGroup,
]


class ReplicaEvents(Protocol):
    """Who is told what happens to a replica."""

    def replica_ready(self, replica: Replica) -> None:
        """It takes submissions now; `replica.account` is new."""

    def replica_reported(self, replica: Replica, report: Report) -> None:
        """Its heartbeat and ledger."""

    def replica_lost(self, replica: Replica) -> None:
        """A ready one died; `replica.account` is void."""

    def replica_failed(self, replica: Replica) -> None:
        """It will not come back: `replica.last_error` says why."""

    def replica_changed(self, replica: Replica) -> None:
        """It answers no more, for now or for good."""

    def replica_problem(self, replica: Replica, what: str) -> None:
        """Something to tell the operator."""


class Replica:
    """A replica and whoever supervises it. All methods belong on the event loop's thread.

    States: "starting" → "loading" → "ready" → (death) "restarting" → "starting" …; "failed" for good when
    its checkpoint is bad; "stopped" at the end.
    """

    def __init__(
        self,
        model: str,
        spec: ReplicaSpec,
        events: ReplicaEvents,
        *,
        run_dir: Path,
        hang_timeout_s: float,
        launch: Launch = ReplicaGroup.launch,
    ) -> None:
        self.model = model
        self.spec = spec
        self.name = spec.replica
        self.state = "stopped"
        self.detail = ""
        self.fraction: float | None = None
        self.restarts = 0
        self.last_error = ""
        self.group: ReplicaGroup | None = None
        self.info: ReplicaInfo | None = None
        self.account: CreditAccount | None = None
        """Of the present life, while ready."""
        self._events = events
        self._run_dir = run_dir
        self._launch = launch
        self._hang_timeout_s = hang_timeout_s
        self._backoff = Backoff()
        self._report: Report | None = None
        self._fatal: Fatal | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._last_sign = 0.0
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    # ── its life ──

    def start(self) -> None:
        """Launch the ranks."""
        self.state, self.detail, self.fraction = "starting", "", None
        self.info = self.account = self._report = self._fatal = self._ready_at = None
        self._started_at = self._last_sign = time.monotonic()
        try:
            spec = self.spec
            if spec.tensor_parallel_size > 1:
                spec = msgspec.structs.replace(spec, rendezvous=new_meeting(self._run_dir))
            self.group = self._launch(spec, self._message, self._ended)
        except OSError as error:
            self._ended(f"it could not be started: {error}")
            return
        log.info("%s starts (%s, pid %s)", self.name, self.spec.model_path, _join(self.group.pids))

    async def stop(self, grace_s: float) -> None:
        """End it, and do not start it again."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self.group is not None:
            await self.group.stop(grace_s)
        self.state, self.detail = "stopped", ""

    def kill(self, reason: str) -> None:
        """Kill its ranks; it is started again."""
        if self.group is not None:
            self.group.kill(reason)

    def check(self) -> None:
        """Kill it if it hangs. To be called about once a second."""
        silent_s = time.monotonic() - self._last_sign
        if self.state == "ready" and silent_s > self._hang_timeout_s:
            self.kill(f"it gave no sign of life for {silent_s:.0f} s")

    def _message(self, rank: int, message: RankOutbound) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, Report):
            self._report = message
            if self.account is not None:
                self._events.replica_reported(self, message)
        elif isinstance(message, Progress):
            if rank == 0 and self.state in ("starting", "loading"):
                self._progress(message)
        elif isinstance(message, Ready):
            self._ready(message.info)
        elif self._fatal is None:
            # The first to say why is the cause; the others follow from it.
            self._fatal = message
            group = self.group
            if group is not None:
                asyncio.get_running_loop().call_later(_AFTER_FATAL_S, group.kill, "it did not end by itself")

    def _progress(self, progress: Progress) -> None:
        # The log gets a line a stage, the status every step.
        if self.state == "starting" or progress.stage != self.detail.rpartition(" ")[0]:
            log.info("%s: %s", self.name, progress.stage)
        self.state, self.fraction = "loading", progress.fraction
        self.detail = f"{progress.stage} {progress.fraction:.0%}"

    def _ready(self, info: ReplicaInfo) -> None:
        self.state, self.detail, self.fraction, self.info = "ready", "", None, info
        self._ready_at = time.monotonic()
        self.account = CreditAccount(self.name, self.model, ", ".join(info.devices))
        log.info(
            "%s is ready in %.1f s: %s on %s, %d rows, %d blocks of KV cache",
            self.name,
            self._ready_at - self._started_at,
            info.dtype,
            ", ".join(info.devices),
            info.max_rows,
            info.kv_blocks,
        )
        self._events.replica_ready(self)

    def _ended(self, reason: str) -> None:
        was_ready, self.group = self.account is not None, None
        if was_ready:
            self._events.replica_lost(self)
        self.account = self.info = self._report = None
        if self._stopping:
            return
        self.last_error = self._fatal.message if self._fatal else reason
        self._events.replica_problem(self, self.last_error)
        if self._fatal is not None and self._fatal.kind == "checkpoint":
            self.state, self.detail, self.fraction = "failed", self.last_error, None
            self._events.replica_failed(self)
            self._events.replica_changed(self)
            return
        lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        delay_s = self._backoff.delay_s(lived_s)
        self.state, self.detail, self.fraction = "restarting", f"restarting in {delay_s:.1f} s", None
        self.restarts += 1
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.start)
        self._events.replica_changed(self)

    # ── for the status ──

    def status(self) -> ReplicaStatus:
        """As operators see it."""
        status = ReplicaStatus(
            name=self.name,
            state=self.state,
            detail=self.detail,
            fraction=self.fraction,
            pids=self.group.pids if self.group else [],
            tensor_parallel_size=self.spec.tensor_parallel_size,
            restarts=self.restarts,
            last_error=self.last_error,
        )
        if self.group is not None:
            status.last_report_s = time.monotonic() - self._last_sign
        _fill(status, self.info)
        _fill(status, self._report)
        status.steps = self._report.step if self._report else 0
        # The report's credits are totals; what is available now tells more.
        status.credit_rows = self.account.available_rows if self.account else 0
        status.credit_tokens = self.account.available_tokens if self.account else 0
        return status


def _fill(status: ReplicaStatus, source: ReplicaInfo | Report | None) -> None:
    """Copy the fields that both have."""
    if source is not None:
        for field in set(source.__struct_fields__) & set(status.__struct_fields__):
            setattr(status, field, getattr(source, field))


def _join(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
