"""The service status, as reported by `GET /status` and `appliance status`."""

from __future__ import annotations

from typing import Literal

import msgspec

from appliance.channel.front_stats import FrontStats
from appliance.protocol import DrainStatus, ModelStatus
from store.fields import CLASS_NAMES as CLASS_NAMES
from store.fields import ClassName
from store.structs import WriterState

FrontState = Literal["starting", "ready", "silent", "restarting", "stopping", "stopped"]
"""A "silent" front process has not reported for 3 seconds and gets no new connections."""


class FrontStatus(FrontStats, frozen=True, kw_only=True):
    """The status of one front process."""

    name: str
    state: FrontState
    detail: str = ""
    """Explanation of the state, such as "restarting in 2 s"."""
    pid: int | None = None
    cpu_us_per_token: float | None = None
    restarts: int = 0
    last_error: str = ""


class ClassStatus(msgspec.Struct, kw_only=True):
    """The status of a service class across all models."""

    name: ClassName
    waiting: int
    oldest_wait_s: float
    expected_wait_s: float | None
    """Predicted wait in seconds for a request that arrives now, based on measured rates. Null if there are no
    measurements for any model."""
    target_s: float | None
    """Target waiting time in seconds, or None for P3."""


class QueueStats(msgspec.Struct, kw_only=True):
    """Counters and measurements of the request queue. Totals are counted from the service's start."""

    waiting: int
    """Number of requests waiting for dispatch."""
    running: int
    """Number of requests running on replicas."""
    oldest_wait_s: float
    admitted: int
    refused: int
    """Number of requests refused by the core."""
    ended: int
    """Number of requests that have ended and have a closed row in the request log."""
    waiting_tokens: int = 0
    """Number of prompt tokens in waiting requests."""
    preemptions: int = 0
    """Total number of preemptions over all finished requests."""
    overload: str = ""
    """Description of the overloaded models and the requests refused as a result. Empty if no model is
    overloaded."""
    overload_step: int = 0
    """Current step of load shedding; 0 if there is no overload."""
    classes: list[ClassStatus] = []
    """One entry per service class, beginning with P0."""


class QueueStatus(QueueStats, kw_only=True):
    """The status of the request queue."""

    limit: int
    timeout_s: float


class DatabaseStatus(WriterState, frozen=True, kw_only=True):
    """The status of a database and its writer."""

    path: str
    stalled_s: float = 0.0
    """Time the writer has spent on its current operation, in seconds. A high value means that the disk is not
    responding."""


class AuditStatus(msgspec.Struct, kw_only=True):
    """The audit trail of operators' actions."""

    rows: int = 0
    """Number of rows in the audit chain. This is also the sequence number of the newest row."""
    head: str = ""
    """Hash of the newest row in the audit chain."""
    recorded_rows: int = 0
    """Number of rows proven unchanged by chain heads recorded outside the database."""
    spooled: int = 0
    """Number of audit rows that the database has not yet accepted. Once accepted, they are added to the
    chain."""
    spooled_since: float | None = None
    """Unix time at which the oldest row not yet accepted by the database was spooled."""
    places: list[str] = []
    """Files that contain audit rows not yet accepted by the database."""
    in_memory: int = 0
    """Number of waiting audit rows that could not be written to any file. If the service exits, these rows
    exist only in its log."""
    dropped: int = 0
    """Number of audit rows that could not be added to the chain and exist only in the service's log."""
    last_error: str | None = None
    """The audit trail's current error, or None if there is none."""


SocketName = Literal["api", "tcp", "admin", "metrics"]


SocketState = Literal["accepting", "waiting", "closed"]
"""While a socket is "waiting", no front process is ready, and connections wait in the socket's backlog."""


class SocketStatus(msgspec.Struct, kw_only=True):
    """The status of a listening socket."""

    name: SocketName
    address: str
    state: SocketState
    accepted: int = 0


class Problem(msgspec.Struct, kw_only=True):
    """A problem that occurred in the past and may be over."""

    at: float
    """When the problem last occurred, in unix seconds."""
    where: str
    """Name of the front process, replica, database or socket in which the problem occurred."""
    description: str
    count: int = 1


class CurrentProblem(msgspec.Struct, kw_only=True):
    """A current problem and its remedy."""

    where: str
    """Name of the model, replica, front process or database with the problem, or "audit" or "log"."""
    description: str
    remedy: str


ServiceState = Literal["starting", "ready", "degraded", "draining", "drained"]
"""A service that is "degraded" answers requests, but has current problems."""


class Status(msgspec.Struct, kw_only=True):
    """The status of the whole service."""

    version: str
    pid: int
    uid: int
    python: str
    sqlite: str
    started_at: float
    """When the service started, in unix seconds."""
    uptime_s: float
    state: ServiceState
    reason: str = ""
    """Why the service is not ready."""
    config_file: str
    run_dir: str
    state_dir: str
    sockets: list[SocketStatus]
    fronts: list[FrontStatus]
    models: list[ModelStatus]
    queue: QueueStatus
    databases: list[DatabaseStatus]
    audit: AuditStatus = msgspec.field(default_factory=AuditStatus)
    log_dropped_lines: int = 0
    """Number of the core's log lines dropped since startup because standard error was not being read."""
    current_problems: list[CurrentProblem] = []
    """Current problems, which `appliance doctor` also reports."""
    problems: list[Problem]
    """Recent problems, newest first."""
    drains: list[DrainStatus] = []
