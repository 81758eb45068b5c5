"""The types of the admin API, which the CLI and the console use. JSON on the wire."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.messages import ReplicaStats
from store.policies import KeyFields, TenantRecord
from store.structs import KeptText, WriterState


def precision(dtype: str, weights: str, kv_cache_dtype: str) -> str:
    """Return a model's dtype and the dtypes that differ from it, e.g. "bfloat16, weights fp8, KV fp8"."""
    held = (("weights", weights), ("KV", kv_cache_dtype))
    return ", ".join([dtype, *(f"{what} {name}" for what, name in held if name != dtype)])


LogLevel = Literal["debug", "info", "warning", "error"]
ProcessState = Literal["starting", "ready", "restarting", "stopping", "stopped"]


class FrontStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and measurements of a front. Totals are since its start."""

    connections: int = 0
    busy_connections: int = 0
    """Connections of known clients (local users, or a valid key) whose request is being answered."""
    max_connections: int = 0
    """Connections of known clients that the front can hold: the configured limit, or fewer if file
    descriptors are scarce."""
    unauthenticated_connections: int = 0
    """Connections that have not yet sent a request with a valid key."""
    refused_connections: int = 0
    """Connections that were closed, or answered 503, because the limit was reached."""
    evicted_connections: int = 0
    """Connections without a valid key that were closed to make room for others."""
    cut_off_connections: int = 0
    """Connections that were closed because their clients did not read the answers."""
    refused_bodies: int = 0
    """Requests that were refused because the bodies in progress had too many bytes."""
    refused_heads: int = 0
    """Requests that were refused because the headers in progress had too many bytes."""
    streams: int = 0
    requests: int = 0
    tokens: int = 0
    """Number of streamed tokens."""
    unauthenticated: int = 0
    """Requests that were denied because they had no valid key or user."""
    cpu_seconds: float = 0.0
    kept_answers: int = 0
    """Runs with an `Idempotency-Key`, in progress or kept for retries."""
    kept_bytes: int = 0
    """Memory that these answers occupy."""
    dropped_texts: int = 0
    """Requests whose texts were not kept because too many waited."""
    log_dropped_lines: int = 0
    """Lines of the front's log that were dropped because standard error was not read."""
    problems: dict[str, str] = {}
    """Why the front cannot serve a model, by the model's name: for example, an unreadable tokenizer."""


class FrontStatus(FrontStats, frozen=True, kw_only=True):
    """One front process."""

    name: str
    state: ProcessState
    detail: str = ""
    """Explains the state, for example "restarting in 2 s"."""
    pid: int | None = None
    cpu_us_per_token: float | None = None
    restarts: int = 0
    last_error: str = ""


ReplicaState = Literal[
    "starting", "loading", "ready", "silent", "draining", "restarting", "failed", "stopped"
]
"""A silent replica has not reported for 3 seconds and gets no new requests; a draining one finishes what it
has."""


class ReplicaStatus(ReplicaStats, frozen=True, kw_only=True):
    """One running copy of a model."""

    name: str
    state: ReplicaState
    detail: str = ""
    """Explains the state, for example "loading weights 43%"."""
    fraction: float | None = None
    """Progress of loading, 0 to 1."""
    pids: list[int] = msgspec.field(default_factory=list)
    """One entry for each rank."""
    devices: list[str] = msgspec.field(default_factory=list)
    """One entry for each rank."""
    backend: str = ""
    dtype: str = ""
    """The dtype of computations."""
    weights: str = ""
    """The dtype of the layers' matrices: the same as `dtype`, or "fp8"."""
    kv_cache_dtype: str = ""
    """The dtype of the KV cache: the same as `dtype`, or "fp8"."""
    tensor_parallel_size: int = 1
    links: str = ""
    """What links the GPUs of the ranks, e.g. "NVLink (18 links)"; empty for one GPU or if not known."""
    collectives: str = ""
    """What exchanges data between the ranks, e.g. "NCCL"; empty for one rank."""
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    predicted_bytes: int = 0
    used_bytes: int = 0
    load_seconds: float = 0.0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    step: int = 0
    credit_seqs: int = 0
    """Number of sequences that the replica can start now."""
    credit_tokens: int = 0
    last_report_s: float | None = None
    """Seconds since the last report."""
    restarts: int = 0
    last_error: str = ""


ModelState = Literal["ready", "loading", "silent", "restarting", "failed", "draining", "drained", "stopped"]
"""Clients get answers from a ready model. Requests for a failed, draining or drained one are refused at
once."""


