"""Collects the service status for operators. Only reads the state of other components."""

from __future__ import annotations

import functools
import os
import platform
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import msgspec

from appliance.admin.current_problems import current_problems
from appliance.channel.served_models import ServedModel
from appliance.core.clock import ClockGuard
from appliance.core.drains import Drain, Drains
from appliance.core.problems import Problems
from appliance.core.readiness import Readiness
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.models.replica_status import replica_status
from appliance.protocol import DrainStatus, ModelState, ModelStatus, ReplicaState, ReplicaStatus
from appliance.protocol.status import (
    AuditStatus,
    DatabaseStatus,
    QueueStatus,
    ServiceState,
    SocketStatus,
    Status,
)
from appliance.settings import Settings
from appliance.traffic.state import TrafficState
from engine.logs import log_state
from store.audit import unix_time
from store.control import ControlStore
from store.trail import AuditTrail, TrailState
from store.writer import Writer

_ETA_EVERY_S = 1.0
"""Minimum interval, in seconds, between predictions of drain durations. A prediction examines every running
request, and consoles may read several snapshots per second, so the last predictions are reused."""
_BEST_FIRST: tuple[ReplicaState, ...] = (
    *("ready", "draining", "sleeping", "silent", "loading", "starting", "restarting", "failed", "stopped"),
)

_UNLOADED = "not in memory: the next request loads it"
_UNLOADING = "being unloaded; the next request loads it again"

_SETTLED = frozenset(("ready", "sleeping", "draining", "stopping", "stopped"))
"""States of replicas and front processes that do not make the service "starting". "stopping" and "stopped"
are included because unloading a model also stops its replicas. Without a ready replica for each required
model, the service is not ready in any case."""


@functools.cache
def service_version() -> str:
    """Return the product version. The version is looked up only once, because every status contains it, and
    each lookup reads a file and creates reference cycles, which the core rarely collects
    (`appliance.core.process.COLLECT_AFTER`)."""
    try:
        return version("appliance")
    except PackageNotFoundError:
        return "unknown (not installed)"


def database_status(database: ControlStore | Writer) -> DatabaseStatus:
    """Return the status of a database and its writer."""
    state = msgspec.structs.asdict(database.state())
    return DatabaseStatus(path=str(database.path), stalled_s=database.stalled_s, **state)


def audit_status(state: TrailState) -> AuditStatus:
    """Return the audit trail's status."""
    spool = state.spool
    return AuditStatus(
        rows=state.head.seq,
        head=state.head.hash,
        recorded_rows=state.recorded_seq,
        spooled=spool.rows,
        spooled_since=None if spool.since is None else unix_time(spool.since),
        in_memory=spool.in_memory,
        places=[] if spool.path is None else [str(spool.path)],
        dropped=spool.dropped,
        last_error=state.last_error,
    )


