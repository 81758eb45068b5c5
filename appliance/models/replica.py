"""One replica's lives: start, load, serve, die, start again. Its ranks are `engine.client.ReplicaGroup`'s."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from appliance.background import Backoff
from appliance.messages import ServedModel
from appliance.models.placement import GpuPlacement, numbered
from appliance.protocol import ReplicaState, ReplicaStatus, precision
from appliance.rundir import new_meeting
from appliance.settings import ModelSettings
from appliance.traffic.credits import CreditAccount
from engine.client import ReplicaGroup
from engine.messages import (
    Fatal,
    LongStep,
    Progress,
    RankOutbound,
    Ready,
    ReplicaInfo,
    ReplicaSpec,
    ReplicaStats,
    Report,
)

log = logging.getLogger(__name__)

SILENT_AFTER_S = 3.0
"""Replicas report at least twice a second: one without a report for this long gets no new requests. A step
that a replica has announced may take longer, by its predicted time."""
_MAX_STEP_FACTOR = 10.0
"""A step that takes so many times as long as predicted is taken for a hang."""
_AFTER_FATAL_S = 5.0
_RETRY_FIRST_S, _RETRY_MOST_S = 5.0, 300.0
"""How soon, and at last how seldom, a replica is tried again whose load failed for a reason that the engine
foresaw: somebody has to mend it, or a mount comes back by itself."""

Launch = Callable[
    [ReplicaSpec, Callable[[int, RankOutbound], None], Callable[[str], None]],
    ReplicaGroup,
]


class StepTotal:
    """Steps of one kind, over all lives of a replica."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.idle_s = 0.0
        """In which the device waited for the host before them."""

    def add(self, steps: int, mean_ms: float, mean_idle_us: float) -> None:
        """So many more."""
        self.steps += steps
        self.seconds += steps * mean_ms / 1e3
        self.idle_s += steps * mean_idle_us / 1e6


class StepTotals:
    """Steps that only decoded, and steps that computed prompts."""

    def __init__(self) -> None:
        self.decode, self.mixed = StepTotal(), StepTotal()

    def add(self, report: Report) -> None:
        """Those since the report before."""
        self.decode.add(report.decode_steps, report.step_ms, report.idle_us)
        self.mixed.add(report.mixed_steps, report.mixed_step_ms, report.mixed_idle_us)


class ReplicaEvents(Protocol):
    """Who is told what happens to a replica."""

    def replica_starting(self, replica: Replica) -> None:
        """Its ranks are about to read the model's folder."""

    def replica_ready(self, replica: Replica) -> None:
        """It takes submissions now; `replica.account` is new."""

    def replica_reported(self, replica: Replica, report: Report) -> None:
        """Its heartbeat and totals."""

    def replica_silent(self, replica: Replica) -> None:
        """A ready one has not reported in time: give it nothing new."""

    def replica_heard(self, replica: Replica) -> None:
        """A silent one has reported again."""

    def replica_lost(self, replica: Replica) -> None:
        """A ready one died; `replica.account` is void."""

    def replica_changed(self, replica: Replica) -> None:
        """It answers no more, for now or (`replica.failure`) until somebody mends something."""

    def replica_problem(self, replica: Replica, what: str) -> None:
        """Something to tell the operator."""


