"""The service state at one moment, as shown by the console, `appliance top` and the event stream.

A `Snapshot` is a plain struct. Its values have the same names as in the admin API (`appliance.protocol`), so
that a value on the screen can also be found in the JSON and in the metrics. A value that the service does not
measure is None, not 0.
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
from store.fields import ClassName
from store.structs import Severity

RequestPhase = Literal["queued", "prefill", "decode", "ending"]
"""The phase of a running request is "prefill" until its first token, and "decode" afterwards."""
BlockState = Literal["free", "cached", "used", "shared"]
BLOCK_STATES: tuple[BlockState, ...] = ("free", "cached", "used", "shared")
"""The states of a KV block. `BlockMap.states` contains indices into this tuple. A "cached" block is free but
still contains a prefix. A "shared" block has more than one reference. All samples of one prompt collectively
hold a single reference to the prompt's blocks."""
STALL_FACTOR = 3.0
"""A step that decodes is a stall if it takes longer than this factor times the mean duration of a decode-only
step."""


class LatencyPercentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a latency over the requests that ended within a window."""

    window_s: float
    count: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Request latencies across all models. A field is None if the service does not report it."""

    ttft: LatencyPercentiles | None = None
    """Time from a request's arrival to its first token."""
    itl: LatencyPercentiles | None = None
    """A request's mean time between output tokens."""
    queue: LatencyPercentiles | None = None
    """Time from a request's admission to its first dispatch."""
    e2e: LatencyPercentiles | None = None
    """Time from a request's arrival to the end of its answer."""


class ServiceTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals across all models since the service started."""

    prompt_tokens: int | None = None
    """Prompt tokens in all sequences that replicas have started."""
    cached_tokens: int | None = None
    """Prompt tokens found in replicas' prefix caches."""
    computed_tokens: int | None = None
    generated_tokens: int | None = None
    """Output tokens, counted as they are generated."""
    admitted: int | None = None
    refused: int | None = None
    """Requests refused by the core."""
    ended: int | None = None
    failed: int | None = None
    """Requests that ended with the outcome "failed"."""
    cancelled: int | None = None
    preemptions: int | None = None
    billed_tokens: int | None = None


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Each total's increase per second over the last `window_s` seconds, or None if there is no earlier
    snapshot."""

    window_s: float | None = None
    prompt_tokens_per_s: float | None = None
    cached_tokens_per_s: float | None = None
    generated_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    """Finished requests per second."""
    refused_per_s: float | None = None
    failed_per_s: float | None = None


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The core's request queue."""

    waiting: int
    running: int
    oldest_wait_s: float
    waiting_tokens: int
    limit: int
    overload: str = ""
    overload_step: int = 0
    classes: list[ClassStatus] = []


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the steps that one replica ran in a period of time, called a slice."""

    model: str
    replica: str
    at: float
    """End of the slice, in unix seconds."""
    span_s: float
    """Length of the slice, in seconds. The means in this struct are taken over the slice."""
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
    """Duration of the longest decoding step in the slice."""
    longest_decodes: int | None = None
    """Number of sequences in the longest decoding step."""
    longest_prompt_tokens: int | None = None
    """Number of prompt tokens in the longest decoding step."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A step that decodes and takes more than `STALL_FACTOR` times as long as the mean decode-only step."""

    replica: str
    at: float
    """Time when the replica reported the step, in unix seconds."""
    ms: float
    """Duration of the step."""
    mean_ms: float
    """Mean duration of a decode-only step when the stall was reported."""
    decodes: int
    """Number of sequences that decoded in the step."""
    prompt_tokens: int
    """Number of prompt tokens that the step computed."""
    request: str = ""
    """Id of the request with the largest prompt chunk in the step. Empty if the step computed no prompt
    tokens."""
    tenant: str = ""
    """Tenant of `request`. Empty if the request had ended before the report."""


class BlockMap(msgspec.Struct, frozen=True, kw_only=True):
    """A KV cache's blocks, in pool order. The arrays are byte strings because caches have many blocks."""

    states: bytes
    """One byte per block: an index into `BLOCK_STATES`."""
    owners: bytes
    """Two bytes per block, little-endian: an index into `requests`, or `NO_OWNER`. A shared block is
    attributed to its first owner."""
    requests: list[str]
    """Ids of the requests that own blocks."""
    tenants: list[str]
    """The tenant of each entry in `requests`."""
    stride: int = 1
    """Number of blocks represented by each entry in `states`, `owners` and `ages`. Each entry describes the
    first of its blocks."""
    request_blocks: list[int] = []
    """Number of blocks owned by each request in `requests`."""
    preemptions: list[int] = []
    """Number of preemptions of each request in `requests`, counting all its samples."""
    ages: bytes | None = None
    """One byte per block: log2(1 + seconds since the block was last used), rounded down."""


class ReplicaBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's KV cache blocks."""

    replica: str
    blocks: BlockMap


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's KV cache."""

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
    """Prompt tokens found in the prefix cache since the replica started."""
    hit_rate: float | None = None
    """Fraction of prompt tokens found in the prefix cache over the last `hit_window_s` seconds, from 0 to
    1."""
    hit_window_s: float | None = None
    preemptions: int | None = None
    evictions: int | None = None
    """Cached blocks overwritten since the replica started."""
    blocks: BlockMap | None = None


