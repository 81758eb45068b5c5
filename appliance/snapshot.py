"""The service state at one moment, as shown by the console, `appliance top` and the event stream.

A `Snapshot` is a plain struct. Its values have the same names as in the admin API (`appliance.protocol`), so
that a value on the screen can also be found in the JSON and in the metrics. A value that the service does not
measure is None and not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from appliance.protocol import DrainStatus, InFlight, LimitUsage, ModelStatus, ReplicaState
from appliance.protocol.status import (
    ClassStatus,
    CurrentProblem,
    FrontState,
    FrontStatus,
    Problem,
    ServiceState,
    SocketStatus,
)
from engine.messages import KvDType
from engine.rank_messages import NO_OWNER as NO_OWNER

Phase = Literal["queued", "prefill", "decode", "ending"]
"""The phase of a running request is "prefill" until its first token, and "decode" afterwards."""
BlockState = Literal["free", "cached", "used", "shared"]
BLOCK_STATES: tuple[BlockState, ...] = ("free", "cached", "used", "shared")
"""The states of a KV block. `BlockMap.states` contains indices into this tuple. A "cached" block is free but
still contains a prefix. A "shared" block has more than one reference. All samples of one prompt collectively
hold a single reference to the prompt's blocks."""
STALL_FACTOR = 3.0
"""A step that decodes is a stall if its duration is more than this many times the mean duration of a
decode-only step."""


class LatencyPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of a duration over the requests that ended within a window."""

    window_s: float
    count: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Request latencies over all models. A field is None if the service does not report it."""

    ttft: LatencyPercentiles | None = None
    """Time from a request's arrival to its first token."""
    itl: LatencyPercentiles | None = None
    """A request's mean time between output tokens."""
    queue: LatencyPercentiles | None = None
    """Time from the admission of a request to its first dispatch."""
    e2e: LatencyPercentiles | None = None
    """Time from the arrival of a request to the end of its answer."""


class ServiceTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counters over all models since the start of the service."""

    prompt_tokens: int | None = None
    """Number of prompt tokens in sequences started by replicas."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in replicas' prefix caches."""
    computed_tokens: int | None = None
    generated_tokens: int | None = None
    """Number of output tokens, counted when they are generated."""
    admitted: int | None = None
    refused: int | None = None
    """Number of requests refused by the core."""
    ended: int | None = None
    failed: int | None = None
    """Number of requests that ended with the outcome "failed"."""
    cancelled: int | None = None
    preemptions: int | None = None
    billed_tokens: int | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Each total's increase per second, over the last `window_s` seconds. None if there is no earlier
    snapshot."""

    window_s: float | None = None
    prompt_tokens_per_s: float | None = None
    cached_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    """Number of requests that ended per second."""
    refused_per_s: float | None = None
    failed_per_s: float | None = None


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The core's queue."""

    waiting: int
    running: int
    oldest_wait_s: float
    waiting_tokens: int
    limit: int
    overload: str = ""
    overload_step: int = 0
    classes: list[ClassStatus] = []


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one replica in one period of time, called a slice."""

    model: str
    replica: str
    at: float
    """End of the slice, in unix seconds."""
    span_s: float
    """Length of the slice, in seconds. The mean values in this struct cover the slice."""
    step: int
    """Number of the latest step whose tokens have been read."""
    steps: int | None = None
    """Number of steps in the slice."""
    decode_steps: int | None = None
    mixed_steps: int | None = None
    """Number of steps that computed prompt tokens."""
    step_ms: float | None = None
    """Mean duration of a decode-only step."""
    mixed_step_ms: float | None = None
    idle_us: float | None = None
    """Mean time that the device waited for the host before a decode-only step."""
    mixed_idle_us: float | None = None
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    computed_tokens: int | None = None
    """Number of prompt tokens computed in the slice."""
    generated_tokens: int | None = None
    """Number of output tokens generated in the slice."""
    preemptions: int | None = None
    busy: float | None = None
    """Fraction of the slice in which a step was running, from 0 to 1."""
    longest_ms: float | None = None
    """Duration of the longest step in the slice that decoded."""
    longest_decodes: int | None = None
    """Number of sequences that decoded in the longest step."""
    longest_prompt_tokens: int | None = None
    """Number of prompt tokens computed in the longest step."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A step that decodes and whose duration is more than `STALL_FACTOR` times the mean duration of a
    decode-only step."""

    replica: str
    at: float
    """Time at which the replica reported the step, in unix seconds."""
    ms: float
    """Duration of the step."""
    mean_ms: float
    """Mean duration of a decode-only step at the time when the step was reported."""
    decodes: int
    """Number of sequences that decoded in the step."""
    prompt_tokens: int
    """Number of prompt tokens that the step computed."""
    request: str = ""
    """Id of the request whose prompt chunk was the largest in the step. Empty if the step computed no prompt
    tokens."""
    tenant: str = ""
    """Tenant of `request`. Empty if the request had ended before the report."""


class BlockMap(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a KV cache, in the order of the pool. The arrays are byte strings because caches have
    many blocks."""

    states: bytes
    """One byte per block: an index into `BLOCK_STATES`."""
    owners: bytes
    """Two bytes per block, little-endian: an index into `requests`, or `NO_OWNER`. The owner of a shared
    block is its first owner."""
    requests: list[str]
    """Ids of the requests that own blocks."""
    tenants: list[str]
    """The tenant of each entry in `requests`."""
    stride: int = 1
    """Number of blocks for which each entry of `states`, `owners` and `ages` stands. The entry describes the
    first of these blocks."""
    request_blocks: list[int] = []
    """Number of blocks owned by each request in `requests`."""
    preemptions: list[int] = []
    """Number of times that samples of each request in `requests` were preempted."""
    ages: bytes | None = None
    """One byte per block: the binary logarithm of 1 + the seconds since the block was last used, rounded
    down."""


class ReplicaBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one replica's KV cache."""

    replica: str
    blocks: BlockMap


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one replica."""

    model: str
    replica: str
    blocks_total: int
    blocks_used: int
    """Number of blocks used by unfinished sequences."""
    blocks_cached: int
    """Number of free blocks that still contain a cached prefix."""
    blocks_shared: int | None = None
    """Number of used blocks with more than one reference."""
    block_tokens: int
    kv_bytes: int | None = None
    kv_cache_dtype: KvDType | Literal[""] = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache since the start of the replica."""
    hit_rate: float | None = None
    """Fraction of prompt tokens found in the prefix cache over the last `hit_window_s` seconds, from 0 to
    1."""
    hit_window_s: float | None = None
    preemptions: int | None = None
    evictions: int | None = None
    """Number of cached blocks that have been overwritten since the replica's start."""
    blocks: BlockMap | None = None


class UnfinishedRequest(InFlight, kw_only=True):
    """An unfinished request, with its progress."""

    class_name: str = ""
    """Service class, from "P0" to "P3"."""
    phase: Phase | None = None
    key_name: str = ""
    stream: bool | None = None
    queue_s: float | None = None
    """Time in the queue until the first dispatch. For a request that is still waiting, the time until now."""
    ttft_s: float | None = None
    """Time from the arrival of the request to its first token."""
    cached_tokens: int | None = None
    computed_tokens: int | None = None
    """Number of prompt tokens whose keys and values are in the KV cache."""
    generated_tokens: int | None = None
    """Number of output tokens so far, summed over all samples."""
    blocks: int | None = None
    preemptions: int | None = None
    deadline_left_s: float | None = None


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses memory on a GPU."""

    pid: int
    memory_bytes: int | None = None
    name: str = ""
    replica: str = ""
    """Name of the replica to which the process belongs; empty if the process is not part of the service."""


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance: a part of a GPU that runs replicas like a separate GPU."""

    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as reported by NVML. A field is None if the value is unknown."""

    number: int
    name: str
    uuid: str = ""
    unsupported: list[str] = []
    """Names of the fields that are None because the GPU or its driver does not support them."""
    replicas: list[str] = []
    """Replicas with a rank on this GPU."""
    utilization_percent: float | None = None
    """Percentage of NVML's sample period in which a kernel was running."""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: list[str] | None = None
    """Reasons why the clocks are reduced, such as "power cap". Empty if they are not reduced."""
    nvlink_tx_bytes_per_s: float | None = None
    nvlink_rx_bytes_per_s: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Number of uncorrected memory errors since the driver was loaded."""
    last_xid: int | None = None
    """Number of the newest Xid error that NVML has reported since the service started; 0 if there was
    none."""
    processes: list[GpuProcess] | None = None
    mig_instances: list[MigInstance] | None = None
    """The MIG instances into which the GPU is split, or null if it is not split. NVML reports no utilization
    for a GPU that is split."""


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's use of the service."""

    name: str
    suspended_at: float | None = None
    """If set, the tenant's requests are refused."""
    weight: float | None = None
    highest_class: int | None = None
    """Highest service class that the tenant's requests can get."""
    keys: int | None = None
    """Number of valid keys."""
    peers: int | None = None
    """Number of mapped users and groups."""
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    """Number of the tenant's prompt and output tokens per second, over the same window as `Rates`."""
    service_tokens: float | None = None
    """Number of weighted tokens computed for the tenant since the start of the service."""
    share: float | None = None
    """Fraction of the weighted tokens computed for all tenants that was computed for this tenant, over the
    same window as `Rates`, from 0 to 1."""
    fair_share: float | None = None
    """The fraction to which the tenant's weight entitles it, considering the other tenants that have
    requests, from 0 to 1."""
    requests: int | None = None
    """Number of requests that have ended since the start of the service."""
    refused: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    billed_tokens: int | None = None
    usage: list[LimitUsage] = []
    exhausted_in_s: float | None = None
    """Predicted time in seconds until the first of the tenant's limits is reached at the current rate. None
    if no limit will be reached."""


