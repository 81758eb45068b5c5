"""Explains the fields and metrics on the screens: the unit, the window and the source of each. A screen's
help lists the fields and metrics that the screen shows, and a test requires an entry for each of them."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """The explanation of a field or metric."""

    title: str
    unit: str
    window: str
    """The period that the value covers: "now", "since start", or a time window."""
    text: str
    source: str
    """The Prometheus metric or the field of the admin API from which the value is read."""


_NOW, _SLICE, _MINUTE = "now", "since the last update", "last 60 s"
_SECOND, _STEPS = "1 s (one column)", "since the replica's last report; Batches: 1 s (one column)"
_RATE, _START, _LIFE = "last 10 s", "since start", "the request so far"
_DAY, _REQUEST_OR_DAY = "1 day (UTC)", "a request, or 1 day (UTC)"

FIGURES: dict[str, Figure] = {
    "generated_tokens_per_s": Figure(
        "output tokens/s",
        "tokens/s",
        _RATE,
        "Output tokens generated per second by all replicas.",
        "appliance_engine_generated_tokens_total",
    ),
    "prompt_tokens_per_s": Figure(
        "prompt tokens/s",
        "tokens/s",
        _RATE,
        "Prompt tokens per second of the sequences started by all replicas, including cached tokens.",
        "appliance_engine_prompt_tokens_total",
    ),
    "cached": Figure(
        "cached",
        "%",
        _RATE,
        "Share of the prompt tokens that came from the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "ttft": Figure(
        "TTFT",
        "ms, s",
        _MINUTE,
        "Time to first token: from a request's arrival until its first token is written to the socket. p50 "
        "is the median; 99% of the requests were faster than p99.",
        "appliance_time_to_first_token_seconds",
    ),
    "itl": Figure(
        "ITL",
        "ms",
        _MINUTE,
        "Inter-token latency: the mean time between the output tokens of a request.",
        "appliance_inter_token_seconds",
    ),
    "queue": Figure(
        "queue",
        "ms, s",
        _MINUTE,
        "Time spent in the queue, from admission to the first dispatch.",
        "appliance_queue_seconds",
    ),
    "e2e": Figure(
        "E2E",
        "ms, s",
        _MINUTE,
        "End-to-end latency: from a request's arrival to the end of its response.",
        "appliance_request_seconds",
    ),
    "waiting": Figure(
        "waiting",
        "requests",
        _NOW,
        "Requests waiting to be dispatched to a replica.",
        "appliance_queue_requests",
    ),
    "oldest_wait_s": Figure(
        "oldest",
        "s",
        _NOW,
        'Waiting time of the oldest waiting request. "late" means that it exceeds the target.',
        "appliance_queue_oldest_wait_seconds",
    ),
    "expected_wait_s": Figure(
        "expect",
        "s",
        _NOW,
        "Predicted waiting time of a request that arrives now, based on the measured rates.",
        "status: queue.classes.expected_wait_s",
    ),
    "target_s": Figure(
        "target",
        "s",
        _NOW,
        "Target for the waiting time of a service class.",
        "status: queue.classes.target_s",
    ),
    "running": Figure(
        "RUN, running",
        "requests",
        _NOW,
        "Requests running on a replica.",
        "appliance_running_requests",
    ),
    "kv_used": Figure(
        "KV used",
        "% of blocks",
        _NOW,
        "KV blocks in use by unfinished sequences. Cached blocks do not count, because they can be reused.",
        "appliance_kv_used_blocks, appliance_kv_blocks",
    ),
    "hit_rate": Figure(
        "hit",
        "% of prompt tokens",
        _MINUTE,
        "Share of prompt tokens that came from the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "utilization_percent": Figure(
        "USE, kernel time",
        "% of time",
        "NVML's sample period, at most 1 s",
        "Share of time during which at least one kernel was running. It does not tell how much of the GPU "
        "the kernel used.",
        "NVML utilization.gpu",
    ),
    "used_bytes": Figure("memory", "bytes", _NOW, "GPU memory in use by all processes.", "NVML memory.used"),
    "power_w": Figure("W", "watts", _NOW, "Power draw of the board.", "NVML power.draw"),
    "temperature_c": Figure(
        "°",
        "°C",
        _NOW,
        "Temperature of the GPU. T means that the GPU is throttled: its clocks are reduced.",
        "NVML temperature.gpu",
    ),
    "alerts": Figure(
        "alerts",
        "",
        _NOW,
        "Alerts that are pending, firing or acknowledged. ‼ critical, ! warning, i info.",
        "alerts",
    ),
    "cpu_percent": Figure(
        "cpu",
        "% of one core",
        _SLICE,
        "CPU usage of a process. The usage of the host is in percent of all cores.",
        "process_cpu_seconds_total, appliance_front_cpu_seconds_total",
    ),
    "load_1m": Figure("load", "processes", "1 min", "Load average of the host.", "/proc/loadavg"),
    "request_id": Figure("REQUEST", "", "", "Request id, as in the request log.", "requests: request_id"),
    "phase": Figure(
        "PHASE",
        "",
        _NOW,
        "Q queued: waiting for a replica. P prefill: the prompt is being processed. D decode: output tokens "
        "are being generated.",
        "requests: phase",
    ),
    "class_name": Figure(
        "CL",
        "",
        "",
        "Service class: P0 real-time, P1 interactive, P2 batch, P3 background.",
        "requests: class_name",
    ),
    "tenant": Figure("TENANT", "", "", "The tenant that is billed for the request.", "requests: tenant"),
    "key_name": Figure(
        "KEY", "", "", "Name of the API key, or its id if it has no name.", "requests: key_name, key_id"
    ),
    "model": Figure("MODEL", "", "", "The model that the client requested.", "requests: model"),
    "age_s": Figure("AGE", "s", _LIFE, "Time since the request arrived.", "requests: age_s"),
    "queue_s": Figure(
        "QUEUE", "s", _LIFE, "Time from arrival to the first dispatch to a replica.", "requests: queue_s"
    ),
    "ttft_s": Figure("TTFT", "s", _LIFE, "Time from arrival to the first token.", "requests: ttft_s"),
    "prompt_tokens": Figure(
        "PROMPT",
        "tokens",
        f"a request; usage: {_DAY}",
        "Prompt tokens of a request, or of all requests of a day.",
        "requests, usage: prompt_tokens",
    ),
    "generated_tokens": Figure(
        "OUT, OUTPUT",
        "tokens",
        "a request so far; a model: since its replicas started",
        "Output tokens generated.",
        "requests, replicas: generated_tokens",
    ),
    "max_tokens": Figure(
        "MAX",
        "tokens",
        _LIFE,
        "Maximum number of output tokens of the request.",
        "requests: max_tokens",
    ),
    "tokens_per_s": Figure(
        "TOK/S",
        "tokens/s",
        "a request: since its first token; a tenant: last 10 s",
        "Output tokens per second of a request, or prompt and output tokens per second of a tenant.",
        "requests: generated_tokens, tenants: tokens_per_s",
    ),
    "blocks": Figure("BLOCKS", "blocks", _NOW, "KV blocks in use by the request.", "requests: blocks"),
    "replica": Figure("REPLICA", "", "", "The replica that runs the request.", "requests: replica"),
    "front": Figure(
        "FRONT", "", "", "The front process that holds the client's connection.", "requests: front"
    ),
    "name": Figure("NAME", "", "", "Name of the model or tenant.", "status: models; tenants"),
    "state": Figure(
        "STATE",
        "",
        _NOW,
        "State of the model or tenant. A suspended tenant's requests are refused.",
        "status: models.state; tenants: suspended_at",
    ),
    "highest_class": Figure(
        "CL", "", _NOW, "Highest service class that the tenant's requests can have.", "tenants: highest_class"
    ),
    "weight": Figure("WEIGHT", "", _NOW, "The tenant's weight in fair sharing.", "tenants: weight"),
    "share": Figure(
        "SHARE",
        "% of service",
        _MINUTE,
        "The tenant's share of the weighted tokens processed for all tenants.",
        "appliance_tenant_service_total",
    ),
    "fair_share": Figure(
        "FAIR",
        "% of service",
        _NOW,
        "The tenant's fair share, by weight, among the tenants that have requests. A SHARE above FAIR means "
        "that the tenant uses capacity that others leave unused.",
        "tenants: weight",
    ),
    "limit_used": Figure(
        "LIMIT MOST USED",
        "%",
        _NOW,
        "The limit that is closest to being exhausted. Running requests count with their maximum tokens.",
        "tenants: usage",
    ),
    "exhausted_in_s": Figure(
        "FULL IN",
        "s",
        _MINUTE,
        "Time until a limit is reached at the current rate.",
        "tenants: usage",
    ),
    "refused": Figure(
        "REFUSED",
        "requests",
        _START,
        "Requests refused because of limits or overload.",
        "appliance_tenant_requests_total",
    ),
    "requests": Figure(
        "REQUESTS",
        "requests",
        f"a tenant: {_START}; usage: {_DAY}",
        "Finished requests.",
        "appliance_tenant_requests_total; usage: requests",
    ),
    "billed_tokens": Figure(
        "BILLED",
        "tokens",
        _START,
        "Output tokens delivered to the tenant.",
        "appliance_tenant_billed_tokens_total",
    ),
    "keys": Figure("KEYS", "keys", _NOW, "Valid keys of the tenant.", "tenants: keys"),
    "replicas": Figure(
        "READY", "replicas", _NOW, "Ready replicas and all replicas.", "appliance_replica_state"
    ),
    "queued": Figure("QUEUED", "requests", _NOW, "Requests waiting for the model.", "status: models.queued"),
    "weight_bytes": Figure(
        "WEIGHTS", "bytes", _NOW, "Memory used by the weights on all ranks.", "status: replicas.weight_bytes"
    ),
    "max_model_len": Figure(
        "CONTEXT",
        "tokens",
        _NOW,
        "Maximum sequence length: prompt plus output.",
        "status: models.max_model_len",
    ),
    "restarts": Figure(
        "RESTARTS", "", _START, "Restarts of the model's replicas.", "appliance_replica_restarts_total"
    ),
    "version": Figure("VERSION", "", _NOW, "Fingerprint of the model's files.", "status: models.version"),
    "step_ms": Figure(
        "step",
        "ms",
        _STEPS,
        "Mean step time. Decode steps only decode; mixed steps also process prompts.",
        "appliance_step_seconds",
    ),
    "idle_us": Figure(
        "idle",
        "µs",
        _STEPS,
        "Mean time that the GPU waits for the host before a step.",
        "appliance_device_idle_seconds",
    ),
    "credit_seqs": Figure(
        "credit",
        "sequences",
        _NOW,
        "Number of sequences that a replica can start now.",
        "appliance_credit_seqs",
    ),
    "load_seconds": Figure(
        "loaded in", "s", "the last start", "Time taken to load the weights.", "status: replicas.load_seconds"
    ),
    "evictions": Figure(
        "evictions",
        "blocks",
        _START,
        "Cached blocks that were evicted to make room for new sequences.",
        "appliance_kv_evictions_total",
    ),
    "preemptions": Figure(
        "preemptions",
        "",
        _START,
        "Sequences that were preempted: they lost their blocks to other sequences and had to be recomputed.",
        "appliance_preemptions_total",
    ),
    "block_state": Figure(
        "free, cached, used, shared",
        "blocks",
        _NOW,
        "A cached block is free and still holds a prefix. A shared block has more than one reference: "
        "usually, several requests use it.",
        "kv: blocks.states",
    ),
    "block_age": Figure(
        "age",
        "log2 of s",
        _NOW,
        "Time since a cached block was last used, as a power of two.",
        "kv: blocks.ages",
    ),
    "mixed_steps": Figure(
        "mixed",
        "steps",
        _SECOND,
        "Number of steps that also processed prompts, and their mean step time.",
        "appliance_step_seconds",
    ),
    "decode_steps": Figure(
        "decode",
        "steps",
        _SECOND,
        "Number of decode-only steps, and their mean step time.",
        "appliance_step_seconds",
    ),
    "steps_running": Figure(
        "seqs", "sequences", _NOW, "Running sequences and the maximum number of them.", "appliance_sequences"
    ),
    "stall": Figure(
        "!",
        "ms",
        _SECOND,
        "A stall: the longest step with decodes, if it took more than three times the mean decode-only "
        "step, and the request with the largest prefill chunk in that step.",
        "batches: longest_ms; stalls: request, tenant",
    ),
    "computed_tokens": Figure(
        "tokens: prompt, out",
        "tokens",
        _SECOND,
        "Prompt tokens processed and output tokens generated.",
        "batches: computed_tokens",
    ),
    "finished_at": Figure(
        "ENDED", "time of day", "", "Time at which the request ended.", "request-log: finished_at"
    ),
    "result": Figure(
        "RESULT",
        "",
        "",
        "Finish reason: stop, length or cancelled. If the request failed, its HTTP status comes first.",
        "request-log: finish_reason, status, error",
    ),
    "duration_s": Figure(
        "TIME", "s", "the request", "End-to-end time, from arrival to completion.", "request-log: e2e_ms"
    ),
    "day": Figure("DAY", "day in UTC", "", "Day on which the requests finished.", "usage: day"),
    "failed": Figure(
        "FAILED",
        "requests",
        _DAY,
        "Requests that ended with an error or an HTTP status of 400 or higher.",
        "usage: failed",
    ),
    "cached_tokens": Figure(
        "CACHED",
        "tokens",
        _REQUEST_OR_DAY,
        "Prompt tokens that came from the prefix cache. PROMPT includes them.",
        "request-log, usage: cached_tokens",
    ),
    "output_tokens": Figure(
        "OUTPUT", "tokens", _DAY, "Output tokens delivered to the tenant.", "usage: output_tokens"
    ),
    "cost": Figure(
        "COST",
        "currency of the prices",
        _DAY,
        "Cost at the prices in the settings. Models without a price are not included; -- means that no model "
        "has a price.",
        "usage: cost",
    ),
    "number": Figure("GPU", "", "", "GPU index, as in NVML and nvidia-smi.", "gpus: number"),
    "sm_clock_mhz": Figure("MHz", "MHz", _NOW, "SM clock.", "NVML clocks.sm"),
    "throttle_reasons": Figure(
        "THROTTLED", "", _NOW, "Reasons for reduced clocks.", "NVML clocks_event_reasons"
    ),
    "nvlink": Figure(
        "NVLINK/s",
        "bytes/s",
        _SLICE,
        "Bytes sent and received over all NVLink links.",
        "NVML NVLINK_THROUGHPUT_DATA",
    ),
    "ecc": Figure(
        "ECC",
        "errors",
        "since the driver was loaded",
        "Memory errors, as uncorrected/corrected.",
        "NVML ecc.errors",
    ),
    "last_xid": Figure("XID", "", _START, "Most recent Xid error code; - means none.", "NVML events"),
    "model_name": Figure("NAME", "", "", "Product name of the GPU.", "NVML name"),
    "memory_parts": Figure(
        "memory",
        "bytes",
        _NOW,
        "Memory in use: weights, KV cache, and other (activations, CUDA contexts, other processes).",
        "status: replicas.weight_bytes, kv_bytes; NVML memory.used",
    ),
    "severity": Figure("SEVERITY", "", _NOW, "‼ critical, ! warning, i info.", "alerts: severity"),
    "alert_state": Figure(
        "STATE",
        "",
        _NOW,
        "pending: the condition holds, but not for long enough yet. firing: it has held for long enough. "
        "acknowledged or silenced: by an operator.",
        "alerts: state",
    ),
    "since": Figure("SINCE", "time of day", "", "Time at which the condition began.", "alerts: since"),
    "rule": Figure(
        "RULE",
        "",
        "",
        'The alert rule that matched; "problem" means a current problem of the service.',
        "alerts: rule",
    ),
    "suppressed": Figure(
        "ALSO",
        "alerts",
        _NOW,
        "Number of other alerts that are a consequence of this alert.",
        "alerts: suppressed",
    ),
    "seq": Figure("SEQ", "", "", "Sequence number of the row in the audit chain.", "audit: seq"),
    "actor": Figure("OPERATOR", "", "", "The local user or key that performed the action.", "audit: actor"),
    "action": Figure("ACTION", "", "", "The action.", "audit: action, target"),
    "outcome": Figure(
        "RESULT",
        "",
        "",
        "Result of the action: ok, or the reason why it was refused or failed.",
        "audit: outcome",
    ),
    "audit_rows": Figure(
        "anchored",
        "rows",
        _NOW,
        "Rows proven unchanged by chain heads that were anchored outside the database.",
        "status: audit.recorded_rows",
    ),
    "at": Figure("TIME", "", "", "Time at which the line was written.", "logs: at"),
    "level": Figure("LEVEL", "", "", "Severity of the log line or finding.", "logs: level"),
    "process": Figure(
        "PROCESS",
        "",
        "",
        "The process that wrote the line: core, a front or a replica. Filter with process:front-0 to see one "
        "process.",
        "logs: process",
    ),
    "area": Figure("AREA", "", "", "The component that wrote the line.", "logs: area"),
    "metric": Figure("METRIC", "", "", "Name of the metric, as in the admin API.", "GET /telemetry: figures"),
    "first": Figure(
        "FIRST",
        "of the metric",
        "the first time",
        "Value at the first time.",
        "GET /telemetry",
    ),
    "second": Figure(
        "SECOND",
        "of the metric",
        "the displayed time",
        "Value at the displayed time.",
        "GET /telemetry",
    ),
    "difference": Figure(
        "DIFFERENCE", "of the metric", "both times", "SECOND minus FIRST.", "GET /telemetry"
    ),
    "change": Figure(
        "CHANGE",
        "% of the first value",
        "both times",
        "DIFFERENCE as a percentage of FIRST.",
        "GET /telemetry",
    ),
    "setting_source": Figure(
        "SOURCE",
        "",
        "",
        "Where the setting comes from: FILE:LINE, a command-line option, or default.",
        "config: places",
    ),
}
