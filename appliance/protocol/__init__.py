"""The types of the admin API, used by the CLI and the console and sent as JSON. `status` and `registry`
contain the types for the service status and the model registry."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.messages import KvDType, ModelDType, WeightsDType
from engine.rank_messages import LoadStage, ReplicaStats
from store.policies import KeyFields, TenantRecord
from store.structs import KeptText
from store.structs import Silence as Silence


def precision(dtype: str, weights: str, kv_cache_dtype: str) -> str:
    """Return a model's data type, followed by those of the weights and the KV cache if they differ, such as
    "bfloat16, weights fp8, KV fp8"."""
    held = (("weights", weights), ("KV", kv_cache_dtype))
    return ", ".join([dtype, *(f"{description} {name}" for description, name in held if name != dtype)])


LogLevel = Literal["debug", "info", "warning", "error"]
FindingLevel = Literal["ok", "warning", "problem"]


ReplicaState = Literal[
    "starting", "loading", "ready", "sleeping", "silent", "draining", "restarting", "failed", "stopped"
]
"""A "sleeping" replica has released its memory and gets no requests until it is woken. A "silent" replica has
not reported for 3 seconds and gets no new requests. A "draining" replica finishes its requests and gets no
new ones."""


BreakerState = Literal["closed", "open", "half-open"]
"""If a replica's circuit breaker is "open", the replica is not restarted, because it has exited too often.
"half-open" means that one restart is being attempted."""


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a replica that is loading its model."""

    stage: LoadStage
    detail: str = ""
    """What the loading stage is currently processing, such as a file name."""
    done: int = 0
    total: int = 0
    """Total amount of work in the loading stage; 0 if unknown."""
    unit: str = ""
    """Unit of `done` and `total`: bytes, layers, graphs or passes."""
    elapsed_s: float = 0.0
    """Time in seconds since the loading stage began."""
    rate_per_s: float = 0.0
    """Loading speed, in units of work per second; 0 if not known yet."""
    left_s: float | None = None
    """Estimated time in seconds until the loading stage ends, or None if unknown."""


class Degradation(msgspec.Struct, frozen=True, kw_only=True):
    """A feature that the settings request but the replica runs without, such as a GPU or resource limits."""

    description: str
    remedy: str


class ReplicaStatus(ReplicaStats, frozen=True, kw_only=True):
    """One running copy of a model."""

    name: str
    state: ReplicaState
    detail: str = ""
    """Explanation of the replica's state, such as "read 43% of 15.0 GiB, 2.1 GiB/s, 4 s left"."""
    fraction: float | None = None
    """Progress of the current loading stage, from 0 to 1."""
    load: LoadStatus | None = None
    """Progress of loading the model, or None if the replica is not loading."""
    pids: list[int] = msgspec.field(default_factory=list)
    """Ids of the replica's processes, one per rank."""
    devices: list[str] = msgspec.field(default_factory=list)
    """Devices that the replica uses, one per rank."""
    backend: str = ""
    dtype: ModelDType | Literal[""] = ""
    """Data type used for computation."""
    weights: WeightsDType | Literal[""] = ""
    """Data type of the layers' weight matrices: the same as `dtype`, or "fp8"."""
    kv_cache_dtype: KvDType | Literal[""] = ""
    """Data type of the KV cache: the same as `dtype`, or "fp8"."""
    tensor_parallel_size: int = 1
    freed_bytes: int = 0
    """Memory released by a sleeping replica, in bytes."""
    host_bytes: int = 0
    """Host memory that holds the weights of a sleeping GPU replica, in bytes."""
    sleeps: int = 0
    """Number of times that the replica went to sleep."""
    wakes: int = 0
    """Number of times that the replica woke up."""
    wake_s: float = 0.0
    """Total time spent waking up, in seconds."""
    links: str = ""
    """Links between the ranks' GPUs, such as "NVLink (18 links)". Empty if there is only one GPU or the links
    are not known."""
    collectives: str = ""
    """Library that exchanges data between the ranks, such as "NCCL". Empty if there is only one rank."""
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    predicted_bytes: int = 0
    used_bytes: int = 0
    load_seconds: float = 0.0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    step: int = 0
    prefix_cache_hit_rate: float | None = None
    """Fraction of prompt tokens found in the prefix cache since the replica's start, from 0 to 1. Null before
    the first prompt."""
    credit_seqs: int = 0
    """Number of sequences that the replica can start now."""
    credit_tokens: int = 0
    last_report_s: float | None = None
    """Seconds since the replica's last report."""
    restarts: int = 0
    deaths: int = 0
    """Number of recent exits counted by the circuit breaker."""
    breaker: BreakerState = "closed"
    last_error: str = ""
    remedy: str = ""
    """What an operator can do if the circuit breaker is open."""
    degraded: list[Degradation] = msgspec.field(default_factory=list)