class ModelStatus(msgspec.Struct, kw_only=True):
    """A model that applications can name."""

    name: str
    folder: str
    version: str
    """A fingerprint of the folder's files."""
    created: int
    """When the model's files were created, in unix seconds."""
    state: ModelState
    detail: str = ""
    """Explains the state; of a failed model, the reason."""
    max_model_len: int = 0
    queued: int = 0
    replicas: list[ReplicaStatus] = []


class Configuration(msgspec.Struct, kw_only=True):
    """The settings in effect, and the source of each."""

    files: list[str]
    """The files that were read, in order."""
    settings: dict[str, Any]
    """The complete settings, in the form of the files."""
    places: dict[str, str]
    """The source of each setting: FILE:LINE, a flag of the command line, or "default"."""


class Reloaded(msgspec.Struct, kw_only=True):
    """What a reload of the settings did."""

    changed: list[str]
    """Changed settings, with the old and the new value."""
    models: list[str]
    """The resulting changes of models: loaded, replaced or removed."""
    at_restart: list[str]
    """Changed settings that take effect after a restart only."""


DrainState = Literal["announced", "draining", "drained"]
"""An announced drain reports not ready but still accepts requests; when it is drained, nothing runs."""


class DrainStatus(msgspec.Struct, kw_only=True):
    """One drain, from its beginning until service is resumed."""

    model: str | None
    """The drained model; null: the whole service."""
    state: DrainState
    grace_s: float
    """Requests that still run so many seconds after the drain began to refuse requests are ended."""
    grace_left_s: float
    """Seconds until these requests are ended."""
    queue: bool
    """New requests wait until service is resumed, instead of being refused."""
    started_at: float
    """When the drain began, in unix seconds."""
    elapsed_s: float
    """Seconds from the beginning of the drain until now, or until it was complete."""
    running: int
    queued: int
    """Requests that the drain waits for: those that run, and those that waited when it began."""
    held: int
    """New requests that wait until service is resumed."""
    tokens_left: int
    """Output tokens that these requests are expected to need, according to recent answers."""
    eta_s: float | None = None
    """Predicted seconds until these requests have ended, by the measured rates; null without measurements."""
    ended: int = 0
    """Requests that were ended after the grace period."""


class ClassStatus(msgspec.Struct, kw_only=True):
    """A class of requests, over all models."""

    name: str
    """The class, from "P0" to "P3"."""
    waiting: int
    oldest_wait_s: float
    expected_wait_s: float
    """Predicted wait of a request that arrives now, by the measured rates; 0 without measurements."""
    target_s: float | None
    """The target for the wait; None for P3."""


class QueueStats(msgspec.Struct, kw_only=True):
    """Counters and measurements of the request queue. Totals are since the start of the service."""

    waiting: int
    """Requests that wait for dispatch."""
    running: int
    """Requests on a replica."""
    oldest_wait_s: float
    admitted: int
    refused: int
    """Requests that the core refused."""
    ended: int
    """Requests whose rows in the log have ended."""
    waiting_tokens: int = 0
    """Prompt tokens of waiting requests."""
    preemptions: int = 0
    """Preemptions of requests that have ended."""
    overload: str = ""
    """The overloaded models and which requests they refuse; empty without overload."""
    overload_step: int = 0
    """The step of the load shedder; 0 without overload."""
    classes: list[ClassStatus] = []
    """One entry for each class, from P0 on."""


class QueueStatus(QueueStats, kw_only=True):
    """The request queue."""

    limit: int
    timeout_s: float


class DatabaseStatus(WriterState, frozen=True, kw_only=True):
    """One of the databases and its writer."""

    path: str
    stalled_s: float = 0.0
    """How long the writer has worked on one operation: long if the disk does not answer."""


class AuditStatus(msgspec.Struct, kw_only=True):
    """The audit trail of operators' actions."""

    rows: int = 0
    """Number of rows in the chain: the newest row's seq."""
    head: str = ""
    """The newest row's hash."""
    recorded_rows: int = 0
    """Up to this row, recorded heads outside the database prove that the chain is unchanged."""
    spooled: int = 0
    """Rows that the database has not accepted yet. They are added to the chain when it does."""
    spooled_since: float | None = None
    """When the oldest of these rows was spooled, in unix seconds."""
    places: list[str] = []
    """Files in which these rows wait."""
    in_memory: int = 0
    """Number of these rows that no file accepts either. If the service ends, only its log has them."""
    lost: int = 0
    """Rows that could be stored nowhere; only the service's log has them."""
    last_error: str | None = None
    """The present error; None if there is none."""