class Replica:
    """A replica and whoever supervises it. All methods belong on the event loop's thread.

    States: "starting" → "loading" → "ready" → (death) "restarting" → "starting" …; "failed" instead of
    "restarting" when its checkpoint is bad, or the memory or device that it needs were missing twice in a
    row: then it is tried again ever more seldom; "stopped" at the end. A ready one is shown as "draining"
    while it is `retiring`, and as "silent" while it does not report.
    """

    def __init__(
        self,
        model: str,
        settings: ModelSettings,
        name: str,
        events: ReplicaEvents,
        *,
        run_dir: Path,
        hang_timeout_s: float,
        load_timeout_s: float,
        placement: GpuPlacement,
        launch: Launch = ReplicaGroup.launch,
    ) -> None:
        self.model = model
        self.name = name
        self.settings = settings
        """Those that it was made with."""
        self.spec = settings.spec(name)
        self.state: ReplicaState = "stopped"
        self.detail = ""
        self.fraction: float | None = None
        self.restarts = 0
        self.last_error = ""
        self.failure = ""
        """Why requests do not wait for it. Set when it fails; cleared when it is ready or ends otherwise."""
        self.lives = 0
        self.steps = StepTotals()
        self.described: ServedModel | None = None
        """What its folder said when its present life began."""
        self.group: ReplicaGroup | None = None
        self.info: ReplicaInfo | None = None
        self.account: CreditAccount | None = None
        """Of the present life, while ready."""
        self.retiring = False
        """It finishes what it has, and is not started again."""
        self.hang_timeout_s = hang_timeout_s
        self.load_timeout_s = load_timeout_s
        self._events = events
        self._run_dir = run_dir
        self._placement = placement
        self._gpus: list[int] = []
        """Numbers of the GPUs of the present life, in order of ranks; empty if they are not chosen."""
        self._launch = launch
        self._backoff = Backoff()
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_MOST_S)
        self._foreseen = 0
        """Loads in a row that failed for a reason that the engine foresaw."""
        self._next_start_at = 0.0
        self._report: Report | None = None
        self._fatal: Fatal | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self.silent = False
        """It is ready, and has not reported for `SILENT_AFTER_S`."""
        self._last_sign = 0.0
        self._expected_s = 0.0
        """How long the step should take that it has announced."""
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def word(self) -> ReplicaState:
        """Its state as apps meet it: one that failed has failed until it is ready."""
        return "failed" if self.failure else self.shown_state

    @property
    def shown_state(self) -> ReplicaState:
        """Its state as operators see it."""
        if self.state != "ready":
            return self.state
        return "silent" if self.silent else "draining" if self.retiring else "ready"

    @property
    def answers(self) -> bool:
        """Whether requests may be sent to it."""
        return self.account is not None and not self.silent

    @property
    def silent_s(self) -> float:
        """Seconds since its latest message."""
        return time.monotonic() - self._last_sign

    @property
    def hang_limit_s(self) -> float:
        """After so many seconds without a message it is killed: no step that it announced takes as long."""
        return max(self.hang_timeout_s, _MAX_STEP_FACTOR * self._expected_s)

    # ── its life ──

    def start(self) -> None:
        """Launch the ranks."""
        self.state, self.detail, self.fraction = "starting", "", None
        self.lives += 1
        self.described = None
        self.info = self.account = self._report = self._fatal = self._ready_at = None
        self._started_at = self._last_sign = time.monotonic()
        self._expected_s = 0.0
        self._events.replica_starting(self)
        try:
            spec = self.spec
            self._gpus = self._placement.take(self.name, spec.device, spec.tensor_parallel_size)
            spec = msgspec.structs.replace(spec, gpus=self._placement.uuids(self._gpus))
            if spec.tensor_parallel_size > 1:
                spec = msgspec.structs.replace(spec, rendezvous=new_meeting(self._run_dir))
            self.group = self._launch(spec, self._message, self._ended)
        except OSError as error:
            self._ended(f"it could not be started: {error}")
            return
        log.info("%s starts (%s, pid %s)", self.name, self.spec.model_path, _join(self.group.pids))

    async def stop(self, grace_s: float) -> None:
        """End it, and do not start it again. One that is not ready has nothing to finish, and listens to
        nobody while it loads: its ranks are killed."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self.group is not None:
            await self.group.stop(grace_s if self.account is not None else 0.0)
        self._placement.release(self.name)
        self.state, self.detail = "stopped", ""

    def kill(self, reason: str) -> None:
        """Kill its ranks; it is started again."""
        if self.group is not None:
            self.group.kill(reason)

    def check(self) -> None:
        """Notice its silence, and kill it if it hangs. To be called a few times a second."""
        silent_s = self.silent_s
        if self.state == "ready":
            if not self.silent and silent_s > SILENT_AFTER_S + self._expected_s:
                self.silent = True
                log.warning("%s has not reported for %.1f s: it gets no new requests", self.name, silent_s)
                self._events.replica_silent(self)
            if silent_s > self.hang_limit_s:
                self.kill(f"it did not report for {silent_s:.0f} s")
        elif self.state in ("starting", "loading") and silent_s > self.load_timeout_s:
            at = f" at {self.detail!r}" if self.detail else ""
            self.kill(
                f"it reported no progress for {silent_s:.0f} s while {self.state}{at}: if that is how slow "
                "the model's disk is, raise load_timeout_s"
            )

    def _message(self, rank: int, message: RankOutbound) -> None:
        self._last_sign, self._expected_s = time.monotonic(), 0.0
        if self.silent:
            self.silent = False
            log.warning("%s reports again", self.name)
            self._events.replica_heard(self)
        if isinstance(message, LongStep):
            self._expected_s = message.expected_s
        elif isinstance(message, Report):
            self._report = message
            self.steps.add(message)
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
        info = msgspec.structs.replace(info, devices=numbered(info.devices, self._gpus))
        self.state, self.detail, self.fraction, self.info = "ready", "", None, info
        self._ready_at = time.monotonic()
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_MOST_S)
        self._foreseen, self.failure = 0, ""
        self.account = CreditAccount(self.name, self.model, ", ".join(info.devices))
        self.account.rates.predict(info.least_step_s, info.least_prompt_token_s)
        log.info(
            "%s is ready in %.1f s: %s on %s, %d rows, %d blocks of KV cache",
            self.name,
            self._ready_at - self._started_at,
            precision(info.dtype, info.weights, info.kv_cache_dtype),
            ", ".join(info.devices),
            info.max_num_seqs,
            info.kv_blocks,
        )
        if info.tensor_parallel_size > 1:
            links = self._placement.links(self._gpus) or "not known"
            log.info("%s: links between the ranks: %s; collectives: %s", self.name, links, info.collectives)
        self._events.replica_ready(self)

    def _ended(self, reason: str) -> None:
        was_ready, self.group = self.account is not None, None
        self.silent = False
        if was_ready:
            self._events.replica_lost(self)
        self.account = self.info = self._report = None
        if self._stopping or self.retiring:
            self.state, self.detail = "stopped", ""
            return
        self.last_error = self._fatal.message if self._fatal else reason
        self._events.replica_problem(self, self.last_error)
        fatal = self._fatal
        foreseen = fatal is not None and fatal.kind != "internal" and not was_ready
        self._foreseen = self._foreseen + 1 if foreseen else 0
        # Memory and devices may still be held by the life before; what a file says does not change so soon.
        if fatal is not None and foreseen and (fatal.kind == "checkpoint" or self._foreseen > 1):
            self.state, self.failure = "failed", self.last_error
            delay_s = self._retry.delay_s(0.0)
        else:
            self.state, self.failure = "restarting", ""
            lived_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            delay_s = self._backoff.delay_s(lived_s)
        self.detail, self.fraction = "", None
        self.restarts += 1
        self._next_start_at = time.monotonic() + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.start)
        self._events.replica_changed(self)

    # ── for the status ──

    def status(self) -> ReplicaStatus:
        """Return the replica's status for operators."""
        known = _fields(self.info, ReplicaInfo) | _fields(self._report, ReplicaStats)
        # The report's credits are totals; what is available now tells more.
        credit = self.account
        known |= {
            "name": self.name,
            "state": self.shown_state,
            "detail": self._detail(),
            "fraction": self.fraction,
            "pids": self.group.pids if self.group else [],
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "links": self._placement.links(self._gpus),
            "credit_seqs": credit.available_rows if credit else 0,
            "credit_tokens": credit.available_tokens if credit else 0,
            "last_report_s": self.silent_s if self.group is not None else None,
            "restarts": self.restarts,
            "last_error": self.last_error,
        }
        return ReplicaStatus(**known)

    def _detail(self) -> str:
        if self.state in ("restarting", "failed"):
            return f"starts again in {max(0.0, self._next_start_at - time.monotonic()):.1f} s"
        if self.silent:
            left_s = max(0.0, self.hang_limit_s - self.silent_s)
            return f"no report for {self.silent_s:.0f} s, killed and restarted in {left_s:.0f} s"
        return self.detail


def _fields(source: msgspec.Struct | None, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of `kind` that a status has too; none without a source."""
    if source is None:
        return {}
    names = set(kind.__struct_fields__) & set(ReplicaStatus.__struct_fields__)
    return {name: getattr(source, name) for name in names}


def _join(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
