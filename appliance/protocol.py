"""The admin API's types: what `admin.sock` says to the CLI and the console. JSON on the wire."""

from __future__ import annotations

from typing import Any

import msgspec

from store.policies import Quota


def precision(dtype: str, weights: str, kv_cache_dtype: str) -> str:
    """A model's dtype and what is held in another, e.g. "bfloat16, weights fp8, KV fp8"."""
    held = (("weights", weights), ("KV", kv_cache_dtype))
    return ", ".join([dtype, *(f"{what} {name}" for what, name in held if name != dtype)])


class FrontStatus(msgspec.Struct, kw_only=True):
    """One front process."""

    name: str
    state: str
    """"starting", "ready", "restarting", "stopping" or "stopped"."""
    detail: str = ""
    """The state in words, e.g. "restarting in 2 s"."""
    pid: int | None = None
    connections: int = 0
    busy_connections: int = 0
    """Connections of known clients (local users, or a valid key) whose request is being answered."""
    max_connections: int = 0
    """Connections of known clients that the front can hold."""
    unauthenticated_connections: int = 0
    """Connections that have not yet sent a request with a valid key."""
    refused_connections: int = 0
    """Connections since the front started that were refused because no place was free."""
    evicted_connections: int = 0
    """Connections without a valid key that were closed, since the front started, to make room for others."""
    cut_off_connections: int = 0
    """Connections since the front started that were closed because their clients did not take the answers."""
    refused_bodies: int = 0
    """Requests since the front started that were refused because too many bytes of bodies were under way."""
    streams: int = 0
    requests: int = 0
    tokens: int = 0
    """Streamed since the front started."""
    unauthenticated: int = 0
    """Requests that were denied since the front started because they had no valid key or user."""
    cpu_seconds: float = 0.0
    cpu_us_per_token: float | None = None
    kept_answers: int = 0
    """Runs with an `Idempotency-Key`, under way or kept for retries."""
    kept_bytes: int = 0
    """What these take."""
    dropped_texts: int = 0
    """Requests since the front started whose texts were not kept, because too much waited."""
    log_dropped_lines: int = 0
    """Lines of its log that were dropped since it started because standard error was not read."""
    problems: dict[str, str] = {}
    """Why it cannot serve a model, by the model's name."""
    restarts: int = 0
    last_error: str = ""


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """One running copy of a model."""

    name: str
    state: str
    """"starting", "loading", "ready", "silent" (it has not reported for 3 seconds and gets no new requests),
    "draining" (finishes what it has), "restarting", "failed" or "stopped"."""
    detail: str = ""
    """The state in words, e.g. "loading weights 43%"."""
    fraction: float | None = None
    """How far loading is, 0 to 1."""
    pids: list[int] = []
    """By rank."""
    devices: list[str] = []
    """By rank."""
    backend: str = ""
    dtype: str = ""
    """What it computes in."""
    weights: str = ""
    """What the layers' matrices are held in: as `dtype`, or "fp8"."""
    kv_cache_dtype: str = ""
    """As `weights`, of the KV cache."""
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
    running: int = 0
    waiting: int = 0
    """Sequences that the replica holds but does not run yet."""
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    credit_seqs: int = 0
    """Available now."""
    credit_tokens: int = 0
    steps: int = 0
    step_ms: float = 0.0
    """Mean of steps that only decode, and how long the device had waited for the host before them."""
    idle_us: float = 0.0
    mixed_step_ms: float = 0.0
    """The same of steps that compute prompts."""
    mixed_idle_us: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    log_dropped_lines: int = 0
    """Lines of rank 0's log that were dropped since it started because standard error was not read."""
    last_report_s: float | None = None
    """Seconds since the last report."""
    restarts: int = 0
    last_error: str = ""


class ModelStatus(msgspec.Struct, kw_only=True):
    """A model that apps may name."""

    name: str
    folder: str
    version: str
    """A fingerprint of the folder's files."""
    created: int
    """Unix seconds."""
    state: str
    """"ready" (apps get answers), "loading", "silent", "restarting", or (apps are refused at once) "failed",
    "draining" or "drained"."""
    detail: str = ""
    """The state in words; of a failed model, why."""
    max_model_len: int = 0
    queued: int = 0
    replicas: list[ReplicaStatus] = []


class Configuration(msgspec.Struct, kw_only=True):
    """Settings as they hold, and where each was said."""

    files: list[str]
    """Those that were read, in order."""
    settings: dict[str, Any]
    """As in the files, complete."""
    places: dict[str, str]
    """By setting: FILE:LINE, a flag of the command line, or "default"."""