SocketName = Literal["api", "tcp", "admin", "metrics"]
SocketState = Literal["accepting", "waiting", "closed"]
"""While a socket is "waiting", no front is ready, and connections wait in its backlog."""


class SocketStatus(msgspec.Struct, kw_only=True):
    """A listening socket."""

    name: SocketName
    address: str
    state: SocketState
    accepted: int = 0


class Problem(msgspec.Struct, kw_only=True):
    """A past problem."""

    at: float
    """When the problem occurred last, in Unix seconds."""
    where: str
    """A front, replica, database or socket."""
    what: str
    count: int = 1


class CurrentProblem(msgspec.Struct, kw_only=True):
    """A present problem, and its remedy."""

    where: str
    """A model, replica, front, database, "audit" or "log"."""
    what: str
    remedy: str


ServiceState = Literal["starting", "ready", "degraded", "draining", "drained"]
"""A degraded service has current problems."""


class Status(msgspec.Struct, kw_only=True):
    """The state of the service."""

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
    """Lines of the core's log that were dropped since the start because standard error was not read."""
    current_problems: list[CurrentProblem] = []
    """The same list as `doctor` reports."""
    problems: list[Problem]
    """Recent problems, the most recent first."""
    drains: list[DrainStatus] = []


RequestState = Literal["queued", "running", "lost", "ending"]
"""The replica of a lost request died; its front resubmits it."""


class InFlight(msgspec.Struct, kw_only=True):
    """A request that has not ended."""

    request_id: str
    state: RequestState
    model: str
    tenant: str
    key_id: str
    peer: str
    front: str
    replica: str
    attempt: int
    age_s: float
    prompt_tokens: int
    max_tokens: int


class LimitUsage(msgspec.Struct, kw_only=True):
    """How much of one limit a tenant or key uses."""

    limit: str
    """"requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests", "queued_requests",
    or "kv_share": tokens in the KV cache of the model where it has the greatest part."""
    capacity: int
    """The amount that can be used at once: `burst_s` seconds' worth of a rate per minute, or a day's worth of
    a rate per day."""
    used: int
    """The part of the capacity that has not refilled yet. Running requests count with the most that they may
    use."""
    held: int
    """The amount held by requests that have not ended. What they do not use is returned, except for what has
    refilled since. Therefore this can exceed `used`."""
    resets_in_s: float | None
    """Time until the limit is full again if nothing is used. None: the limit is free again when requests
    end."""


class Key(KeyFields, frozen=True, kw_only=True):
    """A bearer key, without its secret."""

    usage: list[LimitUsage] = msgspec.field(default_factory=list)
    """How much of its limits the key uses now."""


class NewKey(msgspec.Struct, kw_only=True):
    """A key just created. Its secret is shown only here."""

    id: str
    key: str
    name: str
    tenant: str
    expires_at: float | None = None
    replaces: str | None = None
    """The id of the key that this one replaces after a rotation."""
    replaced_until: float | None = None
    """Time (unix seconds) until which the replaced key stays valid."""


class Tenant(TenantRecord, frozen=True, kw_only=True):
    """A tenant and its current usage."""

    built_in: bool
    """Whether the tenant exists from the first start; it cannot be deleted."""
    usage: list[LimitUsage] = msgspec.field(default_factory=list)
    """How much of its limits the tenant uses now."""
    keys: int
    """Number of valid keys."""
    peers: int
    """Number of mapped users and groups."""


class PeerMapping(msgspec.Struct, kw_only=True):
    """A local user or group that needs no key on `api.sock`."""

    kind: Literal["uid", "gid", "any"]
    """"any": every user without a separate entry whom the socket's file mode admits."""
    number: int
    """The uid or gid; -1 for "any"."""
    tenant: str
    source: Literal["mapped", "settings"]
    """Whether an operator mapped it, or the settings did: the service's own user, root and `unix.uids`."""
    created_at: float | None = None
    """When it was mapped, in unix seconds."""


class Contents(msgspec.Struct, kw_only=True):
    """What is kept of a request's prompts and answers."""

    request_id: str
    tenant: str
    created_at: float
    """When the request arrived, in unix seconds."""
    goes_at: float | None
    """When the texts are removed (unix seconds) according to the current policy; None: never."""
    texts: list[KeptText]


class AuditHead(msgspec.Struct, kw_only=True):
    """The newest row of the audit chain."""

    seq: int
    hash: str


class Done(msgspec.Struct, kw_only=True):
    """The result of an action without data."""

    message: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of a failed admin call."""

    message: str
