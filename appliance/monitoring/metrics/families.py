"""The table of all metrics: name, meaning, unit, labels and the function that reads the value.
`docs/metrics.md` is generated from it.

Metrics with the same source form a group. The group's labels identify the source; a metric with additional
labels reads a mapping from label values to numbers."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from appliance.channel.classes import CLASS_NAMES
from appliance.models.on_demand import Residency
from appliance.models.replica import Replica
from appliance.models.step_totals import StepTotal
from appliance.monitoring.metrics.exposition import MetricFamily
from appliance.monitoring.metrics.metric import Group, Metric
from appliance.protocol import FrontStatus, ReplicaStatus
from appliance.traffic.buckets import Bucket
from appliance.traffic.shadows import ShadowSums
from appliance.traffic.stats import ModelStats, TenantStats
from engine.messages import BLOCK_TOKENS
from store.requests import RequestRow
from store.structs import WriterState
from store.trail import TrailState

QUEUE_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)
FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
NEXT_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5),
)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 45, 60, 120, 300, 600, 1800)

_MS = 1e-3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServiceSource(NamedTuple):
    """The source of service-wide metrics."""

    ready: bool
    draining: bool
    """Whether the whole service is draining or drained."""
    problems: int
    held: int
    """Number of held requests."""
    connections: Mapping[str, int]
    """Number of accepted connections, by listener."""
    version: str
    started_at: float


class ReplicaSource(NamedTuple):
    """The source of a replica's metrics."""

    status: ReplicaStatus
    replica: Replica


class GatewaySource(NamedTuple):
    """The source of a model's metrics for gateways."""

    model: ModelStats
    ready: list[ReplicaStatus]
    """Status of each ready replica of the model."""

    def blocks(self) -> int:
        """Return the number of KV blocks."""
        return sum(status.blocks_total for status in self.ready)

    def kv_usage(self) -> float:
        """Return the fraction of KV blocks in use, or 1 if no replica is ready."""
        blocks = self.blocks()
        return sum(status.blocks_used for status in self.ready) / blocks if blocks else 1.0


class Families:
    """All metrics, in display order."""

    def __init__(self) -> None:
        self.service: Group[ServiceSource] = Group((), *SERVICE)
        self.rows: Group[RequestRow] = Group(("model", "class"), *ROWS)
        self.retries: Group[RequestRow] = Group(("model",), *RETRIES)
        self.times: Group[RequestRow] = Group(("model", "class"), *TIMES)
        self.arms: Group[RequestRow] = Group(("model", "unit"), *ARMS)
        self.fallbacks: Group[RequestRow] = Group(("model",), *FALLBACKS)
        self.shadows: Group[ShadowSums] = Group(("model", "unit"), *SHADOWS)
        self.models: Group[ModelStats] = Group(("model",), *MODELS)
        self.residency: Group[Residency] = Group(("model",), *RESIDENCY)
        self.tenant_rows: Group[RequestRow] = Group(("tenant",), *TENANT_ROWS)
        self.tenants: Group[TenantStats] = Group(("tenant",), *TENANTS)
        self.limits: Group[Bucket] = Group(("tenant", "limit"), *LIMITS)
        self.replicas: Group[ReplicaSource] = Group(("model", "replica"), *REPLICAS)
        self.fronts: Group[FrontStatus] = Group(("front",), *FRONTS)
        self.databases: Group[WriterState] = Group(("database",), *DATABASES)
        self.audit: Group[TrailState] = Group((), *AUDIT)
        self.logs: Group[int] = Group(("process",), *LOGS)
        self.process: Group[ServiceSource] = Group((), *PROCESS)
        self.gateways: Group[GatewaySource] = Group(("model_name",), *GATEWAYS)

    def groups(self) -> list[Group[Any]]:
        """Return all groups."""
        return list(vars(self).values())

    def __iter__(self) -> Iterator[MetricFamily[Any]]:
        return (family for group in self.groups() for family in group.families)

    def by(self, label: str) -> list[MetricFamily[Any]]:
        """Return the metrics that have this label."""
        return [family for family in self if label in family.labels]


