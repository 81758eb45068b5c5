"""One replica: starts it, loads it, supervises it, and restarts it after it has exited.

A replica is one running copy of a model. `engine.client.ReplicaGroup` starts and stops its processes, one per
rank. Events of a replica are passed to its `ReplicaEvents`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance.background import Background
from appliance.channel.served_models import ServedModel
from appliance.models.cgroups import LIMITS_REMEDY, ReplicaCgroups, limits_of
from appliance.models.load_progress import LoadProgress, load_text
from appliance.models.manifest import find_problem
from appliance.models.placement import GpuPlacement, numbered
from appliance.models.replica_blocks import BlockUseReader
from appliance.models.replica_events import ReplicaEvents
from appliance.models.replica_sleep import ReplicaSleep
from appliance.models.replica_status import reported_fields
from appliance.models.restarts import Exit, Restart, Restarts, StartTimer, Watch
from appliance.models.step_totals import StepTotals
from appliance.protocol import BreakerState, Degradation, LoadStatus, ReplicaState, ReplicaStatus, precision
from appliance.rundir import new_rendezvous
from appliance.settings import ModelSettings
from appliance.traffic.credits import CreditAccount
from engine.client import ReplicaGroup
from engine.messages import (
    BlockUse,
    Fatal,
    LongStep,
    MemoryChanged,
    Progress,
    RankOutbound,
    Ready,
    ReplicaInfo,
    ReplicaSpec,
    Report,
)

log = logging.getLogger(__name__)

SILENT_AFTER_S = 3.0
"""A ready replica that has not reported for this long gets no new requests. Replicas report at least twice a
second. If a replica has announced a long step, the predicted time of the step is added to this limit."""
_MAX_STEP_FACTOR = 10.0
"""A replica is considered hung if a step takes longer than this multiple of the step's predicted time."""
_AFTER_FATAL_S = 5.0
_KILLED_WITHIN_S = 30.0
"""Time limit for processes to exit after SIGKILL. A process that waits for a device or a disk (state D) may
take longer."""
_SLEEP_WITHIN_S = 120.0
"""Time limit for a replica to go to sleep, unless `load_timeout_s` is shorter. On an H200, the first sleep
of a replica with 15 GiB of weights took 3.43 s (docs/performance.md), so the limit allows for several
hundred GiB. While a model goes to sleep to make room for another one, no other model can be loaded."""
_CHECK_AGAIN_S = 10.0
"""Delay after which the files of a model with a known problem are checked again."""

Preflight = Callable[[str, ModelSettings], str]
"""Checks the files of a model with this name and these settings, and returns the problem; empty if there is
none. Called in a thread."""
FilesCheck = Callable[[str], str]
"""Compares the files of a unit with the manifest of its version, and returns the difference; empty if there
is none, or if the unit is a model in the settings. Called in a thread."""
Launch = Callable[
    [ReplicaSpec, Callable[[int, RankOutbound], None], Callable[[str], None]],
    ReplicaGroup,
]