class Reloaded(msgspec.Struct, kw_only=True):
    """What a reload of the settings did."""

    changed: list[str]
    """Settings that are others now, with the old and the new value."""
    models: list[str]
    """What that means for models: what loads, is replaced or goes."""
    at_restart: list[str]
    """Settings that differ in the files and hold only after a restart."""


class DrainStatus(msgspec.Struct, kw_only=True):
    """One drain, from its beginning until service is resumed."""

    model: str | None
    """Of which it is; null: of the whole service."""
    state: str
    """"announced" (not ready, but still taking), "draining" or "drained" (nothing runs)."""
    grace_s: float
    """What still runs so many seconds after it began to refuse requests is ended."""
    grace_left_s: float
    """Until then."""
    queue: bool
    """New requests wait until service is resumed, instead of being refused."""
    started_at: float
    """Unix seconds."""
    elapsed_s: float
    """Until now, or until it was drained."""
    running: int
    queued: int
    """Requests that it waits for: those that run, and those that waited when it began."""
    held: int
    """New requests that wait until service is resumed."""
    tokens_left: int
    """Output tokens that these are expected to take yet, by what answers took lately."""
    eta_s: float | None = None
    """Until they have ended, by the measured rates; null while nothing was measured."""
    ended: int = 0
    """Requests that were ended when the grace was over."""


class ClassStatus(msgspec.Struct, kw_only=True):
    """A class of requests, over all models."""

    name: str
    """"P0" to "P3"."""
    waiting: int
    oldest_wait_s: float
    expected_wait_s: float
    """Of a request that comes now, by the measured rates; 0 where they are not known."""
    target_s: float | None
    """None for P3."""


class QueueStatus(msgspec.Struct, kw_only=True):
    """Requests in the house."""

    waiting: int
    """For their turn."""
    running: int
    """Handed to a replica and not ended."""
    oldest_wait_s: float
    limit: int
    timeout_s: float
    admitted: int
    """Since the start."""
    refused: int
    """By the core, since the start."""
    ended: int
    """Rows ended, since the start."""
    waiting_tokens: int = 0
    """Prompt tokens of those that wait."""
    preemptions: int = 0
    """Since the start, of requests that have ended: they were computed anew to make room for others."""
    overload: str = ""
    """What is overloaded, and what is done about it; empty without."""
    overload_step: int = 0
    """How far up the ladder; 0 without."""
    classes: list[ClassStatus] = []
    """From P0 on."""


class DatabaseStatus(msgspec.Struct, kw_only=True):
    """One of the databases and its writer."""

    path: str
    lag_rows: int
    lag_ms: float
    failing_s: float
    last_error: str | None
    stalled_s: float = 0.0
    """How long the writer has been at one piece of work; a disk that does not answer."""
    committed_rows: int
    dropped_rows: int
    rejected_rows: int
    restored: str = ""
    """What happened to the file while the service had it open (it was deleted or replaced), and what was
    done."""


class AuditStatus(msgspec.Struct, kw_only=True):
    """The audit trail of operators' actions."""

    rows: int = 0
    """In the chain: the newest row's seq."""
    head: str = ""
    """The newest row's hash."""
    recorded_rows: int = 0
    """Up to here, heads that were recorded outside the database vouch for the chain."""
    spooled: int = 0
    """Rows that the database did not take yet: they come into the chain when it does."""
    spooled_since: float | None = None
    """Unix seconds."""
    places: list[str] = []
    """Files in which they wait."""
    in_memory: int = 0
    """Of these, how many no file takes either: lost, but for the service's log, if it ends."""
    lost: int = 0
    """Rows for which there was no room anywhere; the service's log has them."""
    last_error: str | None = None
    """What is wrong; None when all is well."""


class SocketStatus(msgspec.Struct, kw_only=True):
    """A listening socket."""

    name: str
    """"api", "tcp", "admin" or "metrics"."""
    address: str
    state: str
    """"accepting", "waiting" (no front is ready; connections wait in the backlog) or "closed"."""
    accepted: int = 0


class Problem(msgspec.Struct, kw_only=True):
    """Something that went wrong, most recent first in `Status.problems`."""

    at: float
    """Unix seconds, of the last time."""
    where: str
    """A front, replica, database or socket."""
    what: str
    count: int = 1


class CurrentProblem(msgspec.Struct, kw_only=True):
    """Something that is wrong now, and what to do about it."""

    where: str
    """A model, replica, front, database, "audit" or "log"."""
    what: str
    remedy: str


class Status(msgspec.Struct, kw_only=True):
    """What the service is and does."""

    version: str
    pid: int
    uid: int
    python: str
    sqlite: str
    started_at: float
    """Unix seconds."""
    uptime_s: float
    state: str
    """"starting", "ready", "degraded" (something does not answer), "draining" or "drained"."""
    reason: str = ""
    """Why it is not ready."""
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
    """What is wrong now; `doctor` reports the same list."""
    problems: list[Problem]
    """What went wrong lately, the most recent first."""
    drains: list[DrainStatus] = []