@dataclass(kw_only=True)
class StatusReader:
    """Reads the status of the service and its drains."""

    settings: Callable[[], Settings]
    traffic: TrafficState
    models: ModelManager
    fronts: FrontPool
    drains: Drains
    readiness: Readiness
    problems: Problems
    trail: AuditTrail
    databases: list[ControlStore | Writer]
    sockets: Callable[[], list[SocketStatus]]
    clock: ClockGuard
    started_at: float
    _etas: dict[str, float | None] = field(default_factory=dict, init=False)
    _etas_at: float = field(default=float("-inf"), init=False)

    def status(self) -> Status:
        """Return everything shown by `appliance status`."""
        settings, log, clock_jump_s = self.settings(), log_state(), self.clock.jump_s
        reason = self.readiness.reason()
        etas = self._drain_etas()
        models = [self._model(model, etas[name]) for name, model in self.models.models.items()]
        fronts = [front.status() for front in self.fronts.fronts]
        databases = [database_status(database) for database in self.databases]
        audit = audit_status(self.trail.state())
        problems = current_problems(
            models=models, fronts=fronts, databases=databases, audit=audit, log=log, clock_jump_s=clock_jump_s
        )
        return Status(
            version=service_version(),
            pid=os.getpid(),
            uid=os.geteuid(),
            python=platform.python_version(),
            sqlite=sqlite3.sqlite_version,
            started_at=self.started_at,
            uptime_s=time.time() - clock_jump_s - self.started_at,
            state=self._state(reason, degraded=bool(problems)),
            reason=reason,
            config_file=settings.config_file,
            run_dir=settings.run_dir,
            state_dir=settings.state_dir,
            sockets=self.sockets(),
            fronts=fronts,
            models=models,
            queue=QueueStatus(
                limit=settings.queue.limit,
                timeout_s=settings.queue.timeout_s,
                **msgspec.structs.asdict(self.traffic.queue_stats()),
            ),
            databases=databases,
            audit=audit,
            log_dropped_lines=log.dropped_lines,
            current_problems=problems,
            problems=self.problems.recent(),
            drains=[self.drain(drain) for drain in self.drains],
        )

    def drain(self, drain: Drain) -> DrainStatus:
        """Return a drain's status."""
        left = self.traffic.remaining(drain.model)
        return DrainStatus(
            stopping=drain is self.drains.stopping,
            model=drain.model,
            state=drain.state,
            grace_s=drain.grace_s,
            queue=drain.hold,
            started_at=drain.started_at,
            elapsed_s=drain.elapsed_s,
            grace_left_s=drain.grace_left_s,
            running=left.running,
            queued=left.queued,
            held=self.traffic.held(drain.model),
            tokens_left=left.tokens,
            eta_s=left.seconds,
            ended=drain.ended,
        )

    def _state(self, reason: str, degraded: bool) -> ServiceState:
        """Return the service's state. `degraded` is true if the service currently has problems."""
        if (drain := self.drains.of_service) is not None:
            return drain.public_state
        drains = [self.drains.of(model) for model in self.models.models]
        states = {drain.public_state for drain in drains if drain is not None}
        if states and None not in drains:
            return "draining" if "draining" in states else "drained"
        if degraded:
            return "degraded"
        processes = [
            *(replica.client_state for replica in self.models.replicas),
            *(front.state for front in self.fronts.fronts),
        ]
        return "ready" if not reason and _SETTLED.issuperset(processes) else "starting"

    def _drain_etas(self) -> dict[str, float | None]:
        """Return how long draining each model would take. Predictions are reused for `_ETA_EVERY_S`
        seconds."""
        now = time.monotonic()
        if now - self._etas_at >= _ETA_EVERY_S or self._etas.keys() != self.models.models.keys():
            self._etas = {name: self.traffic.remaining(name).seconds for name in self.models.models}
            self._etas_at = now
        return self._etas

    def _model(self, model: ServedModel, drain_eta_s: float | None) -> ModelStatus:
        traffic = self.traffic.models[model.name]
        replicas = [replica_status(replica) for replica in self.models.of(model.name)]
        state, detail = self._model_state(model.name, replicas)
        if failure := traffic.failure or self.readiness.front_problems(model.name):
            state, detail = "failed", failure
        return ModelStatus(
            name=model.name,
            folder=model.folder,
            version=model.version,
            created=model.created,
            state=state,
            detail=detail,
            max_model_len=model.max_model_len,
            queued=traffic.queued,
            drain_eta_s=drain_eta_s,
            fallback=self.models.fallback(model.name),
            replicas=replicas,
            scaling=self.models.scaling(model.name),
        )

    def _model_state(self, model: str, replicas: list[ReplicaStatus]) -> tuple[ModelState, str]:
        """Return a model's state, with an explanation."""
        if (drain := self.drains.of(model)) is not None:
            return (
                drain.public_state,
                f"taken out of service by an operator; put it back with: appliance resume --model {model}",
            )
        if (drain := self.drains.of_service) is not None:
            return drain.public_state, drain.reason
        # A model's state is the best of its replicas' states, because one good replica is enough to serve
        # clients.
        best = min(replicas, key=lambda replica: _BEST_FIRST.index(replica.state), default=None)
        if self.models.is_parked(model) and (best is None or best.state != "sleeping"):
            return "available", _UNLOADED if best is None else _UNLOADING
        if best is None:
            return "loading", "the model's replica is being replaced"
        coming = [replica.name for replica in replicas if replica.state in ("starting", "loading")]
        if best.state == "ready":
            return "ready", f"still loading: {', '.join(coming)}" if coming else best.detail
        if best.state == "starting" or best.state == "draining":
            return "loading", best.detail
        return best.state, best.detail