ModelState = Literal[
    "ready",
    "available",
    "sleeping",
    "loading",
    "silent",
    "restarting",
    "failed",
    "draining",
    "drained",
    "stopped",
]
"""A "ready" model answers requests. An "available" model is not in memory; its next request loads it.
Requests for a "failed", "draining" or "drained" model are refused immediately."""


class ScalingChange(msgspec.Struct, kw_only=True):
    """A load-driven change in a model's replica count."""

    at: float
    """When the change was made, in unix seconds."""
    former: int
    replicas: int
    reason: str


class ScalingStatus(msgspec.Struct, kw_only=True):
    """The scaling status of a model with a load-dependent number of replicas."""

    replicas: int
    """The target number of replicas."""
    min_replicas: int
    max_replicas: int
    demand: float
    """The load, measured in replicas: a load of 1.5 would keep one and a half replicas fully busy."""
    expected: float
    """The load expected by the time that a newly started replica would be ready."""
    reason: str = ""
    """Explanation of the expected load."""
    refusal: str = ""
    """Why no replica can be added now."""
    changes: list[ScalingChange] = []
    """The latest changes in the number of replicas, newest first."""


class ModelStatus(msgspec.Struct, kw_only=True):
    """A model that applications can request by name."""

    name: str
    folder: str
    version: str
    """Fingerprint of the files in the model's folder."""
    created: int
    """When the model's files were created, in unix seconds."""
    state: ModelState
    detail: str = ""
    """Explanation of the model's state or, for a failed model, the reason for the failure."""
    max_model_len: int = 0
    queued: int = 0
    drain_eta_s: float | None = None
    """Predicted time in seconds until all unfinished requests have finished if no more are accepted, based on
    measured rates. Null if there are unfinished requests but no measurements."""
    fallback: str = ""
    """Name of the model that answers requests while this model cannot, for keys that allow a fallback. Empty
    if there is none."""
    replicas: list[ReplicaStatus] = []
    scaling: ScalingStatus | None = None
    """How the number of replicas follows the load. Null if the number is fixed."""


class Configuration(msgspec.Struct, kw_only=True):
    """The settings in effect and their sources."""

    files: list[str]
    """The settings files, in the order in which they were read."""
    settings: dict[str, Any]
    """All settings, in the format of the settings files."""
    places: dict[str, str]
    """Source of each setting: FILE:LINE, a command-line flag, or "default"."""


class Reloaded(msgspec.Struct, kw_only=True):
    """The result of reloading the settings."""

    changed: list[str]
    """The changed settings, with their old and new values."""
    models: list[str]
    """The models that are loaded, replaced or removed as a result."""
    at_restart: list[str]
    """Changed settings that take effect only after a restart."""


DrainState = Literal["announced", "draining", "drained"]
"""While a drain is "announced", the service reports "not ready" but still accepts requests. Once it is
"drained", no request is running."""


class DrainStatus(msgspec.Struct, kw_only=True):
    """A drain, which lasts until an operator resumes service."""

    stopping: bool = False
    """Whether the service is stopping. If it is, the drain cannot be cancelled."""
    model: str | None
    """The model being drained, or null for the whole service."""
    state: DrainState
    grace_s: float
    """Grace period in seconds, starting when the drain begins to refuse requests. Requests still running at
    its end are stopped."""
    grace_left_s: float
    """Seconds until the remaining requests are stopped."""
    queue: bool
    """Whether new requests wait until service resumes instead of being refused."""
    started_at: float
    """When the drain began, in unix seconds."""
    elapsed_s: float
    """Seconds since the drain began or, once it is complete, the total duration of the drain."""
    running: int
    queued: int
    """Number of accepted requests that have not started. The drain is complete once no request is running or
    queued."""
    held: int
    """Number of new requests waiting until service resumes."""
    tokens_left: int
    """Number of output tokens that the remaining requests are expected to generate, based on recent answer
    lengths."""
    eta_s: float | None = None
    """Predicted time in seconds until the remaining requests have finished, based on measured rates. Null if
    there are no measurements."""
    ended: int = 0
    """Number of requests stopped after the grace period."""


