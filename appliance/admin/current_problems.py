"""The running service's current problems and their remedies, for `status` and `doctor`. A problem is listed
only while it lasts. Past problems are kept by `appliance.core.problems`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from appliance.protocol import ModelStatus, ReplicaStatus
from appliance.protocol.status import AuditStatus, CurrentProblem, DatabaseStatus, FrontStatus
from engine.logs import LogState

_STALLED_S = 3.0
"""Database operations and writes to standard error that take more than this many seconds are reported as
problems."""

_RETRIED = "fix the cause given in the message; the service retries automatically"


def current_problems(
    *,
    models: Iterable[ModelStatus],
    fronts: Iterable[FrontStatus],
    databases: Iterable[DatabaseStatus],
    audit: AuditStatus,
    log: LogState,
    clock_jump_s: float,
) -> list[CurrentProblem]:
    """Return all of the service's current problems."""
    return [
        *(problem for model in models for problem in _model(model)),
        *(problem for front in fronts for problem in _front(front)),
        *(problem for database in databases for problem in _database(database)),
        *_audit(audit),
        *_log(log),
        *_clock(clock_jump_s),
    ]


def _model(model: ModelStatus) -> Iterator[CurrentProblem]:
    if model.state == "failed":
        yield CurrentProblem(
            where=f"model {model.name}",
            description=f"failed: {model.detail}{_fallback(model)}",
            remedy=next((one.remedy for one in model.replicas if one.remedy), _RETRIED),
        )
    for replica in model.replicas:
        yield from _replica(replica)


def _fallback(model: ModelStatus) -> str:
    if not model.fallback:
        return ""
    return f"; model {model.fallback!r} answers requests whose keys allow a fallback"


def _replica(replica: ReplicaStatus) -> Iterator[CurrentProblem]:
    for one in replica.degraded:
        yield CurrentProblem(where=replica.name, description=one.description, remedy=one.remedy)
    if replica.state == "silent":
        yield CurrentProblem(
            where=replica.name,
            description=f"replica receives no new requests: {replica.detail}",
            remedy="wait: the replica's requests continue on another replica or after the restart; if the "
            "problem recurs, check the log and the machine's memory and load",
        )
    elif replica.state in ("restarting", "failed"):
        yield CurrentProblem(
            where=replica.name,
            description=f"{replica.state}, {replica.detail}: {replica.last_error}",
            remedy=replica.remedy or _RETRIED,
        )


def _front(front: FrontStatus) -> Iterator[CurrentProblem]:
    if front.state == "restarting":
        yield CurrentProblem(
            where=front.name,
            description=f"{front.detail}: {front.last_error}",
            remedy="see the log for the cause; the service retries automatically",
        )
    elif front.state == "starting" and front.detail:
        yield CurrentProblem(
            where=front.name,
            description=front.detail,
            remedy="see the log, and check that the disk with the model files is responding",
        )
    elif front.state == "silent":
        yield CurrentProblem(
            where=front.name,
            description=front.detail,
            remedy="wait: if the process does not recover, it will be killed and restarted; see the log",
        )
    elif front.state == "ready" and front.detail:
        yield CurrentProblem(
            where=front.name,
            description=front.detail,
            remedy="raise the limit named in the message, or run more front processes",
        )
    for model, reason in front.problems.items():
        yield CurrentProblem(
            where=front.name,
            description=f"model {model!r} cannot be used: {reason}",
            remedy="fix the model's files; the service retries automatically",
        )


def _database(database: DatabaseStatus) -> Iterator[CurrentProblem]:
    name = os.path.basename(database.path)
    waiting = f"{database.lag_rows:,} rows are waiting in memory"
    if database.last_error is not None:
        yield CurrentProblem(
            where=name,
            description=f"writes have failed for {database.failing_s:.0f} s; {waiting}: "
            f"{database.last_error}",
            remedy="fix the cause given in the message; until then, requests are served and rows wait in "
            "memory",
        )
    elif database.stalled_s > _STALLED_S:
        yield CurrentProblem(
            where=name,
            description=f"the current write has taken {database.stalled_s:.0f} s so far; {waiting}",
            remedy="check that the disk is responding and that no other program has locked the file",
        )


def _audit(audit: AuditStatus) -> Iterator[CurrentProblem]:
    if audit.last_error is not None:
        yield CurrentProblem(
            where="audit",
            description=audit.last_error,
            remedy="fix the cause given in the message; until then, audit entries wait in the spool",
        )
    elif audit.spooled:
        places = " and ".join([*audit.places, *(["memory"] if audit.in_memory else [])])
        yield CurrentProblem(
            where="audit",
            description=f"{audit.spooled:,} audit entries are waiting in {places}",
            remedy="fix the problem with control.db; the entries are then added to the audit chain",
        )


def _clock(jump_s: float) -> Iterator[CurrentProblem]:
    if jump_s:
        yield CurrentProblem(
            where="clock",
            description=f"the system clock was changed by {jump_s / 3600:+,.1f} hours, so the removal of old "
            "log entries is paused",
            remedy="if the clock is wrong now, correct it with timedatectl; otherwise, wait until the "
            "removal resumes after a day",
        )


def _log(log: LogState) -> Iterator[CurrentProblem]:
    if log.stalled_s > _STALLED_S:
        yield CurrentProblem(
            where="log",
            description=f"standard error has not been read for {log.stalled_s:.0f} s; {log.dropped_lines:,} "
            "log lines were dropped",
            remedy="resume the program that reads the log (journald, a terminal or the reader of a pipe)",
        )
