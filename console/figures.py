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
        "waiting, WAIT",
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
        "running, RUN",
        "requests",
        _NOW,
        "Requests running on a replica.",
        "appliance_running_requests",
    ),
    "kv_used": Figure(
        "KV used, KV, KV blocks, used",
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
        "kernel time, USE",
        "% of time",
        "NVML's sample period, at most 1 s",
        "Share of time during which at least one kernel was running. It does not tell how much of the GPU "
        "the kernel used.",
        "NVML utilization.gpu",
    ),
    "used_bytes": Figure(
        "memory, MEM", "bytes", _NOW, "GPU memory in use by all processes.", "NVML memory.used"
    ),
    "power_w": Figure("W, POWER", "watts", _NOW, "Power draw of the board.", "NVML power.draw"),
    "temperature_c": Figure(
        "°, TEMP, temperature",
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
        "CL, class",
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
        "PROMPT, prompt tokens",
        "tokens",
        f"a request; usage: {_DAY}",
        "Prompt tokens of a request, or of all requests of a day.",
        "requests, usage: prompt_tokens",
    ),
    "generated_tokens": Figure(
        "OUT, OUTPUT, output tokens",
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
        "TOK/S, tokens/s, output tokens/s",
        "tokens/s",
        "a request: since its first token; a tenant: last 10 s",
        "Output tokens per second of a request, or prompt and output tokens per second of a tenant.",
        "requests: generated_tokens, tenants: tokens_per_s",
    ),
    "blocks": Figure(
        "BLOCKS, KV blocks", "blocks", _NOW, "KV blocks in use by the request.", "requests: blocks"
    ),
    "replica": Figure("REPLICA", "", "", "The replica that runs the request.", "requests: replica"),
    "front": Figure(
        "FRONT", "", "", "The front process that holds the client's connection.", "requests: front"
    ),
    "name": Figure("MODEL, TENANT", "", "", "Name of the model or tenant.", "status: models; tenants"),
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
        "SHARE, share of service",
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
        "FULL IN, limit reached in",
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
        "BILLED, billed tokens",
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
        "step, decode step, mixed step",
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
        "SEQS, sequences",
        "sequences",
        _NOW,
        "Running sequences and the maximum number of them.",
        "appliance_sequences",
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
        "CACHED, cached tokens",
        "tokens",
        _REQUEST_OR_DAY,
        "Prompt tokens that came from the prefix cache. PROMPT includes them.",
        "request-log, usage: cached_tokens",
    ),
    "output_tokens": Figure(
        "OUTPUT, output tokens",
        "tokens",
        _DAY,
        "Output tokens delivered to the tenant.",
        "usage: output_tokens",
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
    "sm_clock_mhz": Figure("MHz, SM clock", "MHz", _NOW, "SM clock.", "NVML clocks.sm"),
    "throttle_reasons": Figure(
        "THROTTLED, throttled by", "", _NOW, "Reasons for reduced clocks.", "NVML clocks_event_reasons"
    ),
    "nvlink": Figure(
        "NVLINK/s, NVLink",
        "bytes/s",
        _SLICE,
        "Bytes sent and received over all NVLink links.",
        "NVML NVLINK_THROUGHPUT_DATA",
    ),
    "ecc": Figure(
        "ECC, ECC errors",
        "errors",
        "since the driver was loaded",
        "Memory errors, as uncorrected/corrected.",
        "NVML ecc.errors",
    ),
    "last_xid": Figure(
        "XID, last Xid", "", _START, "Most recent Xid error code; - means none.", "NVML events"
    ),
    "model_name": Figure("NAME", "", "", "Product name of the GPU.", "NVML name"),
    "memory_parts": Figure(
        "weights, KV cache, other, free",
        "bytes",
        _NOW,
        "The parts of the GPU's memory. Other: activations, CUDA contexts and other processes.",
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
        "ALSO, explains",
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
    "percentiles": Figure(
        "p50, p90, p99",
        "ms, s",
        _MINUTE,
        "Percentiles of the finished requests: 50%, 90% and 99% of them were at most this slow.",
        "appliance_request_seconds",
    ),
    "peak": Figure(
        "peak",
        "tokens/s",
        "the period of the chart",
        "Highest value in the chart.",
        "appliance_engine_generated_tokens_total, appliance_engine_prompt_tokens_total",
    ),
    "host_memory": Figure(
        "memory, mem",
        "% or bytes",
        _NOW,
        "Memory in use on the host, in percent of all memory, or by a process (resident set). The GPU panel "
        "shows the used share of each GPU's memory.",
        "status: host.memory_used_bytes, host.processes.memory_bytes",
    ),
    "disk_free": Figure(
        "disk free, free",
        "bytes",
        _NOW,
        "Free space on the file system of the state directory.",
        "status: host.disk_free_bytes",
    ),
    "process_name": Figure(
        "process",
        "",
        "",
        "A process of the service: the core, a front or a replica. A number with ↻ counts its restarts.",
        "status: host.processes.name, host.processes.restarts",
    ),
    "request_state": Figure(
        "state",
        "",
        _NOW,
        "queued: the request waits in the core. running: a replica has it. lost: its replica has ended, and "
        "it waits for another one.",
        "requests: state",
    ),
    "attempt": Figure(
        "attempt",
        "",
        _LIFE,
        "How often the request was sent to another replica because its replica had ended.",
        "requests: attempt",
    ),
    "streamed": Figure("streamed", "", "", "Whether the client reads a stream.", "requests: stream"),
    "request_computed_tokens": Figure(
        "computed tokens",
        "tokens",
        _LIFE,
        "Prompt tokens that were computed instead of taken from the prefix cache.",
        "requests: computed_tokens",
    ),
    "request_preemptions": Figure(
        "preemptions",
        "",
        _LIFE,
        "How often the request lost its KV blocks to other requests and had to be recomputed.",
        "requests, request-log: preemptions",
    ),
    "deadline_left_s": Figure(
        "deadline in",
        "s",
        _NOW,
        "Time left until the deadline that the client has set.",
        "requests: deadline_left_s",
    ),
    "peer": Figure(
        "peer",
        "",
        "",
        "The local user or group that sent the request over the Unix socket; none for requests with a key.",
        "requests, request-log: peer",
    ),
    "phases": Figure(
        "queue, prefill, decode",
        "ms, s",
        "the request so far",
        "The parts of a request's time: waiting for a replica, processing the prompt until the first token, "
        "and generating the other tokens.",
        "requests: queue_s, ttft_s",
    ),
    "error": Figure("error", "", "", "Why the request failed.", "request-log: error"),
    "arrived": Figure(
        "arrived", "date and time", "", "Time at which the request arrived.", "request-log: created_at"
    ),
    "user": Figure("user", "", "", "The field user of the request, set by the client.", "request-log: user"),
    "endpoint": Figure(
        "endpoint", "", "", "Path of the API that the client called.", "request-log: endpoint"
    ),
    "unit": Figure(
        "answered by",
        "",
        "",
        "The model and version that answered, which can differ from the requested name.",
        "request-log: unit",
    ),
    "itl_ms": Figure(
        "inter-token time", "ms", "the request", "Mean time between the output tokens.", "request-log: itl_ms"
    ),
    "resubmissions": Figure(
        "resubmissions",
        "",
        "the request",
        "How often the request was sent to another replica because its replica ended.",
        "request-log: resubmissions",
    ),
    "tenant_prompt_tokens": Figure(
        "prompt tokens",
        "tokens",
        _START,
        "Prompt tokens of the tenant's finished requests, and how many of them came from the prefix cache.",
        "tenants: prompt_tokens, tenants: cached_tokens",
    ),
    "limits": Figure(
        "usage of limits",
        "% of the limit",
        _NOW,
        'Each limit of the tenant with its use. Limits per minute and per day refill continuously; "resets '
        'in" is the time until all of the used part is available again.',
        "tenants: usage",
    ),
    "kv_tokens": Figure(
        "tokens",
        "tokens",
        _NOW,
        "Tokens that fit into the used blocks, of those that fit into all blocks. Under Longest contexts: "
        "the prompt and output tokens of a request so far.",
        "kv: blocks_used, blocks_total, block_tokens",
    ),
    "kv_size": Figure("size", "bytes", _NOW, "GPU memory of the KV cache, on all ranks.", "kv: kv_bytes"),
    "busy": Figure(
        "busy",
        "% of time",
        _SECOND,
        "Share of the time that the replica spent in steps.",
        "batches: step_ms, mixed_step_ms",
    ),
    "stall_time": Figure("time", "time of day", "", "Time at which a stall ended.", "stalls: at"),
    "stall_mean": Figure(
        "mean", "ms", _SECOND, "Mean decode-only step in the second of a stall.", "stalls: mean_ms"
    ),
    "stall_decodes": Figure(
        "decodes",
        "sequences",
        "the stalled step",
        "Sequences whose next token was delayed by a stall.",
        "stalls: decodes",
    ),
    "stall_prompt": Figure(
        "prompt",
        "tokens",
        "the stalled step",
        "Prompt tokens that were processed in a stalled step.",
        "stalls: prompt_tokens",
    ),
    "stall_request": Figure(
        "request with the largest chunk",
        "",
        "the stalled step",
        "The request, and its tenant, with the most prompt tokens in a stalled step.",
        "stalls: request, tenant",
    ),
    "predicted_bytes": Figure(
        "fit",
        "bytes",
        "the last start",
        "GPU memory that was predicted before the replica started, on all ranks.",
        "status: replicas.predicted_bytes",
    ),
    "replica_memory": Figure(
        "memory",
        "bytes",
        "the last start",
        "GPU memory that a replica uses, and its difference from the prediction; for a version: the memory "
        "that it used when it was last loaded.",
        "status: replicas.used_bytes; registry: versions.memory_bytes",
    ),
    "replica_kv_bytes": Figure(
        "KV cache", "bytes", _NOW, "GPU memory of the KV cache, on all ranks.", "status: replicas.kv_bytes"
    ),
    "links": Figure(
        "links",
        "",
        "the last start",
        "How the GPUs of a replica are connected, and how they exchange data.",
        "status: replicas.links, replicas.collectives",
    ),
    "version_number": Figure(
        "version",
        "",
        "",
        "Number of a version of the model. ● marks the default version.",
        "registry: versions.version",
    ),
    "added": Figure(
        "added", "date and time", "", "Time at which the version was added.", "registry: versions.added_at"
    ),
    "folder": Figure("folder", "", "", "Directory with the model's files.", "registry: versions.folder"),
    "aliases": Figure(
        "aliases", "", _NOW, "Other names that applications can use for the model.", "registry: aliases"
    ),
    "split": Figure(
        "split",
        "% of requests",
        _NOW,
        "How the requests for the name are divided among versions.",
        "registry: split",
    ),
    "shadow": Figure(
        "shadow",
        "% of requests, % of tokens",
        "since the shadow was set or the service started",
        "Share of the requests that are copied to another version, and the share of tokens that were equal.",
        "registry: shadows.share, shadows.agreement",
    ),
    "scaled_replicas": Figure(
        "replicas",
        "replicas",
        _NOW,
        "Number of replicas that the model should have, and its limits.",
        "status: models.scaling.replicas",
    ),
    "demand": Figure(
        "demand",
        "replicas",
        "now, and when a new replica would be ready",
        "The load, measured in replicas: 1.5 would fully use one and a half replicas.",
        "status: models.scaling.demand, models.scaling.expected",
    ),
    "scaling_reason": Figure(
        "reason", "", _NOW, "Basis of the expected load.", "status: models.scaling.reason"
    ),
    "scaling_refusal": Figure(
        "refusal", "", _NOW, "Why no replica can be added now.", "status: models.scaling.refusal"
    ),
    "uuid": Figure("uuid", "", "", "Identifier of the GPU, as in nvidia-smi.", "gpus: uuid"),
    "gpu_replicas": Figure("REPLICAS", "", _NOW, "Replicas that run on the GPU.", "gpus: replicas"),
    "memory_clock_mhz": Figure(
        "memory clock", "MHz", _NOW, "Clock of the GPU's memory.", "gpus: memory_clock_mhz"
    ),
    "where": Figure(
        "WHERE",
        "",
        "",
        "The model, replica, front process, GPU, tenant or database that the alert concerns.",
        "alerts: where",
    ),
    "what": Figure("WHAT", "", _NOW, "Description of the condition.", "alerts: what"),
    "alert_value": Figure(
        "value",
        "as shown",
        _NOW,
        "The metric's value, and the threshold of the rule.",
        "alerts: value, threshold, unit",
    ),
    "cause": Figure(
        "likely cause",
        "",
        "the minutes before the alert",
        "What happened shortly before the condition began and explains it.",
        "alerts: cause",
    ),
    "remedy": Figure("next step", "", "", "What the operator should do next.", "alerts: remedy"),
    "alert_ended": Figure(
        "ended", "time of day", "", "Time at which the condition ended.", "alerts: ended_at"
    ),
    "silenced_until": Figure(
        "silenced until",
        "time of day",
        "",
        "Until then, the alert is not sent to receivers.",
        "alerts: silenced_until",
    ),
    "audit_at": Figure("TIME", "date and time", "", "Time at which the action began.", "audit: at"),
    "audit_target": Figure("TARGET", "", "", "The object that the action changes.", "audit: target"),
    "audit_hash": Figure(
        "hash", "", "", "SHA-256 of the row and of the hash of the row before it.", "status: audit.head"
    ),
    "audit_host": Figure("host", "", "", "The machine on which the action was recorded.", "audit: host"),
    "audit_parameters": Figure(
        "parameters", "", "", "Parameters of the action, without secrets.", "audit: params"
    ),
    "audit_change": Figure(
        "before, after", "", "", "State of the target before and after the action.", "audit: before, after"
    ),
    "audit_note": Figure("note", "", "", "A remark that the operator gave.", "audit: note"),
    "audit_ended": Figure("ended", "date and time", "", "Time at which the action ended.", "audit: ended_at"),
    "message": Figure("MESSAGE", "", "", "The text of the log line.", "logs: message"),
    "setting": Figure("SETTING", "", "", "Name of the setting, as in the settings file.", "config: settings"),
    "setting_value": Figure("VALUE", "", _NOW, "Value of the setting that is in effect.", "config: settings"),
    "finding": Figure(
        "FINDING, SUBJECT, remedy",
        "",
        "the last check",
        "What appliance doctor found, what it concerns, and what to do.",
        "appliance doctor",
    ),
}