RequestState = Literal["queued", "running", "interrupted", "ending"]
"""A request is "interrupted" if its replica has exited unexpectedly. The front process will resubmit it."""


class InFlight(msgspec.Struct, kw_only=True):
    """An unfinished request."""

    request_id: str
    state: RequestState
    model: str
    tenant: str
    key_id: str
    peer: str
    front: str
    replica: str
    attempt: int | None
    """Attempt number. None for a past request if the number is unknown."""
    age_s: float
    prompt_tokens: int
    max_tokens: int | None
    """The request's token limit. None for a past request if the limit is unknown."""


class LimitUsage(msgspec.Struct, kw_only=True):
    """A tenant's or key's usage of one limit."""

    limit: str
    """Name of the limit, a field of `store.policies.Quota`. For "kv_share", amounts are KV cache tokens of
    the model in which the tenant's or key's share is largest."""
    capacity: int
    """The limit's capacity: the amount that refills within `burst_s` seconds for a per-minute limit, or
    within a day for a per-day limit."""
    used: int
    """Capacity used and not yet refilled, including the maximum that running requests may use."""
    held: int
    """Amount reserved by unfinished requests. When a request finishes, the amount it did not use is returned.
    Less is returned if the limit has refilled completely in the meantime. `held` can exceed `used`, because
    refilling reduces `used` but not `held`."""
    resets_in_s: float | None
    """Time in seconds until the full limit is available again if nothing more is used. None for limits
    that do not refill over time, but are freed when requests finish."""


class Key(KeyFields, frozen=True, kw_only=True):
    """A bearer key, without its secret."""

    usage: list[LimitUsage] = msgspec.field(default_factory=list)
    """The key's current usage of its limits."""


class NewKey(msgspec.Struct, kw_only=True):
    """A newly created key. Only this response contains the key's secret."""

    id: str
    key: str
    name: str
    tenant: str
    expires_at: float | None = None
    replaces: str | None = None
    """Id of the key replaced by this one in a rotation."""
    replaced_until: float | None = None
    """When the replaced key expires, in unix seconds."""


class Tenant(TenantRecord, frozen=True, kw_only=True):
    """A tenant and its current usage."""

    built_in: bool
    """Whether the tenant was created at the first startup. Built-in tenants cannot be deleted."""
    usage: list[LimitUsage] = msgspec.field(default_factory=list)
    """The tenant's current usage of its limits."""
    keys: int
    """Number of the tenant's valid keys."""
    peers: int
    """Number of users and groups mapped to the tenant."""


class PeerMapping(msgspec.Struct, kw_only=True):
    """A local user or group that needs no key on `api.sock`."""

    kind: Literal["uid", "gid", "any"]
    """The kind of entry. "any" covers all users who can open the socket and have no entry of their own."""
    number: int
    """The uid or gid, or -1 for "any"."""
    tenant: str
    source: Literal["mapped", "settings"]
    """Source of the entry: "mapped" (by an operator), or "settings" (the service's own user, root and the
    users in `unix.uids`)."""
    created_at: float | None = None
    """When the mapping was created, in unix seconds."""


class Contents(msgspec.Struct, kw_only=True):
    """The stored prompts and answers of a request."""

    request_id: str
    tenant: str
    created_at: float
    """When the request arrived, in unix seconds."""
    goes_at: float | None
    """Unix time at which the contents will be removed under the current policy. None means never."""
    texts: list[KeptText]


class AuditHead(msgspec.Struct, kw_only=True):
    """The newest row of the audit chain."""

    seq: int
    hash: str


class Done(msgspec.Struct, kw_only=True):
    """The result of an action whose response is only a message."""

    message: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of the response to a failed admin API call."""

    message: str


class StreamEnd(msgspec.Struct, kw_only=True):
    """The last line of a stream that cannot continue."""

    error: str