class UnfinishedRequest(InFlight, kw_only=True, gc=False):
    """An unfinished request, with its progress."""

    class_name: Literal[ClassName, ""] = ""
    phase: RequestPhase | None = None
    key_name: str = ""
    stream: bool | None = None
    queue_s: float | None = None
    """Time in the queue: until the first dispatch, or until now if the request is still waiting."""
    ttft_s: float | None = None
    """Time from the request's arrival to its first token."""
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
    """Name of the replica that the process belongs to; empty if the process is not part of the service."""


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG instance: a partition of a GPU that runs replicas as if it were a separate GPU."""

    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as reported by NVML. A field is None if the value is unknown."""

    number: int
    name: str
    uuid: str = ""
    error: str = ""
    """Reason why the GPU cannot be read, such as "GPU is lost". Its name and measurements are unknown."""
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
    """Uncorrected memory errors since the driver was loaded."""
    last_xid: int | None = None
    """Code of the latest Xid error reported by NVML since the service started, or 0."""
    processes: list[GpuProcess] | None = None
    mig_instances: list[MigInstance] | None = None
    """The GPU's MIG instances, or null if the GPU is not split. NVML reports no utilization for a split
    GPU."""


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's use of the service."""

    name: str
    suspended_at: float | None = None
    """Time when the tenant was suspended, in unix seconds. While this is set, the tenant's requests are
    refused."""
    weight: float | None = None
    highest_class: int | None = None
    """Highest service class that the tenant's requests can use."""
    keys: int | None = None
    """Number of the tenant's valid keys."""
    peers: int | None = None
    """Number of local users and groups mapped to the tenant."""
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    """The tenant's prompt and output tokens per second, over the same window as `Rates`."""
    service_tokens: float | None = None
    """Weighted tokens computed for the tenant since the service started."""
    share: float | None = None
    """Fraction of all weighted tokens that were computed for the tenant, over the same window as `Rates`."""
    fair_share: float | None = None
    """The tenant's fair share: its weight divided by the total weight of all tenants with requests."""
    requests: int | None = None
    """Requests finished since the service started."""
    refused: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    billed_tokens: int | None = None
    usage: list[LimitUsage] = []
    exhausted_in_s: float | None = None
    """Predicted time in seconds until the first of the tenant's limits is reached at the current rate. None
    if no limit will be reached."""


AlertState = Literal["firing", "acknowledged", "silenced", "resolved"]
AlertEvent = Literal["raised", "ended"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that requires an operator's attention."""

    id: str
    rule: str
    """Name of the rule, or "problem" for a current problem with the service."""
    severity: Severity
    state: AlertState
    where: str
    """The model, replica, front process, GPU, tenant or database that the alert is about."""
    description: str
    cause: str = ""
    """The likely cause, based on recent events."""
    remedy: str = ""
    """What the operator should do next."""
    since: float | None = None
    """Time when the condition began to hold, in unix seconds."""
    ended_at: float | None = None
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    suppressed: int = 0
    """Number of alerts hidden because this alert is their cause."""
    acknowledged_by: str = ""
    silenced_until: float | None = None


ProcessRole = Literal["core", "front", "replica"]
ProcessState = Literal[ServiceState, FrontState, ReplicaState, ""]
"""State of the service, a front process or a replica; empty if unknown."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that belongs to the service."""

    name: str
    """The process's name, such as "core", "front-1" or "demo-1"."""
    role: ProcessRole
    pid: int | None = None
    state: ProcessState = ""
    cpu_percent: float | None = None
    """The process's CPU usage since the previous measurement, as a percentage of one core."""
    memory_bytes: int | None = None
    """Resident memory."""
    restarts: int | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the service's processes."""

    name: str = ""
    cpus: int | None = None
    cpu_percent: float | None = None
    """CPU usage of all processes on the machine, as a percentage of all cores."""
    load_1m: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    disk_bytes: int | None = None
    """Size of the file system that contains the state directory."""
    disk_free_bytes: int | None = None
    processes: list[Process] = []


class Snapshot(msgspec.Struct, kw_only=True):
    """The service's state at one moment."""

    at: float
    """Time when the values were read, in unix seconds."""
    started_at: float
    """Time when the service started, in unix seconds. If this value increases, the service has restarted."""
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
    """Summary of the steps in each replica's latest slice."""
    kv: list[KvCache]
    requests: list[UnfinishedRequest]
    """Unfinished requests, oldest first."""
    gpus: list[Gpu]
    models: list[ModelStatus]
    tenants: list[TenantUse]
    alerts: list[Alert]
    host: Host
    stalls: list[Stall] = []
    """The most recent stalls of all replicas, oldest first."""
    drains: list[DrainStatus] = []
    fronts: list[FrontStatus] = []
    sockets: list[SocketStatus] = []
    current_problems: list[CurrentProblem] = []
    problems: list[Problem] = []
    audit_rows: int | None = None
    audit_head: str = ""
    audit_recorded_rows: int | None = None
    """Number of audit rows proven unchanged by chain heads recorded outside the database."""
    gpu_error: str = ""
    """Reason why the GPUs could not be queried."""


def with_blocks(snapshot: Snapshot, blocks: Mapping[str, BlockMap]) -> Snapshot:
    """Return the snapshot with each replica's blocks. Each request's block and preemption counts are taken
    from the block maps. Maps from an older service may lack these counts."""
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