class InFlight(msgspec.Struct, kw_only=True):
    """A request that has not ended."""

    request_id: str
    state: str
    """"queued", "running", "lost" (its replica died; the front will ask again) or "ending"."""
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
    """What may be used at once: of a rate a minute `burst_s` seconds, of one a day a day's worth."""
    used: int
    """Of the capacity, what has not refilled yet; requests that run are in it with the most they may use."""
    held: int
    """By requests that have not ended: what they do not use comes back, but for what has refilled since. So
    it may be more than is `used`."""
    resets_in_s: float | None
    """Until all of it may be used again, if nothing is. None: when the requests end."""


class Key(msgspec.Struct, kw_only=True):
    """A bearer key, without its secret."""

    id: str
    name: str
    tenant: str
    prefix: str
    """Its first characters, to recognise it by."""
    created_at: float
    """Unix seconds, like the next two."""
    expires_at: float | None = None
    revoked_at: float | None = None
    scopes: tuple[str, ...] = ("inference",)
    """What it opens: "inference", "admin", "read"."""
    models: list[str] | None = None
    """The only models that it opens; None: all."""
    highest_class: int | None = None
    """0 to 3; narrows its tenant's. None: the tenant's."""
    quota: Quota = Quota()
    """Within its tenant's; what it does not name has no limit."""
    replaced_by: str | None = None
    """The key that a rotation put in its place."""
    usage: list[LimitUsage] = []
    """How much of its limits it uses now."""


class NewKey(msgspec.Struct, kw_only=True):
    """A key just made: the only time its secret is shown."""

    id: str
    key: str
    name: str
    tenant: str
    expires_at: float | None = None
    replaces: str | None = None
    """The id of the key in whose place a rotation put it."""
    replaced_until: float | None = None
    """Until then (unix seconds) that one goes on."""


class Tenant(msgspec.Struct, kw_only=True):
    """Who pays, and what it may use."""

    name: str
    built_in: bool
    """There from the first start; it cannot be deleted."""
    created_at: float
    """Unix seconds, like the next one."""
    suspended_at: float | None
    """Set: nothing of it is served."""
    weight: float
    """Share of service against other tenants of the same class."""
    highest_class: int
    """The best class that its requests get; 0 is P0."""
    default_class: int
    """Of a request that asks for none; never better than `highest_class`."""
    default_max_tokens: int | None
    """Output of a request that names no `max_tokens`; None: what the model's length leaves."""
    cache_group: str | None
    """Tenants of one group find each other's prefixes in the cache; None: only its own."""
    log_policy: str
    """What the request log keeps of prompts and answers: "metadata" (nothing), "hashes" or "full"."""
    log_days: float | None
    """For how long; None: the service's retention."""
    quota: Quota
    """What it does not name has no limit."""
    usage: list[LimitUsage] = []
    """How much of these it uses now."""
    keys: int
    """That are valid now."""
    peers: int
    """Users and groups of the box that stand for it."""


class Peer(msgspec.Struct, kw_only=True):
    """A user or group of the box that needs no key on `api.sock`."""

    kind: str
    """"uid", "gid", or "any": every user that the socket's file mode lets in and that is not here."""
    number: int
    """-1 of any."""
    tenant: str
    """Whom it stands for."""
    source: str
    """"mapped" by an operator, or by the "settings": the service's own user, root and `unix.uids`."""
    created_at: float | None = None
    """Unix seconds, of a mapping."""


class KeptText(msgspec.Struct, kw_only=True):
    """What is kept of one prompt or answer."""

    part: str
    """"prompt" or "answer"."""
    number: int
    """Among the request's prompts, or answers; from 0."""
    sha256: str
    """Of `text`; of the whole text as it was where only hashes are kept."""
    bytes: int
    """Of the whole text as it was."""
    text: str | None = None
    """Without its secrets; None where only hashes are kept."""
    truncated: bool = False
    """`text` is its beginning only."""
    redactions: int = 0
    """Secrets that were taken out of `text`."""


class Contents(msgspec.Struct, kw_only=True):
    """What is kept of a request's prompts and answers."""

    request_id: str
    tenant: str
    created_at: float
    """Of the request, unix seconds."""
    goes_at: float | None
    """Unix seconds from which on it is removed, by the policy as it is now; None: never."""
    texts: list[KeptText]


class AuditHead(msgspec.Struct, kw_only=True):
    """The newest row of the audit chain."""

    seq: int
    hash: str


class Done(msgspec.Struct, kw_only=True):
    """An action that has nothing else to say."""

    message: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """What an admin call says when it fails."""

    message: str
