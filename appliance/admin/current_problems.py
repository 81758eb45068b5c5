"""The running service's current problems, each with its remedy, as one list for `status` and `doctor`.

`appliance.core.problems` keeps past events. A problem stays in this list for as long as it lasts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from appliance.protocol import (
    AuditStatus,
    CurrentProblem,
    DatabaseStatus,
    FrontStatus,
    ModelStatus,
    ReplicaStatus,
)
from engine.logs import LogState

_STALLED_S = 3.0
"""A write to standard error or a database operation is reported as a problem if it takes longer than this."""


def current_problems(
    *,
    models: Iterable[ModelStatus],
    fronts: Iterable[FrontStatus],
    databases: Iterable[DatabaseStatus],
    audit: AuditStatus,
    log: LogState,
    clock_jump_s: float,
) -> list[CurrentProblem]:
    """Return all current problems of the service."""
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
            what=f"failed: {model.detail}",
            remedy="correct the cause that the message names; the service then retries automatically",
        )
    for replica in model.replicas:
        yield from _replica(replica)


def _replica(replica: ReplicaStatus) -> Iterator[CurrentProblem]:
    if replica.state == "silent":
        yield CurrentProblem(
            where=replica.name,
            what=f"gets no new requests: {replica.detail}",
            remedy="wait: its requests continue on another replica or after the restart; if it repeats, "
            "see the log, the memory and the load of the machine",
        )
    elif replica.state in ("restarting", "failed"):
        yield CurrentProblem(
            where=replica.name,
            what=f"{replica.state}, {replica.detail}: {replica.last_error}",
            remedy="correct the cause that the message names; the service then retries automatically",
        )


def _front(front: FrontStatus) -> Iterator[CurrentProblem]:
    if front.state == "restarting":
        yield CurrentProblem(
            where=front.name,
            what=f"{front.detail}: {front.last_error}",
            remedy="see the log; the service retries automatically",
        )
    elif front.state == "starting" and front.detail:
        yield CurrentProblem(
            where=front.name,
            what=front.detail,
            remedy="see the log, and whether the disk with the models' files answers",
        )
    elif front.state == "ready" and front.detail:
        yield CurrentProblem(
            where=front.name,
            what=front.detail,
            remedy="wait: a front that stays silent is killed and restarted; see the log"
            if front.detail.startswith("silent")
            else "raise the limit that the message names, or start more fronts",
        )
    for model, why in front.problems.items():
        yield CurrentProblem(
            where=front.name,
            what=f"model {model!r} cannot be used: {why}",
            remedy="correct the files of the model; the service then retries automatically",
        )


def _database(database: DatabaseStatus) -> Iterator[CurrentProblem]:
    name = os.path.basename(database.path)
    waiting = f"{database.lag_rows:,} rows wait in memory"
    if database.last_error is not None:
        yield CurrentProblem(
            where=name,
            what=f"has refused writes for {database.failing_s:.0f} s; {waiting}: {database.last_error}",
            remedy="correct the cause that the message names; until then requests are served, and rows wait "
            "in memory",
        )
    elif database.stalled_s > _STALLED_S:
        yield CurrentProblem(
            where=name,
            what=f"a write has taken {database.stalled_s:.0f} s so far; {waiting}",
            remedy="check whether the disk answers, and whether another program has locked the file",
        )


def _audit(audit: AuditStatus) -> Iterator[CurrentProblem]:
    if audit.last_error is not None:
        yield CurrentProblem(
            where="audit",
            what=audit.last_error,
            remedy="correct the cause that the message names; until then entries wait in the spool",
        )
    elif audit.spooled:
        places = " and ".join([*audit.places, *(["memory"] if audit.in_memory else [])])
        yield CurrentProblem(
            where="audit",
            what=f"{audit.spooled:,} entries wait in {places}",
            remedy="correct the problem of control.db; the entries are then added to the chain",
        )


def _clock(jump_s: float) -> Iterator[CurrentProblem]:
    if jump_s:
        yield CurrentProblem(
            where="clock",
            what=f"the time of day was changed by {jump_s / 3600:+,.1f} hours, so nothing is removed "
            "from the logs",
            remedy="if the time is wrong now, set it back (timedatectl); if it is right, wait: after a day "
            "old entries are removed again",
        )


def _log(log: LogState) -> Iterator[CurrentProblem]:
    if log.stalled_s > _STALLED_S:
        yield CurrentProblem(
            where="log",
            what=f"standard error has not been read for {log.stalled_s:.0f} s; "
            f"{log.dropped_lines:,} log lines are lost",
            remedy="resume the program that reads the log: a stopped terminal, a pipe or journald",
        )