def outcome(row: RequestRow) -> str:
    """Return the outcome of a request: "ok", "cancelled", "refused", "rejected" or "failed"."""
    status = row.status or 500
    if status < 400:
        # A stream can fail after its status code has been sent.
        return "failed" if row.error else "ok"
    if status == 499:
        return "cancelled"
    if status in (429, 503):
        return "refused"
    return "rejected" if status < 500 else "failed"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * _MS


def _successful_seconds(row: RequestRow) -> float | None:
    return _seconds(row.e2e_ms) if outcome(row) == "ok" else None


def _cpu_seconds(source: ServiceSource) -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident_bytes(source: ServiceSource) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _steps(read: Callable[[StepTotal], float]) -> Callable[[ReplicaSource], Mapping[str, tuple[int, float]]]:
    def by_kind(source: ReplicaSource) -> Mapping[str, tuple[int, float]]:
        totals = source.replica.steps
        return {
            kind: (total.steps, read(total))
            for kind, total in (("decode", totals.decode), ("mixed", totals.mixed))
        }

    return by_kind


# fmt: off
SERVICE = (
    Metric("gauge", "appliance_info", "",
           "Always 1. The label is the running version.",
           lambda s: {s.version: 1}, ("version",)),
    Metric("gauge", "appliance_ready", "",
           "1 if every model can answer requests, as reported by /health/ready.",
           lambda s: int(s.ready)),
    Metric("gauge", "appliance_draining", "",
           "1 while the whole service is draining or drained.",
           lambda s: int(s.draining)),
    Metric("counter", "appliance_problems_total", "",
           "Number of problems since the start, for example crashed processes and unreadable files. "
           "The status lists the details.",
           lambda s: s.problems),
    Metric("counter", "appliance_connections_total", "",
           "Accepted connections, by listening socket.",
           lambda s: s.connections, ("listener",)),
    Metric("gauge", "appliance_held_requests", "requests",
           "Requests that a drain holds until service resumes.",
           lambda s: s.held),
)
ROWS = (
    Metric("counter", "appliance_requests_total", "requests",
           "Finished requests by outcome: ok, cancelled (client disconnected or front process crashed), "
           "rejected (client error), refused (429 or 503 because of a limit or overload), or failed.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("counter", "appliance_prompt_tokens_total", "tokens",
           "Prompt tokens of finished requests.",
           lambda row: row.prompt_tokens),
    Metric("counter", "appliance_cached_prompt_tokens_total", "tokens",
           "Prompt tokens found in the prefix cache.",
           lambda row: row.cached_tokens),
    Metric("counter", "appliance_generated_tokens_total", "tokens",
           "Tokens generated for finished requests.",
           lambda row: row.generated_tokens),
    Metric("counter", "appliance_billed_tokens_total", "tokens",
           "Output tokens delivered to clients and billed to tenants.",
           lambda row: row.billed_tokens),
    Metric("counter", "appliance_request_preemptions_total", "",
           "Preemptions of requests, counted when the requests finish.",
           lambda row: row.preemptions),
)
RETRIES = (
    Metric("counter", "appliance_retries_total", "requests",
           "Retries with a known Idempotency-Key, by outcome: joined the running request, got the "
           "stored answer, or ran again.",
           lambda row: {} if row.retry is None else {row.retry: 1}, ("retry",)),
)
TIMES = (
    Metric("histogram", "appliance_queue_seconds", "seconds",
           "Time from a request's admission to its first dispatch.",
           lambda row: _seconds(row.queue_ms), bounds=QUEUE_BOUNDS_S),
    Metric("histogram", "appliance_time_to_first_token_seconds", "seconds",
           "Time from a request's arrival until its first token is written to the socket (TTFT).",
           lambda row: _seconds(row.ttft_ms), bounds=FIRST_TOKEN_BOUNDS_S),
    Metric("histogram", "appliance_inter_token_seconds", "seconds",
           "A request's mean time between output tokens (ITL).",
           lambda row: _seconds(row.itl_ms), bounds=NEXT_TOKEN_BOUNDS_S),
    Metric("histogram", "appliance_request_seconds", "seconds",
           "Time from a request's arrival to the end of its answer (E2E), for requests with outcome ok.",
           _successful_seconds, bounds=REQUEST_BOUNDS_S),
)
ARMS = (
    Metric("counter", "appliance_arm_requests_total", "requests",
           "Finished requests, by the model or version that they were sent to.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("histogram", "appliance_arm_time_to_first_token_seconds", "seconds",
           "TTFT of requests, by the model or version that they were sent to.",
           lambda row: _seconds(row.ttft_ms), bounds=FIRST_TOKEN_BOUNDS_S),
    Metric("histogram", "appliance_arm_request_seconds", "seconds",
           "E2E of requests with outcome ok, by the model or version that they were sent to.",
           _successful_seconds, bounds=REQUEST_BOUNDS_S),
)
FALLBACKS = (
    Metric("counter", "appliance_fallbacks_total", "requests",
           "Finished requests that the model could not answer and that were passed to its fallback, "
           "by outcome.",
           lambda row: {outcome(row): 1}, ("outcome",)),
)
SHADOWS = (
    Metric("counter", "appliance_shadow_requests_total", "requests",
           "Requests that were selected for copying, by result of the copy: compared, dropped or failed.",
           lambda s: {"compared": s.compared, "dropped": s.dropped, "failed": s.failed}, ("result",)),
    Metric("counter", "appliance_shadow_tokens_total", "tokens",
           "Tokens of compared greedy requests.",
           lambda s: s.greedy_tokens),
    Metric("counter", "appliance_shadow_equal_tokens_total", "tokens",
           "Tokens of compared greedy requests before the first difference between the two answers.",
           lambda s: s.equal_tokens),
    Metric("summary", "appliance_shadow_time_to_first_token_seconds", "seconds",
           "TTFT of compared requests, measured from the time when they were sent to the replica.",
           lambda s: {"original": (s.compared, s.originals.ttft_s), "copy": (s.compared, s.copies.ttft_s)},
           ("answer",)),
    Metric("summary", "appliance_shadow_request_seconds", "seconds",
           "E2E of compared requests, measured from the time when they were sent to the replica.",
           lambda s: {"original": (s.compared, s.originals.e2e_s), "copy": (s.compared, s.copies.e2e_s)},
           ("answer",)),
)
MODELS = (
    Metric("gauge", "appliance_queue_requests", "requests",
           "Requests waiting for their first dispatch.",
           lambda m: dict(zip(CLASS_NAMES, m.waiting, strict=True)), ("class",)),
    Metric("gauge", "appliance_queue_oldest_wait_seconds", "seconds",
           "Waiting time of the oldest waiting request.",
           lambda m: dict(zip(CLASS_NAMES, m.oldest_wait_s, strict=True)), ("class",)),
    Metric("gauge", "appliance_resuming_requests", "requests",
           "Requests that lost their replica and are waiting to resume.",
           lambda m: m.resuming),
    Metric("gauge", "appliance_running_requests", "requests",
           "Unfinished requests that have been dispatched to a replica.",
           lambda m: m.running),
    Metric("gauge", "appliance_overload_step", "",
           "Current load shedding step of a model, or 0 without overload.",
           lambda m: m.overload_step),
)
RESIDENCY = (
    Metric("gauge", "appliance_model_in_memory", "",
           "1 if the model is loaded or being loaded, otherwise 0.",
           lambda r: int(r.in_memory)),
    Metric("counter", "appliance_model_demand_loads_total", "",
           "Number of times that the model was loaded because a request was waiting for it.",
           lambda r: r.loads),
    Metric("counter", "appliance_model_evictions_total", "",
           "Number of times that the model was unloaded without a command: another model needed the memory, "
           "a group does not allow both models to be loaded, or the model was idle.",
           lambda r: r.evictions, ("reason",)),
)
TENANT_ROWS = (
    Metric("counter", "appliance_tenant_requests_total", "requests",
           "Finished requests, by tenant.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("counter", "appliance_tenant_prompt_tokens_total", "tokens",
           "Prompt tokens of a tenant's requests.",
           lambda row: row.prompt_tokens),
    Metric("counter", "appliance_tenant_cached_prompt_tokens_total", "tokens",
           "Prompt tokens found in the prefix cache.",
           lambda row: row.cached_tokens),
    Metric("counter", "appliance_tenant_generated_tokens_total", "tokens",
           "Tokens generated for a tenant.",
           lambda row: row.generated_tokens),
    Metric("counter", "appliance_tenant_billed_tokens_total", "tokens",
           "Tokens billed to a tenant.",
           lambda row: row.billed_tokens),
)
TENANTS = (
    Metric("counter", "appliance_tenant_service_total", "tokens",
           "Weighted tokens computed for a tenant. Fair sharing makes this count proportional to the "
           "tenant's weight.",
           lambda t: t.service),
    Metric("gauge", "appliance_tenant_queue_requests", "requests",
           "A tenant's queued requests.",
           lambda t: t.waiting),
    Metric("gauge", "appliance_tenant_running_requests", "requests",
           "A tenant's running requests.",
           lambda t: t.running),
)
LIMITS = (
    Metric("gauge", "appliance_tenant_limit", "",
           "Capacity of a tenant's rate limit, which is the largest burst that it allows.",
           lambda bucket: bucket.rate.capacity),
    Metric("gauge", "appliance_tenant_limit_left", "",
           "Remaining capacity of a tenant's rate limit. Unfinished requests count with their maximum usage.",
           lambda bucket: bucket.level),
)
REPLICAS = (
    Metric("gauge", "appliance_replica_state", "",
           "1 for the replica's current state.",
           lambda r: {r.status.state: 1}, ("state",)),
    Metric("counter", "appliance_replica_restarts_total", "",
           "Number of restarts of a replica.",
           lambda r: r.status.restarts),
    Metric("counter", "appliance_replica_sleeps_total", "",
           "Number of times that a replica went to sleep.",
           lambda r: r.status.sleeps),
    Metric("counter", "appliance_replica_wakes_total", "",
           "Number of times that a replica woke.",
           lambda r: r.status.wakes),
    Metric("counter", "appliance_replica_wake_seconds_total", "seconds",
           "Total time that the engine needed to wake.",
           lambda r: r.status.wake_s),
    Metric("gauge", "appliance_replica_released_bytes", "bytes",
           "Memory that a sleeping replica has released.",
           lambda r: r.status.freed_bytes),
    Metric("gauge", "appliance_replica_host_copy_bytes", "bytes",
           "Host memory that holds the weights of a sleeping GPU replica.",
           lambda r: r.status.host_bytes),
    Metric("gauge", "appliance_replica_breaker", "",
           "1 for the current state of a replica's circuit breaker: closed, open or half-open.",
           lambda r: {r.status.breaker: 1}, ("state",)),
    Metric("gauge", "appliance_sequences", "sequences",
           "Running and waiting sequences on a replica.",
           lambda r: {"running": r.status.running, "waiting": r.status.waiting}, ("state",)),
    Metric("gauge", "appliance_kv_blocks", "blocks",
           "Number of blocks in a replica's KV cache.",
           lambda r: r.status.blocks_total),
    Metric("gauge", "appliance_kv_used_blocks", "blocks",
           "KV blocks in use by unfinished sequences.",
           lambda r: r.status.blocks_used),
    Metric("gauge", "appliance_kv_cached_blocks", "blocks",
           "Free KV blocks that still contain a cached prefix.",
           lambda r: r.status.blocks_cached),
    Metric("gauge", "appliance_kv_shared_blocks", "blocks",
           "Used KV blocks with more than one reference.",
           lambda r: r.status.blocks_shared),
    Metric("counter", "appliance_kv_evictions_total", "blocks",
           "Cached KV blocks that were overwritten because no block was free.",
           lambda r: r.status.evictions),
    Metric("gauge", "appliance_credit_seqs", "sequences",
           "Number of sequences that a replica can start now.",
           lambda r: r.status.credit_seqs),
    Metric("gauge", "appliance_credit_tokens", "tokens",
           "Number of prompt tokens that a replica can accept now.",
           lambda r: r.status.credit_tokens),
    Metric("counter", "appliance_engine_prompt_tokens_total", "tokens",
           "Prompt tokens of the sequences that a replica has started.",
           lambda r: r.status.prompt_tokens),
    Metric("counter", "appliance_engine_cached_tokens_total", "tokens",
           "Prompt tokens that a replica found in its prefix cache (cache hits).",
           lambda r: r.status.cached_tokens),
    Metric("counter", "appliance_engine_generated_tokens_total", "tokens",
           "Tokens generated by a replica, counted when they are generated.",
           lambda r: r.status.generated_tokens),
    Metric("counter", "appliance_preemptions_total", "sequences",
           "Number of times that a sequence was preempted and recomputed.",
           lambda r: r.status.preemptions),
    Metric("summary", "appliance_step_seconds", "seconds",
           "Duration of a replica's steps. Steps of kind decode only decode; steps of kind mixed also "
           "compute prompts.",
           _steps(lambda total: total.seconds), ("kind",)),
    Metric("summary", "appliance_device_idle_seconds", "seconds",
           "Time that the device waited for the host before a step, by kind of step as in "
           "appliance_step_seconds.",
           _steps(lambda total: total.idle_s), ("kind",)),
    Metric("counter", "appliance_expert_choices_total", "",
           "Number of times that tokens were routed to a layer's experts.",
           lambda r: {str(use.layer): use.choices for use in r.status.expert_layers}, ("layer",)),
    Metric("gauge", "appliance_expert_imbalance_ratio", "",
           "Number of times that a layer's busiest expert was chosen since the replica's start, divided by "
           "the mean over the layer's experts.",
           lambda r: {str(use.layer): use.imbalance for use in r.status.expert_layers}, ("layer",)),
)
FRONTS = (
    Metric("gauge", "appliance_front_state", "",
           "1 for the front process's current state.",
           lambda f: {f.state: 1}, ("state",)),
    Metric("counter", "appliance_front_restarts_total", "",
           "Number of restarts of a front process.",
           lambda f: f.restarts),
    Metric("counter", "appliance_front_cpu_seconds_total", "seconds",
           "CPU time used by a front process.",
           lambda f: f.cpu_seconds),
    Metric("gauge", "appliance_front_connections", "",
           "Open client connections of a front.",
           lambda f: f.connections),
    Metric("gauge", "appliance_front_unauthenticated_connections", "",
           "Open connections on which no request with a valid key has arrived yet.",
           lambda f: f.unauthenticated_connections),
    Metric("counter", "appliance_front_refused_connections_total", "",
           "Connections refused because the front's connection limit or a tenant's share of it was reached.",
           lambda f: f.refused_connections),
    Metric("counter", "appliance_front_evicted_connections_total", "",
           "Connections without a valid key that were closed to make space for new connections.",
           lambda f: f.evicted_connections),
    Metric("counter", "appliance_front_cut_off_connections_total", "",
           "Connections closed because their clients did not read the answers.",
           lambda f: f.cut_off_connections),
    Metric("counter", "appliance_front_refused_bodies_total", "requests",
           "Requests refused because the bodies of unfinished requests use too much memory.",
           lambda f: f.refused_bodies),
    Metric("counter", "appliance_front_refused_heads_total", "requests",
           "Requests refused because the headers of unfinished requests use too much memory.",
           lambda f: f.refused_heads),
    Metric("counter", "appliance_front_refused_prompts_total", "requests",
           "Requests refused because their tenant had too many prompts or conversations in progress.",
           lambda f: f.refused_prompts),
    Metric("gauge", "appliance_front_streams", "",
           "Number of answers that a front is currently streaming.",
           lambda f: f.streams),
    Metric("counter", "appliance_front_requests_total", "requests",
           "Requests received by a front.",
           lambda f: f.requests),
    Metric("counter", "appliance_front_tokens_total", "tokens",
           "Output tokens sent by a front.",
           lambda f: f.tokens),
    Metric("counter", "appliance_front_unauthenticated_total", "requests",
           "Requests that had neither a valid key nor a permitted local user.",
           lambda f: f.unauthenticated),
    Metric("gauge", "appliance_front_kept_answers", "",
           "Number of answers that a front stores for retries.",
           lambda f: f.kept_answers),
    Metric("gauge", "appliance_front_kept_bytes", "bytes",
           "Memory used by the answers that a front stores for retries.",
           lambda f: f.kept_bytes),
    Metric("counter", "appliance_front_dropped_texts_total", "requests",
           "Requests whose prompts and answers were not stored because too many were waiting to be stored.",
           lambda f: f.dropped_texts),
)
DATABASES = (
    Metric("gauge", "appliance_store_waiting_rows", "rows",
           "Rows waiting to be committed to a database.",
           lambda state: state.lag_rows),
    Metric("gauge", "appliance_store_lag_seconds", "seconds",
           "Waiting time of the oldest row that is not committed yet.",
           lambda state: state.lag_ms * _MS),
    Metric("gauge", "appliance_store_failing_seconds", "seconds",
           "Time for which writes to a database have been failing.",
           lambda state: state.failing_s),
    Metric("counter", "appliance_store_committed_rows_total", "rows",
           "Rows committed to a database.",
           lambda state: state.committed_rows),
    Metric("counter", "appliance_store_dropped_rows_total", "rows",
           "Rows lost because the buffer for waiting rows was full.",
           lambda state: state.dropped_rows),
    Metric("counter", "appliance_store_rejected_rows_total", "rows",
           "Rows lost because the database rejected their values.",
           lambda state: state.rejected_rows),
)
AUDIT = (
    Metric("counter", "appliance_audit_rows_total", "rows",
           "Number of rows in the audit chain.",
           lambda trail: trail.head.seq),
    Metric("gauge", "appliance_audit_spooled_rows", "rows",
           "Audit rows that are waiting to be written to the database.",
           lambda trail: trail.spool.rows),
    Metric("counter", "appliance_audit_lost_rows_total", "rows",
           "Audit rows that are only in the service's log, because the spool was full.",
           lambda trail: trail.spool.lost),
)
LOGS = (
    Metric("counter", "appliance_log_dropped_lines_total", "lines",
           "Log lines dropped because standard error was not read.",
           lambda lines: lines),
)
PROCESS = (
    Metric("counter", "process_cpu_seconds_total", "seconds",
           "CPU time used by the core process.",
           _cpu_seconds),
    Metric("gauge", "process_resident_memory_bytes", "bytes",
           "Resident memory of the core process.",
           _resident_bytes),
    Metric("gauge", "process_start_time_seconds", "seconds",
           "Start time of the core process, in unix seconds.",
           lambda s: s.started_at),
)
GATEWAYS = (
    Metric("gauge", "vllm:num_requests_waiting", "requests",
           "Requests waiting to start or resume, under the metric name that gateways expect.",
           lambda g: sum(g.model.waiting) + g.model.resuming),
    Metric("gauge", "vllm:num_requests_running", "requests",
           "Running requests (appliance_running_requests), under the metric name that gateways expect.",
           lambda g: g.model.running),
    Metric("gauge", "vllm:kv_cache_usage_perc", "",
           "Fraction of KV blocks in use on a model's ready replicas, from 0 to 1.",
           lambda g: g.kv_usage()),
    Metric("gauge", "vllm:cache_config_info", "",
           "Always 1. The labels give the number of tokens per KV block and the number of KV blocks on "
           "the model's ready replicas.",
           lambda g: {(str(BLOCK_TOKENS), str(g.blocks())): 1}, ("block_size", "num_gpu_blocks")),
    Metric("gauge", "vllm:lora_requests_info", "seconds",
           "Current time in unix seconds. The labels list running and waiting LoRA adapters, and are "
           "empty because adapters are not supported.",
           lambda g: {("0", "", ""): time.time()},
           ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
)
# fmt: on
