"""Starts a replica, supervises it, and restarts it after it exits. A replica is one running copy of a model.
`engine.client.ReplicaGroup` starts and stops its processes, one per rank. A replica passes its events to
`ReplicaEvents`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from appliance.background import Background
from appliance.channel.served_models import ServedModel
from appliance.models.cgroups import limits_of
from appliance.models.load_progress import LoadProgress, load_text
from appliance.models.replica_blocks import BlockUseReader
from appliance.models.replica_events import ReplicaEvents
from appliance.models.replica_heartbeat import ReplicaHeartbeat
from appliance.models.replica_resources import ReplicaResources
from appliance.models.replica_sleep import KILLED_WITHIN_S, ReplicaSleep
from appliance.models.restarts import Exit, Restart, Restarts, StartTimer, Watch
from appliance.models.start_checks import StartChecks
from appliance.models.step_totals import StepTotals
from appliance.protocol import BreakerState, LoadStatus, ReplicaState, precision
from appliance.settings import ModelSettings
from appliance.traffic.credits import CreditAccount
from engine.client import ReplicaGroup
from engine.messages import ReplicaInfo, ReplicaSpec
from engine.rank_messages import BlockUse, Fatal, MemoryChanged, Progress, RankOutbound, Ready, Report

log = logging.getLogger(__name__)

_AFTER_FATAL_S = 5.0
_SLEEP_WITHIN_S = 120.0
"""Time limit for a replica to go to sleep, unless `load_timeout_s` is shorter. On an H200, a replica with 15
GiB of weights took 3.43 s to go to sleep the first time (docs/performance.md), so the limit is enough for
several hundred GiB. While a replica is going to sleep, no other model can be loaded."""
_CHECK_AGAIN_S = 10.0
"""Interval at which the files of a model with a known problem are rechecked."""

Launch = Callable[
    [ReplicaSpec, Callable[[int, RankOutbound], None], Callable[[str], None]],
    ReplicaGroup,
]


class Replica:
    """Supervises one replica. All methods must be called on the event loop thread.

    A ready replica can sleep. A sleeping replica keeps its processes and credit account, but must not be sent
    requests. If its processes exit while it is asleep, they are restarted when it is woken.

    A replica's state is first "starting", then "loading", then "ready". When its processes exit, it becomes
    "restarting" and then "starting" again. It becomes "failed" instead of "restarting" if the checkpoint is
    bad, if the required memory or device was missing at two consecutive starts, or if its circuit breaker is
    open (`appliance.models.restarts`). A permanently stopped replica is "stopped".
    """

    def __init__(
        self,
        model: str,
        settings: ModelSettings,
        name: str,
        events: ReplicaEvents,
        *,
        resources: ReplicaResources,
        hang_timeout_s: float,
        load_timeout_s: float,
        checks: StartChecks,
        restarts: Restarts,
        launch: Launch,
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
        """Why requests are refused instead of waiting for this replica. Set in the "failed" state; cleared
        when the replica becomes ready or exits for a different reason."""
        self.bad_checkpoint = False
        """Whether `failure` is a problem with the model's files or settings."""
        self.fallback = ""
        """Why the replica runs on the CPU instead of a GPU."""
        self.incarnation = 0
        """Number of starts so far."""
        self.steps = StepTotals()
        self.described: ServedModel | None = None
        """The model's description, read from its folder at the replica's latest start."""
        self.sleeping = ReplicaSleep()
        self.resources = resources
        self.heartbeat = ReplicaHeartbeat()
        self.blocks = BlockUseReader(self._awake_group)
        self.group: ReplicaGroup | None = None
        self.info: ReplicaInfo | None = None
        self.latest_report: Report | None = None
        """The replica's latest report since its latest start, or None."""
        self.account: CreditAccount | None = None
        """The replica's credit account while it is ready, otherwise None. Each start creates a new
        account."""
        self.retiring = False
        """Whether the replica is finishing its last requests before it is stopped permanently."""
        self.hang_timeout_s = hang_timeout_s
        self.load_timeout_s = load_timeout_s
        self._events = events
        self._launch = launch
        self._checks = checks
        self._background = Background()
        self._restarts = restarts
        self._next_start = StartTimer()
        self._watch: Watch | None = None
        """The model's files since the latest start."""
        self._load = LoadProgress(time.monotonic())
        self._fatal: Fatal | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._stopping = False

    @property
    def client_state(self) -> ReplicaState:
        """The replica's state as shown to clients. A failed replica stays failed until it is ready again."""
        return "failed" if self.failure else self.operator_state

    @property
    def operator_state(self) -> ReplicaState:
        """The replica's state as shown to operators. A ready replica can be "sleeping", "silent" or
        "draining"."""
        if self.sleeping.asleep:
            return "sleeping"
        if self.state != "ready":
            return self.state
        return "silent" if self.heartbeat.silent else "draining" if self.retiring else "ready"

    @property
    def weight_bytes(self) -> int:
        """Weight memory in bytes, or 0 if the replica is not ready."""
        return 0 if self.info is None else self.info.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """KV cache memory in bytes, or 0 if the replica is not ready."""
        return 0 if self.info is None else self.info.kv_bytes

    @property
    def on_gpus(self) -> bool:
        """Whether the replica is ready and runs on GPUs."""
        return self.info is not None and all(one.startswith("cuda") for one in self.info.devices)

    @property
    def ready_after_s(self) -> float | None:
        """How long the latest start took, in seconds, or None if the replica is not ready yet."""
        return None if self._ready_at is None else self._ready_at - self._started_at

    @property
    def answers(self) -> bool:
        """Whether new requests may be sent to the replica."""
        withheld = self.heartbeat.silent or self.retiring or self.sleeping.begun or self.sleeping.asleep
        return self.account is not None and not withheld

    # ── start and stop ──

    def start(self) -> None:
        """Launch the replica's ranks."""
        self.state = "starting"
        self._load = LoadProgress(time.monotonic())
        self.incarnation += 1
        self.described = None
        self.info = self.account = self.latest_report = self._fatal = self._ready_at = None
        self._started_at = time.monotonic()
        # Watch the files from here on, because they may be corrected before the load has failed.
        self._watch = Watch(self.spec.model_path, self._restarts.reset)
        self.heartbeat.start()
        self._events.replica_starting(self)
        try:
            spec = msgspec.structs.replace(
                self.spec,
                device="cpu" if self.fallback else self.spec.device,
                share_reads=self.settings.replica_range()[1] > 1,
            )
            self.group = self._launch(self.resources.assign(spec), self._message, self._ended)
        except OSError as error:
            self._ended(f"the replica could not be started: {error}")
            return
        if problem := self.resources.limit(self.group.pids, limits_of(self.settings)):
            self._events.replica_problem(self, problem)
        log.info("%s is starting (%s, pid %s)", self.name, self.spec.model_path, _join(self.group.pids))

    async def stop(self, grace_s: float) -> None:
        """Stop the replica permanently.

        A replica that is not ready is killed, because it has no requests and does not read messages while
        loading. If its processes do not exit even when killed, return after `KILLED_WITHIN_S`.
        """
        self._stopping = True
        self._next_start.stop()
        if self.group is not None:
            grace_s = grace_s if self.account is not None else 0.0
            try:
                async with asyncio.timeout(grace_s + KILLED_WITHIN_S):
                    await self.group.stop(grace_s)
            except TimeoutError:
                log.error(
                    "%s: not all of its processes (%s) have exited %.0f s after they were killed",
                    self.name,
                    _join(self.group.pids if self.group is not None else []),
                    KILLED_WITHIN_S,
                )
                if self.account is not None:
                    # Its requests continue on other replicas. The exit may be reported much later, or never.
                    self._events.replica_exited(self)
                    self.account = None
        self.resources.release()
        self.state = "stopped"

    async def sleep(self) -> str:
        """Release the weight and KV cache memory. The replica must have no requests. If the replica stays
        awake, return the reason. If it does not go to sleep within `_SLEEP_WITHIN_S`, kill it."""
        if self.account is None or self.group is None:
            return f"{self.name} is {self.operator_state}"
        return await self.sleeping.change(self.group, True, min(_SLEEP_WITHIN_S, self.load_timeout_s))

    def _awake_group(self) -> ReplicaGroup | None:
        """Return the replica's processes if it is ready and awake, otherwise None."""
        return self.group if self.account is not None and not self.sleeping.asleep else None

    async def wake(self) -> str:
        """Restore a sleeping replica's memory. If its processes have exited, restart them without waiting for
        the model to load. If the replica stays asleep because of too little memory, return the reason."""
        if not self.sleeping.asleep:
            return ""
        if self.group is None:
            self.sleeping.asleep, self.state = False, "restarting"
            await self._start_unless(self._checks.find_change)
            return ""
        return await self.sleeping.change(self.group, False, self.load_timeout_s)

    def stop_until_woken(self, reason: str) -> None:
        """Treat an awake replica as asleep and kill its processes. They are restarted when the replica is
        woken."""
        self._next_start.stop()
        self.sleeping.asleep, self.state = True, "stopped"
        self.failure, self.bad_checkpoint, self.failed_starts = "", False, 0
        self.kill(reason)

    def refuse(self, problem: str) -> None:
        """Keep the replica stopped because of a problem with its model's files. The files are rechecked
        regularly, and the replica is started once they are correct."""
        if self._stopping or self.retiring:
            return
        if problem != self.failure:
            self._events.replica_problem(self, problem)
        self.state, self.failure, self.last_error = "failed", problem, problem
        self.bad_checkpoint = True
        self._next_start.start(_CHECK_AGAIN_S, self._check_files)
        self._events.replica_changed(self)

    def retry(self) -> bool:
        """If the replica is waiting for its next start, start it now and close its circuit breaker. A replica
        that runs on the CPU instead of a GPU is restarted on a GPU. Return whether the replica was started or
        restarted."""
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
        """Kill the replica's processes. The replica is then restarted."""
        if self.group is not None:
            self.group.kill(reason)

    def check(self) -> None:
        """Detect whether the replica has stopped reporting, and kill it if it hangs. Call this a few times
        per second."""
        silent_s = self.heartbeat.silent_s
        if self.state == "ready":
            if self.heartbeat.falls_silent():
                log.warning(
                    "%s has not reported for %.1f s and receives no new requests", self.name, silent_s
                )
                self._events.replica_silence_changed(self)
            if silent_s > self.heartbeat.hang_limit_s(self.hang_timeout_s):
                self.kill(f"it did not report for {silent_s:.0f} s")
        elif self.state in ("starting", "loading"):
            if line := self._load.due(time.monotonic()):
                log.info("%s: %s", self.name, line)
            if silent_s > self.load_timeout_s:
                at = f" at {load_text(status)!r}" if (status := self.load_status) else ""
                self.kill(
                    f"no progress for {silent_s:.0f} s while {self.state}{at}: if the model's disk is that "
                    "slow, raise load_timeout_s"
                )

    def _message(self, rank: int, message: RankOutbound) -> None:
        if self.heartbeat.received(message):
            log.warning("%s is reporting again", self.name)
            self._events.replica_silence_changed(self)
        if isinstance(message, Report):
            self.latest_report = message
            self.steps.add(message)
            if self.account is not None:
                self._events.replica_reported(self, message)
        elif isinstance(message, Progress):
            if rank == 0 and self.state in ("starting", "loading"):
                self._progress(message)
        elif isinstance(message, Ready):
            self._ready(message.info)
        elif isinstance(message, BlockUse):
            self.blocks.received(message)
        elif isinstance(message, MemoryChanged):
            self.sleeping.changed(message)
        elif isinstance(message, Fatal) and self._fatal is None:
            # The first reported error is the cause; the other ranks' errors result from it.
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

    def _ready(self, info: ReplicaInfo) -> None:
        info = msgspec.structs.replace(info, devices=self.resources.numbered(info.devices))
        self.state, self.info = "ready", info
        self._ready_at = time.monotonic()
        self._restarts.ready()
        self.failed_starts = 0
        self.failure, self.bad_checkpoint = "", False
        self.account = CreditAccount(self.name, self.model, ", ".join(info.devices))
        self.account.predict(info.min_step_s, info.min_prompt_token_s)
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
            links = self.resources.links or "unknown"
            log.info("%s: links between the ranks: %s; collectives: %s", self.name, links, info.collectives)
        self._events.replica_ready(self)

    def _ended(self, reason: str) -> None:
        was_ready, self.group = self.account is not None, None
        self.heartbeat.end()
        if was_ready:
            self._events.replica_exited(self)
        self.account = self.info = self.latest_report = None
        self.blocks.reset()
        if self._stopping or self.retiring:
            self.state = "stopped"
            return
        if self.resources.reached_memory_limit():
            reason += f"; it reached memory_limit_gb = {self.settings.memory_limit_gb:g}"
        self.last_error = self._fatal.message if self._fatal else reason
        if self.sleeping.ended(self.last_error):
            self._events.replica_problem(self, self.last_error)
            self.state = "stopped"
            return
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        kind = self._fatal.kind if self._fatal else None
        again = self._restarts.exited(Exit(self.last_error, kind, served_s))
        if again.failure and kind in ("memory", "device") and self._may_fall_back:
            self.resources.release_gpus()
            self._restarts.reset()
            self.fallback, again = self.last_error, Restart(0.0)
        self._events.replica_problem(self, again.failure or self.last_error)
        self.failure, self.bad_checkpoint = again.failure, again.bad_checkpoint
        self.restarts += 1
        self.failed_starts += not was_ready
        if self.failure:
            self.state = "failed"
            self._next_start.start(again.delay_s, self._check_files, self._watch)
        else:
            self.state = "restarting"
            self._next_start.start(again.delay_s, self._restart)
        self._events.replica_changed(self)

    @property
    def _may_fall_back(self) -> bool:
        return self.settings.cpu_fallback and self.spec.device != "cpu" and not self.fallback

    def _restart(self) -> None:
        """Start the replica, unless its model version's files have changed since the version was added."""
        self._background.run(self._start_unless(self._checks.find_change))

    def _check_files(self) -> None:
        """Check the model's files after a failure and start the replica if no problem is found."""
        self._background.run(self._start_unless(self._checks.find_problem))

    async def _start_unless(self, check: Callable[[str, ModelSettings, float], Awaitable[str]]) -> None:
        """Start the replica unless `check`, a method of `StartChecks`, finds a problem."""
        problem = await check(self.model, self.settings, self.load_timeout_s)
        if self._stopping or self.retiring or self.state not in ("restarting", "failed"):
            return
        if problem:
            self.refuse(problem)
        else:
            self.start()

    # ── status for operators ──

    @property
    def load_status(self) -> LoadStatus | None:
        """Load progress, or None if the replica is not loading."""
        return self._load.status(time.monotonic()) if self.state == "loading" else None

    @property
    def next_start_s(self) -> float:
        """Time in seconds until the replica's next start, if it is waiting for one."""
        return self._next_start.left_s

    @property
    def breaker(self) -> BreakerState:
        """The circuit breaker's state."""
        return self._restarts.breaker(self.state == "failed", self._serving_s)

    @property
    def deaths(self) -> int:
        """Number of exits that currently count towards opening the circuit breaker."""
        return self._restarts.deaths(self._serving_s)

    @property
    def _serving_s(self) -> float:
        """Time in seconds since the replica became ready; 0 if the replica is not ready."""
        ready_at = self._ready_at if self.state == "ready" else None
        return 0.0 if ready_at is None else time.monotonic() - ready_at


def _join(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
