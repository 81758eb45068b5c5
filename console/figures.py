"""Explains each figure on screen: its unit, the period that it covers, and its source. The help of a screen
lists the figures that the screen shows, and a test requires an entry for each of them."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """The explanation of one figure."""

    title: str
    unit: str
    window: str
    """The period that the figure covers: "now", "since the start", or a time window."""
    text: str
    source: str
    """The metric or field from which the figure is read."""


_NOW, _SLICE, _MINUTE = "now", "since the frame before", "last 60 s"
_SECOND, _STEPS = "the second of the column", "the replica's last report; Batches: the second of the column"
_RATE, _START, _LIFE = "last 10 s", "since the start", "so far"
_DAY, _REQUEST_OR_DAY = "the day", "the request, or the day"

FIGURES: dict[str, Figure] = {
    "generated_tokens_per_s": Figure(
        "output tokens/s",
        "tokens/s",
        _RATE,
        "Output tokens that all replicas generated, per second.",
        "appliance_engine_generated_tokens_total",
    ),
    "prompt_tokens_per_s": Figure(
        "prompt tokens/s",
        "tokens/s",
        _RATE,
        "Prompt tokens of the sequences that replicas started, per second. Cached tokens count too.",
        "appliance_engine_prompt_tokens_total",
    ),
    "cached": Figure(
        "cached",
        "%",
        _RATE,
        "Share of these prompt tokens that were found in the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "ttft": Figure(
        "TTFT",
        "ms, s",
        _MINUTE,
        "Time to first token: from a request's arrival until its first token is written to the socket. p50 "
        "is the "
        "median; 99% of the requests were faster than p99.",
        "appliance_time_to_first_token_seconds",
    ),
    "itl": Figure(
        "ITL",
        "ms",
        _MINUTE,
        "Inter-token latency: a request's mean time between two output tokens.",
        "appliance_inter_token_seconds",
    ),
    "queue": Figure(
        "queue",
        "ms, s",
        _MINUTE,
        "Time that requests waited in the queue, from admission to the first dispatch.",
        "appliance_queue_seconds",
    ),
    "e2e": Figure(
        "E2E",
        "ms, s",
        _MINUTE,
        "Time from a request's arrival to the end of its answer.",
        "appliance_request_seconds",
    ),
    "waiting": Figure(
        "waiting",
        "requests",
        _NOW,
        "Requests that wait for dispatch to a replica.",
        "appliance_queue_requests",
    ),
    "oldest_wait_s": Figure(
        "oldest",
        "s",
        _NOW,
        'How long the oldest waiting request has waited. "late" means longer than the target.',
        "appliance_queue_oldest_wait_seconds",
    ),
    "expected_wait_s": Figure(
        "expect",
        "s",
        _NOW,
        "Predicted wait of a request that arrives now, from the measured rates.",
        "status: queue.classes.expected_wait_s",
    ),
    "target_s": Figure(
        "target", "s", _NOW, "Target for the wait of a class.", "status: queue.classes.target_s"
    ),
    "running": Figure(
        "RUN, running",
        "requests",
        _NOW,
        "Requests on a replica that have not ended.",
        "appliance_running_requests",
    ),
    "kv_used": Figure(
        "KV used",
        "% of blocks",
        _NOW,
        "KV blocks that unfinished sequences use. Cached blocks are free and do not count.",
        "appliance_kv_used_blocks, appliance_kv_blocks",
    ),
    "hit_rate": Figure(
        "hit",
        "% of prompt tokens",
        _MINUTE,
        "Prompt tokens that were found in the prefix cache.",
        "appliance_engine_cached_tokens_total",
    ),
    "utilization_percent": Figure(
        "GPU use",
        "% of time",
        "NVML's sample period, at most 1 s",
        "Share of time in which at least one kernel ran. It does not show how much of the GPU the kernel "
        "used.",
        "NVML utilization.gpu",
    ),
    "used_bytes": Figure(
        "memory", "bytes", _NOW, "Memory of the GPU in use by all processes.", "NVML memory.used"
    ),
    "power_w": Figure("W", "watts", _NOW, "Power of the board.", "NVML power.draw"),
    "temperature_c": Figure(
        "°",
        "°C",
        _NOW,
        "Temperature of the GPU. T: the clocks are reduced at present.",
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
        "CPU time of a process. The machine's figure is in percent of all cores.",
        "process_cpu_seconds_total, appliance_front_cpu_seconds_total",
    ),
    "load_1m": Figure("load", "processes", "1 min", "Load average of the machine.", "/proc/loadavg"),
    "request_id": Figure(
        "REQUEST", "", _NOW, "The request's id, as in the request log.", "requests: request_id"
    ),
    "phase": Figure(
        "PHASE",
        "",
        _NOW,
        "Q queued: waits for a replica. P prefill: its prompt is being computed. D decode: it has its "
        "first token.",
        "requests: phase",
    ),
    "class_name": Figure(
        "CL",
        "",
        _NOW,
        "Service class: P0 real-time, P1 interactive, P2 batch, P3 background.",
        "requests: class_name",
    ),
    "tenant": Figure("TENANT", "", _NOW, "The tenant that is billed.", "requests: tenant"),
    "key_name": Figure("KEY", "", _NOW, "Name of the key, or its id.", "requests: key_name, key_id"),
    "model": Figure("MODEL", "", _NOW, "The model that the client named.", "requests: model"),
    "age_s": Figure("AGE", "s", _LIFE, "Time since the request arrived.", "requests: age_s"),
    "queue_s": Figure("QUEUE", "s", _LIFE, "Time until the first dispatch.", "requests: queue_s"),
    "ttft_s": Figure("TTFT", "s", _LIFE, "Time from arrival to the first token.", "requests: ttft_s"),
    "prompt_tokens": Figure(
        "PROMPT",
        "tokens",
        f"a request: so far; usage: {_DAY}",
        "Length of the prompt, or prompt tokens of all requests of the day.",
        "requests, usage: prompt_tokens",
    ),
    "generated_tokens": Figure(
        "OUT, OUTPUT", "tokens", _LIFE, "Output tokens generated.", "requests, replicas: generated_tokens"
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
        "Output tokens of a request, or prompt and output tokens of a tenant, per second.",
        "requests: generated_tokens, tenants: tokens_per_s",
    ),
    "blocks": Figure("BLOCKS", "blocks", _NOW, "KV blocks that the request uses.", "requests: blocks"),
    "replica": Figure("REPLICA", "", _NOW, "The replica that runs the request.", "requests: replica"),
    "front": Figure(
        "FRONT", "", _NOW, "The front process that has the client's connection.", "requests: front"
    ),
    "name": Figure("NAME", "", _NOW, "Name of the model or tenant.", "status: models; tenants"),
    "state": Figure(
        "STATE",
        "",
        _NOW,
        "State of the model or tenant. A suspended tenant's requests are refused.",
        "status: models.state; tenants: suspended_at",
    ),
    "highest_class": Figure(
        "CL", "", _NOW, "Highest service class of the tenant's requests.", "tenants: highest_class"
    ),
    "weight": Figure("WEIGHT", "", _NOW, "Weight in fair sharing.", "tenants: weight"),
    "share": Figure(
        "SHARE",
        "% of service",
        _MINUTE,
        "The tenant's share of the weighted tokens that were computed for all tenants.",
        "appliance_tenant_service_total",
    ),
    "fair_share": Figure(
        "FAIR",
        "% of service",
        _NOW,
        "The share by weight among the tenants that have requests. A tenant with a larger share uses "
        "capacity that the others leave unused.",
        "tenants: weight",
    ),
    "limit_used": Figure(
        "LIMIT MOST USED",
        "%",
        _NOW,
        "The limit that is closest to being exhausted. Running requests count with their maximum.",
        "tenants: usage",
    ),
    "exhausted_in_s": Figure(
        "FULL IN",
        "s",
        _MINUTE,
        "Time until a limit is reached if use continues at the rate of the window.",
        "tenants: usage",
    ),
    "refused": Figure(
        "REFUSED",
        "requests",
        _START,
        "Requests refused because of a limit or overload.",
        "appliance_tenant_requests_total",
    ),
    "requests": Figure(
        "REQUESTS",
        "requests",
        f"a tenant: since the start; usage: {_DAY}",
        "Requests that ended.",
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
        "READY", "replicas", _NOW, "Ready replicas, out of all replicas.", "appliance_replica_state"
    ),
    "queued": Figure(
        "QUEUED", "requests", _NOW, "Requests that wait for the model.", "status: models.queued"
    ),
    "weight_bytes": Figure(
        "WEIGHTS", "bytes", _NOW, "Memory of the weights, per rank.", "status: replicas.weight_bytes"
    ),
    "max_model_len": Figure(
        "CONTEXT",
        "tokens",
        _NOW,
        "Longest sequence, prompt and output together.",
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
        "Mean duration of a step. Decode steps only decode; mixed steps also compute prompts.",
        "appliance_step_seconds",
    ),
    "idle_us": Figure(
        "idle",
        "µs",
        _STEPS,
        "Mean time that the device waited for the host before a step.",
        "appliance_device_idle_seconds",
    ),
    "credit_seqs": Figure(
        "credit", "sequences", _NOW, "Sequences that a replica can start now.", "appliance_credit_seqs"
    ),
    "load_seconds": Figure(
        "loaded in", "s", "the last start", "Time to load the weights.", "status: replicas.load_seconds"
    ),
    "evictions": Figure(
        "evictions",
        "blocks",
        _START,
        "Cached blocks that were overwritten by new sequences.",
        "appliance_kv_evictions_total",
    ),
    "preemptions": Figure(
        "preemptions",
        "",
        _START,
        "Sequences whose blocks were given to other sequences, and which were computed again.",
        "appliance_preemptions_total",
    ),
    "block_state": Figure(
        "free, cached, used, shared",
        "blocks",
        _NOW,
        "A cached block is free and still contains a prefix. A shared block has more than one reference: "
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
        "Steps that also computed prompts, and their mean duration.",
        "appliance_step_seconds",
    ),
    "decode_steps": Figure(
        "decode",
        "steps",
        _SECOND,
        "Steps that only decoded, and their mean duration.",
        "appliance_step_seconds",
    ),
    "steps_running": Figure(
        "seqs", "sequences", _NOW, "Running sequences, out of the maximum number.", "appliance_sequences"
    ),
    "stall": Figure(
        "!",
        "ms",
        _SECOND,
        "The longest step with decodes in the slice, if it took more than three times the mean decode-only "
        "step, and the request with the largest chunk in it.",
        "batches: longest_ms; stalls: request, tenant",
    ),
    "computed_tokens": Figure(
        "prompt, out",
        "tokens",
        _SECOND,
        "Prompt tokens computed and output tokens generated.",
        "batches: computed_tokens",
    ),
    "finished_at": Figure("ENDED", "time of day", "", "When the request ended.", "request-log: finished_at"),
    "result": Figure(
        "RESULT",
        "",
        "",
        "Why the request ended: stop, length or cancelled. After an error, its HTTP status comes first.",
        "request-log: finish_reason, status, error",
    ),
    "duration_s": Figure(
        "TIME", "s", "the request", "Time from the request's arrival to its end.", "request-log: e2e_ms"
    ),
    "day": Figure("DAY", "day in UTC", "", "Day on which the requests ended.", "usage: day"),
    "failed": Figure(
        "FAILED", "requests", _DAY, "Requests with an error or a status of 400 or more.", "usage: failed"
    ),
    "cached_tokens": Figure(
        "CACHED",
        "tokens",
        _REQUEST_OR_DAY,
        "Prompt tokens that were found in the prefix cache. PROMPT contains them.",
        "request-log, usage: cached_tokens",
    ),
    "output_tokens": Figure(
        "OUTPUT", "tokens", _DAY, "Output tokens delivered to the tenant.", "usage: output_tokens"
    ),
    "cost": Figure(
        "COST",
        "as the prices",
        _DAY,
        "Cost by the prices in the settings. Tokens of models without a price are not part of it; -- if no "
        "model has a price.",
        "usage: cost",
    ),
    "number": Figure("GPU", "", _NOW, "Number of the GPU, as NVML counts.", "gpus: number"),
    "sm_clock_mhz": Figure("MHz", "MHz", _NOW, "Clock of the processors.", "NVML clocks.sm"),
    "throttle_reasons": Figure(
        "THROTTLED", "", _NOW, "Reasons why the clocks are reduced.", "NVML clocks_event_reasons"
    ),
    "nvlink": Figure(
        "NVLINK/s",
        "bytes/s",
        _SLICE,
        "Bytes sent and received over all links.",
        "NVML NVLINK_THROUGHPUT_DATA",
    ),
    "ecc": Figure(
        "ECC",
        "errors",
        "since the driver was loaded",
        "Memory errors: uncorrected/corrected.",
        "NVML ecc.errors",
    ),
    "last_xid": Figure("XID", "", _START, "Number of the newest Xid error; - means none.", "NVML events"),
    "model_name": Figure("NAME", "", _NOW, "Name of the GPU.", "NVML name"),
    "memory_parts": Figure(
        "memory",
        "bytes",
        _NOW,
        "Memory in use: weights, KV cache, and other use such as activations, CUDA and other processes.",
        "status: replicas.weight_bytes, kv_bytes; NVML memory.used",
    ),
    "severity": Figure("SEVERITY", "", _NOW, "‼ critical, ! warning, i info.", "alerts: severity"),
    "alert_state": Figure(
        "STATE",
        "",
        _NOW,
        "pending: the condition is new and may pass. firing: it has lasted long enough. Operators "
        "acknowledge or silence "
        "alerts.",
        "alerts: state",
    ),
    "since": Figure("SINCE", "time of day", "", "When the condition began.", "alerts: since"),
    "rule": Figure(
        "RULE",
        "",
        "",
        'The rule that found it; "problem" is a current problem of the service.',
        "alerts: rule",
    ),
    "suppressed": Figure("ALSO", "alerts", _NOW, "Alerts that this alert explains.", "alerts: suppressed"),
    "seq": Figure("SEQ", "", "", "Number of the row in the audit chain.", "audit: seq"),
    "actor": Figure("OPERATOR", "", "", "The local user or key that performed the action.", "audit: actor"),
    "action": Figure("ACTION", "", "", "Name of the action, and its target.", "audit: action, target"),
    "outcome": Figure("RESULT", "", "", "Whether the action succeeded.", "audit: outcome"),
    "audit_rows": Figure(
        "anchored",
        "rows",
        _NOW,
        "Rows that chain heads recorded outside the database prove to be unchanged.",
        "status: audit.recorded_rows",
    ),
    "at": Figure("TIME", "", "", "When the line was written.", "logs: at"),
    "level": Figure("LEVEL", "", "", "Level of the line or finding.", "logs: level"),
    "process": Figure(
        "PROCESS",
        "",
        "",
        "The process that wrote the line: core, a front or a replica. The filter process:front-0 shows the "
        "lines of one process.",
        "logs: process",
    ),
    "area": Figure("AREA", "", "", "The part of the process that wrote the line.", "logs: area"),
    "figure": Figure("FIGURE", "", "", "Name of the figure, as in the admin API.", "GET /telemetry: figures"),
    "first": Figure(
        "FIRST",
        "of the figure",
        "the first instant",
        "The value at the time chosen with the c key.",
        "GET /telemetry",
    ),
    "second": Figure(
        "SECOND",
        "of the figure",
        "the instant on screen",
        "The value at the displayed time.",
        "GET /telemetry",
    ),
    "difference": Figure(
        "DIFFERENCE", "of the figure", "both instants", "The second value minus the first.", "GET /telemetry"
    ),
    "change": Figure(
        "CHANGE",
        "% of the first value",
        "both instants",
        "The difference as a percentage of the first value.",
        "GET /telemetry",
    ),
    "setting_source": Figure(
        "SOURCE", "", _NOW, "FILE:LINE, a command-line flag, or default.", "config: places"
    ),
}