class Replica:
    """Supervises one replica. All methods must be called on the event loop's thread.

    A ready replica can sleep. Its processes and its account then continue to exist, but it must not get
    requests. If its processes exit during that time, they are started again when the replica is woken.

    A replica's state is first "starting", then "loading", then "ready". When its processes exit, it is
    "restarting" and then "starting" again. A replica that was stopped permanently is "stopped". The state is
    "failed" instead of "restarting" if the checkpoint is bad, if the memory or the device that the replica
    needs was missing at two starts in a row, or if its circuit breaker is open (`appliance.models.restarts`).
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
        preflight: Preflight,
        files_check: FilesCheck,
        restarts: Restarts,
        cgroups: ReplicaCgroups,
        launch: Launch = ReplicaGroup.launch,
    ) -> None:
        self.model = model
        self.name = name
        self.settings = settings
        """The model's settings when the replica was created."""
        self.spec = settings.spec(name)
        self.state: ReplicaState = "stopped"
        self.restarts = 0
        self.failed_starts = 0
        """Number of failed starts since the replica was last ready."""
        self.last_error = ""
        self.failure = ""
        """Reason why requests are refused instead of waiting for this replica. It is set in the state
        "failed". It is cleared when the replica becomes ready or exits for another reason."""
        self.bad_checkpoint = False
        """Whether `failure` is a problem with the model's files or settings."""
        self.fallback = ""
        """Reason why the replica runs on the CPU instead of a GPU."""
        self.incarnation = 0
        """Number of starts so far."""
        self.steps = StepTotals()
        self.described: ServedModel | None = None
        """The model's description, read from its folder at the replica's latest start."""
        self.sleeping = ReplicaSleep()
        self._blocks = BlockUseReader()
        self.group: ReplicaGroup | None = None
        self.info: ReplicaInfo | None = None
        self.account: CreditAccount | None = None
        """Credits of the current incarnation while it is ready."""
        self.retiring = False
        """Whether the replica is finishing its requests and will not be restarted afterwards."""
        self.hang_timeout_s = hang_timeout_s
        self.load_timeout_s = load_timeout_s
        self._events = events
        self._run_dir = run_dir
        self._placement = placement
        self._gpus: list[int] = []
        """Numbers of the current incarnation's GPUs, in rank order. Empty if no GPUs were chosen for it."""
        self._launch = launch
        self._preflight = preflight
        self._files_check = files_check
        self._background = Background()
        self._restarts = restarts
        self._cgroups = cgroups
        self._without_limits = ""
        """Reason why the limits in the settings have no effect."""
        self._memory_kills = 0
        self._next_start = StartTimer()
        self._load = LoadProgress(time.monotonic())
        self._report: Report | None = None
        self._fatal: Fatal | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self.silent = False
        """Whether the replica is ready but has not reported for `SILENT_AFTER_S`."""
        self._last_sign = 0.0
        self._expected_s = 0.0
        """Predicted duration of a long step that the replica has announced."""
        self._stopping = False

    @property
    def client_state(self) -> ReplicaState:
        """The state shown to clients. A failed replica stays failed until it is ready again."""
        return "failed" if self.failure else self.operator_state

    @property
    def operator_state(self) -> ReplicaState:
        """The state shown to operators. A ready replica can be "sleeping", "silent" or "draining"."""
        if self.sleeping.asleep:
            return "sleeping"
        if self.state != "ready":
            return self.state
        return "silent" if self.silent else "draining" if self.retiring else "ready"

    @property
    def latest_report(self) -> Report | None:
        """The latest report of the current incarnation."""
        return self._report

    @property
    def gpus(self) -> list[int]:
        """The numbers of the replica's GPUs, in rank order. Empty if it runs on the CPU, or if its GPUs were
        not chosen by the service."""
        return self._gpus

    @property
    def on_gpus(self) -> bool:
        """Whether the replica is ready and runs on GPUs."""
        return self.info is not None and all(one.startswith("cuda") for one in self.info.devices)

    @property
    def ready_after_s(self) -> float | None:
        """Time in seconds from the latest start until the replica was ready, or None if it is not ready
        yet."""
        return None if self._ready_at is None else self._ready_at - self._started_at

    @property
    def answers(self) -> bool:
        """Whether new requests may be sent to the replica."""
        withheld = self.silent or self.retiring or self.sleeping.begun or self.sleeping.asleep
        return self.account is not None and not withheld

    @property
    def silent_s(self) -> float:
        """Time since the replica's latest message, in seconds."""
        return time.monotonic() - self._last_sign

    @property
    def hang_limit_s(self) -> float:
        """How long the replica may go without sending a message before it is killed, in seconds. The limit is
        longer than any announced step."""
        return max(self.hang_timeout_s, _MAX_STEP_FACTOR * self._expected_s)

    # ── start and stop ──

    def start(self) -> None:
        """Launch the ranks."""
        self.state = "starting"
        self._load = LoadProgress(time.monotonic())
        self.incarnation += 1
        self.described = None
        self.info = self.account = self._report = self._fatal = self._ready_at = None
        self._started_at = self._last_sign = time.monotonic()
        self._expected_s = 0.0
        self._events.replica_starting(self)
        try:
            device = "cpu" if self.fallback else self.spec.device
            self._gpus = self._placement.take(self.name, device, self.spec.tensor_parallel_size)
            spec = msgspec.structs.replace(
                self.spec,
                device=device,
                gpus=self._placement.uuids(self._gpus),
                cpus=self._placement.cpus(self._gpus),
                share_reads=self.settings.replica_range()[1] > 1,
            )
            if spec.tensor_parallel_size > 1:
                spec = msgspec.structs.replace(spec, rendezvous=new_rendezvous(self._run_dir))
            self.group = self._launch(spec, self._message, self._ended)
        except OSError as error:
            self._ended(f"the replica could not be started: {error}")
            return
        self._limit(self.group.pids)
        log.info("%s is starting (%s, pid %s)", self.name, self.spec.model_path, _join(self.group.pids))

    def _limit(self, pids: list[int]) -> None:
        """Apply the CPU and memory limits in the settings to the ranks."""
        self._memory_kills = self._cgroups.memory_kills(self.name)
        problem = self._cgroups.limit(self.name, pids, limits_of(self.settings))
        if problem and problem != self._without_limits:
            self._events.replica_problem(self, problem)
        self._without_limits = problem

    async def stop(self, grace_s: float) -> None:
        """Stop the replica permanently. A replica that is not ready is killed, because it has no requests and
        reads no messages while it loads. If its processes do not exit although they were killed, return after
        `_KILLED_WITHIN_S`."""
        self._stopping = True
        self._next_start.stop()
        if self.group is not None:
            grace_s = grace_s if self.account is not None else 0.0
            try:
                async with asyncio.timeout(grace_s + _KILLED_WITHIN_S):
                    await self.group.stop(grace_s)
            except TimeoutError:
                log.error(
                    "%s: not all of its processes (%s) have exited %.0f s after they were killed",
                    self.name,
                    _join(self.group.pids if self.group is not None else []),
                    _KILLED_WITHIN_S,
                )
        self._placement.release(self.name)
        self._cgroups.remove(self.name)
        self.state = "stopped"

    async def sleep(self) -> str:
        """Release the memory of the weights and the KV cache. The replica must have no requests. Return the
        reason if it stays awake. A replica that does not sleep within `_SLEEP_WITHIN_S` is killed."""
        if self.account is None or self.group is None:
            return f"{self.name} is {self.operator_state}"
        return await self.sleeping.change(self.group, True, min(_SLEEP_WITHIN_S, self.load_timeout_s))

    async def read_blocks(self) -> BlockUse | None:
        """Return the state of the KV blocks, or None if the replica is not ready or has never answered."""
        group = self._group_with_blocks()
        return None if group is None else await self._blocks.read(group)

    def recent_blocks(self, every_s: float) -> BlockUse | None:
        """Return the last known state of the KV blocks without waiting. If that state is older than `every_s`
        seconds, ask the replica for the current one."""
        group = self._group_with_blocks()
        return None if group is None else self._blocks.recent(group, every_s)

    def _group_with_blocks(self) -> ReplicaGroup | None:
        """Return the processes if the replica is ready and awake."""
        return self.group if self.account is not None and not self.sleeping.asleep else None

    async def wake(self) -> str:
        """Restore the memory. If the processes have ended, load the model again, without waiting for it.
        Return the reason if the replica stays asleep."""
        if not self.sleeping.asleep:
            return ""
        if self.group is None:
            if changed := await self._checked(lambda: self._files_check(self.model)):
                return changed
            self.sleeping.asleep = False
            self.start()
            return ""
        return await self.sleeping.change(self.group, False, self.load_timeout_s)

    def refuse(self, problem: str) -> None:
        """Do not start the replica, because a check of its model's files has found a problem. The files are
        checked again after a while, and the replica is started when they are correct."""
        if self._stopping or self.retiring:
            return
        if problem != self.failure:
            self._events.replica_problem(self, problem)
        self.state, self.failure, self.last_error = "failed", problem, problem
        self.bad_checkpoint = True
        self._next_start.start(_CHECK_AGAIN_S, self._check_files)
        self._events.replica_changed(self)

    def retry(self) -> bool:
        """Start the replica now if it is waiting for its next start, and close its circuit breaker. A replica
        that runs on the CPU instead of a GPU is restarted on a GPU. Return whether anything was done."""
        if self.fallback and self.state == "ready" and not self.retiring:
            self.fallback = ""
            self.kill("it is being moved from the CPU to a GPU")
            return True
        if self.state not in ("restarting", "failed") or self._stopping or self.retiring:
            return False
        self.fallback = ""
        self._restarts.reset()
        self._next_start.stop()
        self._check_files()
        return True

    def kill(self, reason: str) -> None:
        """Kill the ranks. The replica is then restarted."""
        if self.group is not None:
            self.group.kill(reason)

    def check(self) -> None:
        """Detect silence, and kill a replica that hangs. Must be called a few times per second."""
        silent_s = self.silent_s
        if self.state == "ready":
            if not self.silent and silent_s > SILENT_AFTER_S + self._expected_s:
                self.silent = True
                log.warning(
                    "%s has not reported for %.1f s and receives no new requests", self.name, silent_s
                )
                self._events.replica_silence_changed(self)
            if silent_s > self.hang_limit_s:
                self.kill(f"it did not report for {silent_s:.0f} s")
        elif self.state in ("starting", "loading"):
            if line := self._load.due(time.monotonic()):
                log.info("%s: %s", self.name, line)
            if silent_s > self.load_timeout_s:
                at = f" at {load_text(status)!r}" if (status := self._load_status()) else ""
                self.kill(
                    f"no progress for {silent_s:.0f} s while {self.state}{at}: if the model's disk is that "
                    "slow, raise load_timeout_s"
                )

    def _message(self, rank: int, message: RankOutbound) -> None:
        self._last_sign, self._expected_s = time.monotonic(), 0.0
        if self.silent:
            self.silent = False
            log.warning("%s is reporting again", self.name)
            self._events.replica_silence_changed(self)
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
        elif isinstance(message, BlockUse):
            self._blocks.received(message)
        elif isinstance(message, MemoryChanged):
            self.sleeping.changed(message)
        elif self._fatal is None:
            # The first reported error is the cause. The errors of the other ranks are its consequences.
            self._fatal = message
            group = self.group
            if group is not None:
                asyncio.get_running_loop().call_later(
                    _AFTER_FATAL_S, group.kill, "it did not exit after a fatal error"
                )

    def _progress(self, progress: Progress) -> None:
        self.state = "loading"
        if progress.note:
            log.info("%s: %s", self.name, progress.note)
        if line := self._load.report(progress, time.monotonic()):
            log.info("%s: %s", self.name, line)

    def _load_status(self) -> LoadStatus | None:
        return self._load.status(time.monotonic()) if self.state == "loading" else None

    def _ready(self, info: ReplicaInfo) -> None:
        info = msgspec.structs.replace(info, devices=numbered(info.devices, self._gpus))
        self.state, self.info = "ready", info
        self._ready_at = time.monotonic()
        self._restarts.ready()
        self.failed_starts = 0
        self.failure, self.bad_checkpoint = "", False
        self.account = CreditAccount(self.name, self.model, ", ".join(info.devices))
        self.account.rates.predict(info.least_step_s, info.least_prompt_token_s)
        log.info(
            "%s was ready after %.1f s: %s on %s, %d slots, %d KV blocks",
            self.name,
            self._ready_at - self._started_at,
            precision(info.dtype, info.weights, info.kv_cache_dtype),
            ", ".join(info.devices),
            info.max_num_seqs,
            info.kv_blocks,
        )
        if info.tensor_parallel_size > 1:
            links = self._placement.links(self._gpus) or "unknown"
            log.info("%s: links between the ranks: %s; collectives: %s", self.name, links, info.collectives)
        self._events.replica_ready(self)

    def _ended(self, reason: str) -> None:
        was_ready, self.group = self.account is not None, None
        self.silent = False
        if was_ready:
            self._events.replica_lost(self)
        self.account = self.info = self._report = None
        self._blocks.reset()
        if self._stopping or self.retiring:
            self.state = "stopped"
            return
        if self._cgroups.memory_kills(self.name) > self._memory_kills:
            reason += f"; it reached memory_limit_gb = {self.settings.memory_limit_gb:g}"
        self.last_error = self._fatal.message if self._fatal else reason
        if self.sleeping.ended(self.last_error):
            self._events.replica_problem(self, self.last_error)
            self.state = "stopped"
            return
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        kind = self._fatal.kind if self._fatal else ""
        again = self._restarts.exited(Exit(self.last_error, kind, served_s))
        if again.failure and kind in ("memory", "device") and self._may_fall_back:
            self._placement.release(self.name)
            self._restarts.reset()
            self.fallback, again = self.last_error, Restart(0.0)
        self._events.replica_problem(self, again.failure or self.last_error)
        self.failure, self.bad_checkpoint = again.failure, again.bad_checkpoint
        self.restarts += 1
        self.failed_starts += not was_ready
        if self.failure:
            self.state = "failed"
            watch = Watch(self.spec.model_path, self._restarts.reset)
            self._next_start.start(again.delay_s, self._check_files, watch)
        else:
            self.state = "restarting"
            self._next_start.start(again.delay_s, self._restart)
        self._events.replica_changed(self)

    @property
    def _may_fall_back(self) -> bool:
        return self.settings.cpu_fallback and self.spec.device != "cpu" and not self.fallback

    def _restart(self) -> None:
        """Start the replica, unless its files have changed since its version was added."""
        self._background.run(self._start_unless(lambda: self._files_check(self.model)))

    def _check_files(self) -> None:
        """Check the files of a failed replica's model, and start the replica if no problem is found."""
        self._background.run(
            self._start_unless(
                lambda: self._files_check(self.model) or self._preflight(self.model, self.settings)
            )
        )

    async def _checked(self, check: Callable[[], str]) -> str:
        return await find_problem(check, self.settings.folder, self.load_timeout_s)

    async def _start_unless(self, check: Callable[[], str]) -> None:
        problem = await self._checked(check)
        if self._stopping or self.retiring or self.state not in ("restarting", "failed"):
            return
        if problem:
            self.refuse(problem)
        else:
            self.start()

    # ── status for operators ──

    @property
    def breaker(self) -> BreakerState:
        """State of the circuit breaker."""
        return self._restarts.breaker(self.state == "failed", self._serving_s)

    @property
    def remedy(self) -> str:
        """What an operator can do about a persistent failure, or an empty string if no action is needed."""
        if self.breaker != "open":
            return ""
        return (
            f"fix the cause, then run: appliance models retry {self.model}; otherwise, the next "
            f"start is attempted in {self._next_start.left_s:.0f} s, or when the model's files change"
        )

    def _degradations(self) -> list[Degradation]:
        found = []
        if self.fallback:
            remedy = f"correct the cause, then run: appliance models retry {self.model}"
            found.append(
                Degradation(what=f"runs on the CPU instead of a GPU: {self.fallback}", remedy=remedy)
            )
        if self._without_limits:
            found.append(Degradation(what=self._without_limits, remedy=LIMITS_REMEDY))
        return found

    @property
    def _serving_s(self) -> float:
        """Time in seconds since the replica became ready; 0 if it is not ready."""
        ready_at = self._ready_at if self.state == "ready" else None
        return 0.0 if ready_at is None else time.monotonic() - ready_at

    def status(self) -> ReplicaStatus:
        """Return the replica's status for operators."""
        load = self._load_status()
        known = reported_fields(self.info, self._report, self.account)
        known |= {
            "name": self.name,
            "state": self.operator_state,
            "detail": self.detail,
            "fraction": load.done / load.total if load is not None and load.total else None,
            "load": load,
            "pids": self.group.pids if self.group else [],
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "links": self._placement.links(self._gpus),
            "last_report_s": self.silent_s if self.group is not None else None,
            **self.sleeping.figures(),
            "restarts": self.restarts,
            "deaths": self._restarts.deaths(self._serving_s),
            "breaker": self.breaker,
            "remedy": self.remedy,
            "degraded": self._degradations(),
            "last_error": self.last_error,
        }
        return ReplicaStatus(**known)

    @property
    def detail(self) -> str:
        """Explanation of the state for operators."""
        if self.sleeping.asleep:
            return self.sleeping.detail
        if (load := self._load_status()) is not None:
            return load_text(load)
        if self.state in ("restarting", "failed"):
            return f"restarts in {self._next_start.left_s:.1f} s"
        if self.silent:
            left_s = max(0.0, self.hang_limit_s - self.silent_s)
            return f"no report for {self.silent_s:.0f} s; will be killed and restarted in {left_s:.0f} s"
        return ""


def _join(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