AlertState = Literal["firing", "acknowledged", "silenced", "resolved"]
Severity = Literal["info", "warning", "critical"]


AlertEvent = Literal["raised", "ended"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that needs an operator's attention."""

    id: str
    rule: str
    """Name of the rule, or "problem" for a current problem of the service."""
    severity: Severity
    state: AlertState
    where: str
    """The model, replica, front process, GPU, tenant or database that the alert concerns."""
    description: str
    cause: str = ""
    """Description of the likely cause, based on recent events."""
    remedy: str = ""
    """Description of what the operator should do next."""
    since: float | None = None
    """Time at which the condition began to hold, in unix seconds."""
    ended_at: float | None = None
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    suppressed: int = 0
    """Number of alerts that are not shown because this alert is their cause."""
    acknowledged_by: str = ""
    silenced_until: float | None = None


ProcessRole = Literal["core", "front", "replica", "worker"]
ProcessState = Literal[ServiceState, FrontState, ReplicaState, ""]
"""State of the service, a front process or a replica; empty for a worker."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the service."""

    name: str
    """Name of the process, such as "core", "front-1" or "demo-1"."""
    role: ProcessRole
    pid: int | None = None
    state: ProcessState = ""
    cpu_percent: float | None = None
    """CPU time of the process in the last slice, in percent of one CPU core."""
    memory_bytes: int | None = None
    """Resident memory."""
    restarts: int | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the processes of the service."""

    name: str = ""
    cpus: int | None = None
    cpu_percent: float | None = None
    """CPU time of all processes on the machine, in percent of all CPU cores."""
    load_1m: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    disk_bytes: int | None = None
    """Size of the file system that contains the state directory."""
    disk_free_bytes: int | None = None
    processes: list[Process] = []


class Snapshot(msgspec.Struct, kw_only=True):
    """The state of the service at one moment."""

    at: float
    """Time when the values were read, in unix seconds."""
    started_at: float
    """Time at which the service started, in unix seconds. If this value increases, the service has been
    restarted."""
    uptime_s: float
    version: str
    pid: int | None = None
    state: ServiceState
    reason: str = ""
    """Reason why the service is not ready."""
    config_file: str = ""
    run_dir: str = ""
    state_dir: str = ""
    totals: ServiceTotals
    rates: Rates
    latency: Latency
    queue: Queue
    batches: list[Batch]
    """The newest slice of each replica."""
    kv: list[KvCache]
    requests: list[UnfinishedRequest]
    """Unfinished requests, oldest first."""
    gpus: list[Gpu]
    models: list[ModelStatus]
    tenants: list[TenantUse]
    alerts: list[Alert]
    host: Host
    stalls: list[Stall] = []
    """The newest stalls of all replicas, oldest first."""
    drains: list[DrainStatus] = []
    fronts: list[FrontStatus] = []
    sockets: list[SocketStatus] = []
    current_problems: list[CurrentProblem] = []
    problems: list[Problem] = []
    audit_rows: int | None = None
    audit_head: str = ""
    audit_recorded_rows: int | None = None
    """Number of audit rows that are proven unchanged by chain heads recorded outside the database."""
    gpu_error: str = ""
    """Reason why the GPUs could not be read."""


def with_blocks(snapshot: Snapshot, blocks: Mapping[str, BlockMap]) -> Snapshot:
    """Return the snapshot with the blocks of each replica. The block maps also contain each request's numbers
    of blocks and of preemptions, which are set in the snapshot's requests. The maps of an older service may
    lack these numbers."""
    snapshot.kv = [
        msgspec.structs.replace(one, blocks=blocks.get(one.replica, one.blocks)) for one in snapshot.kv
    ]
    known = {
        request: (count, preemptions)
        for one in blocks.values()
        for request, count, preemptions in zip(
            one.requests, one.request_blocks, one.preemptions, strict=False
        )
    }
    for request in snapshot.requests:
        request.blocks, request.preemptions = known.get(request.request_id, (None, None))
    return snapshot
