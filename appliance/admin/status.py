"""Puts the service's status together."""

from __future__ import annotations

import os
import platform
import sqlite3
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

import msgspec

from appliance.admin.current_problems import current_problems
from appliance.core.controller import Switchboard
from appliance.core.drains import Drain
from appliance.protocol import (
    AuditStatus,
    DatabaseStatus,
    DrainStatus,
    InFlight,
    ModelState,
    ModelStatus,
    QueueStatus,
    ReplicaState,
    ReplicaStatus,
    ServiceState,
    SocketStatus,
    Status,
)
from engine.logs import log_state
from store.control import ControlStore
from store.trail import TrailState
from store.writer import Writer

_BEST_FIRST: tuple[ReplicaState, ...] = (
    *("ready", "draining", "silent", "loading", "starting", "restarting", "failed", "stopped"),
)


def service_version() -> str:
    """Return the installed product's version."""
    try:
        return version("appliance")
    except PackageNotFoundError:
        return "unknown (not installed)"


def database_status(database: ControlStore | Writer) -> DatabaseStatus:
    """Return the status of a database and its writer."""
    state = msgspec.structs.asdict(database.state())
    return DatabaseStatus(path=str(database.path), stalled_s=database.stalled_s, **state)


def audit_status(state: TrailState) -> AuditStatus:
    """Return the status of the audit trail."""
    spool = state.spool
    return AuditStatus(
        rows=state.head.seq,
        head=state.head.hash,
        recorded_rows=state.recorded_seq,
        spooled=spool.rows,
        spooled_since=None if spool.since is None else datetime.fromisoformat(spool.since).timestamp(),
        in_memory=spool.in_memory,
        places=list(spool.places),
        lost=spool.lost,
        last_error=state.last_error,
    )


def status_of(
    switchboard: Switchboard,
    *,
    sockets: Iterable[SocketStatus],
    databases: list[DatabaseStatus],
    audit: AuditStatus,
    started_at: float,
    clock_jump_s: float = 0.0,
) -> Status:
    """Return everything that `appliance status` shows."""
    settings, figures = switchboard.settings, switchboard.requests.stats()
    reason = switchboard.readiness.reason()
    models = _models(switchboard)
    fronts = [front.status() for front in switchboard.fronts]
    problems = current_problems(
        models=models,
        fronts=fronts,
        databases=databases,
        audit=audit,
        log=log_state(),
        clock_jump_s=clock_jump_s,
    )
    return Status(
        version=service_version(),
        pid=os.getpid(),
        uid=os.geteuid(),
        python=platform.python_version(),
        sqlite=sqlite3.sqlite_version,
        started_at=started_at,
        uptime_s=time.time() - clock_jump_s - started_at,
        state=_state(switchboard, reason, [front.state for front in fronts], degraded=bool(problems)),
        reason=reason,
        config_file=settings.config_file,
        run_dir=settings.run_dir,
        state_dir=settings.state_dir,
        sockets=list(sockets),
        fronts=fronts,
        models=models,
        queue=QueueStatus(
            limit=settings.queue.limit, timeout_s=settings.queue.timeout_s, **figures._asdict()
        ),
        databases=databases,
        audit=audit,
        log_dropped_lines=log_state().dropped_lines,
        current_problems=problems,
        problems=switchboard.problems.recent(),
        drains=[drain_status(switchboard, drain) for drain in _drains(switchboard)],
    )


def drain_status(switchboard: Switchboard, drain: Drain) -> DrainStatus:
    """Return the status of a drain."""
    left = switchboard.requests.remaining(drain.model)
    return DrainStatus(
        model=drain.model,
        state=drain.state,
        grace_s=drain.grace_s,
        queue=drain.hold,
        started_at=drain.started_at,
        elapsed_s=drain.elapsed_s,
        grace_left_s=drain.grace_left_s,
        running=left.running,
        queued=left.queued,
        held=switchboard.requests.held(drain.model),
        tokens_left=left.tokens,
        eta_s=left.seconds,
        ended=drain.ended,
    )


def _drains(switchboard: Switchboard) -> list[Drain]:
    own = [switchboard.stopping] if switchboard.stopping is not None else []
    return [*own, *switchboard.drains]


def in_flight(switchboard: Switchboard) -> list[InFlight]:
    """Return the requests that have not ended, oldest first."""
    now = time.time()
    return [
        InFlight(
            request_id=request.request_id,
            state=request.state,
            model=request.first.model,
            tenant=request.first.identity.tenant,
            key_id=request.first.identity.key_id,
            peer=request.first.peer,
            front=request.front,
            replica=request.latest.replica if request.latest else "",
            attempt=request.admit.attempt,
            age_s=now - request.first.arrived_at,
            prompt_tokens=request.first.prompt_tokens,
            max_tokens=request.first.max_tokens,
        )
        for request in switchboard.requests
    ]


def _state(switchboard: Switchboard, reason: str, fronts: Sequence[str], degraded: bool) -> ServiceState:
    """Return the service's state; `degraded`: there are current problems."""
    if (closing := switchboard.stopping or switchboard.drains.of(None)) is not None:
        return closing.state_word
    drains = [switchboard.drains.of(model) for model in switchboard.models]
    words = {drain.state_word for drain in drains if drain is not None}
    if words and None not in drains:
        return "draining" if "draining" in words else "drained"
    if degraded:
        return "degraded"
    replicas = [replica.word for replica in switchboard.replicas]
    return "starting" if reason or any(state != "ready" for state in (*replicas, *fronts)) else "ready"


def _models(switchboard: Switchboard) -> list[ModelStatus]:
    statuses = []
    for model in switchboard.models.values():
        replicas = [replica.status() for replica in switchboard.fleet.of(model.name)]
        failure = switchboard.requests.failure(model.name) or switchboard.readiness.front_trouble(model.name)
        state, detail = _model_state(switchboard, model.name, replicas)
        statuses.append(
            ModelStatus(
                name=model.name,
                folder=model.folder,
                version=model.version,
                created=model.created,
                state="failed" if failure else state,
                detail=failure or detail,
                max_model_len=model.max_model_len,
                queued=switchboard.requests.queued(model.name),
                replicas=replicas,
            )
        )
    return statuses


def _model_state(
    switchboard: Switchboard, model: str, replicas: list[ReplicaStatus]
) -> tuple[ModelState, str]:
    """Return a model's state, and its explanation."""
    if (drain := switchboard.drains.of(model)) is not None:
        return drain.state_word, f"taken out of service until: appliance resume --model {model}"
    # Clients get the best of its replicas.
    best = min(replicas, key=lambda replica: _BEST_FIRST.index(replica.state), default=None)
    if best is None:
        return "loading", "its replica is being replaced"
    coming = [replica.name for replica in replicas if replica.state in ("starting", "loading")]
    if best.state == "ready":
        return "ready", f"{', '.join(coming)} loads" if coming else best.detail
    if best.state == "starting" or best.state == "draining":
        return "loading", best.detail
    return best.state, best.detail
