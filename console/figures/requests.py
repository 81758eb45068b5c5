"""The fields and metrics of requests, tenants and usage."""

from __future__ import annotations

from console.figures.figure import DAY, LIFE, MINUTE, NOW, REQUEST_OR_DAY, START, Figure

REQUESTS: dict[str, Figure] = {
    "request_id": Figure("REQUEST", "", "", "Request id, as in the request log.", "requests: request_id"),
    "phase": Figure(
        "PHASE",
        "",
        NOW,
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
    "age_s": Figure("AGE", "s", LIFE, "Time since the request arrived.", "requests: age_s"),
    "queue_s": Figure(
        "QUEUE", "s", LIFE, "Time from arrival to the first dispatch to a replica.", "requests: queue_s"
    ),
    "ttft_s": Figure("TTFT", "s", LIFE, "Time from arrival to the first token.", "requests: ttft_s"),
    "prompt_tokens": Figure(
        "PROMPT, prompt tokens",
        "tokens",
        f"a request; usage: {DAY}",
        "Prompt tokens of a request, or of all requests of a day.",
        "requests, usage: prompt_tokens",
    ),
    "generated_tokens": Figure(
        "OUT, OUTPUT, output tokens",
        "tokens",
        "a request so far; a model: since its replicas started",
        "Output tokens generated.",
        "requests: generated_tokens; status: models.replicas.generated_tokens",
    ),
    "max_tokens": Figure(
        "MAX",
        "tokens",
        LIFE,
        "Maximum number of output tokens of the request.",
        "requests: max_tokens",
    ),
    "tokens_per_s": Figure(
        "TOK/S, tokens/s, output tokens/s",
        "tokens/s",
        "a request: since its first token; a tenant: last 10 s",
        "Output tokens per second of a request, or prompt and output tokens per second of a tenant.",
        "requests: generated_tokens; tenants: tokens_per_s",
    ),
    "blocks": Figure(
        "BLOCKS, KV blocks", "blocks", NOW, "KV blocks in use by the request.", "requests: blocks"
    ),
    "replica": Figure("REPLICA", "", "", "The replica that runs the request.", "requests: replica"),
    "front": Figure(
        "FRONT", "", "", "The front process that holds the client's connection.", "requests: front"
    ),
    "request_state": Figure(
        "state",
        "",
        NOW,
        "queued: the request waits in the core. running: a replica has it. lost: its replica has ended, and "
        "it waits for another one.",
        "requests: state",
    ),
    "attempt": Figure(
        "attempt",
        "",
        LIFE,
        "How often the request was sent to another replica because its replica had ended.",
        "requests: attempt",
    ),
    "streamed": Figure("streamed", "", "", "Whether the client reads a stream.", "requests: stream"),
    "request_computed_tokens": Figure(
        "computed tokens",
        "tokens",
        LIFE,
        "Prompt tokens whose keys and values are in the KV cache, including those from the prefix cache.",
        "requests: computed_tokens",
    ),
    "request_preemptions": Figure(
        "preemptions",
        "",
        LIFE,
        "How often the request lost its KV blocks to other requests and had to be recomputed.",
        "requests, request-log: preemptions",
    ),
    "deadline_left_s": Figure(
        "deadline in",
        "s",
        NOW,
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
    "error": Figure("error", "", "", "Why the request failed.", "request-log: error"),
    "arrived": Figure(
        "arrived", "date and time", "", "Time at which the request arrived.", "request-log: created_at"
    ),
    "user": Figure("user", "", "", 'The request\'s "user" field, set by the client.', "request-log: user"),
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
        "inter-token time", "ms", "the request", "Mean time between output tokens.", "request-log: itl_ms"
    ),
    "resubmissions": Figure(
        "resubmissions",
        "",
        "the request",
        "How often the request was sent to another replica because its replica ended.",
        "request-log: resubmissions",
    ),
    "name": Figure("MODEL, TENANT", "", "", "Name of the model or tenant.", "status: models; tenants"),
    "state": Figure(
        "STATE",
        "",
        NOW,
        "State of the model or tenant. A suspended tenant's requests are refused.",
        "status: models.state; tenants: suspended_at",
    ),
    "highest_class": Figure(
        "CL", "", NOW, "Highest service class that the tenant's requests can have.", "tenants: highest_class"
    ),
    "weight": Figure("WEIGHT", "", NOW, "The tenant's weight in fair sharing.", "tenants: weight"),
    "share": Figure(
        "SHARE, share of service",
        "% of service",
        MINUTE,
        "The tenant's share of the weighted tokens processed for all tenants.",
        "appliance_tenant_service_total",
    ),
    "fair_share": Figure(
        "FAIR",
        "% of service",
        NOW,
        "The tenant's fair share, by weight, among the tenants that have requests. A SHARE above FAIR means "
        "that the tenant uses capacity that others leave unused.",
        "tenants: weight",
    ),
    "limit_used": Figure(
        "LIMIT MOST USED",
        "%",
        NOW,
        "The limit that is closest to being exhausted. A running request counts as its maximum number of "
        "tokens.",
        "tenants: usage",
    ),
    "exhausted_in_s": Figure(
        "FULL IN, limit reached in",
        "s",
        MINUTE,
        "Time until a limit is reached at the current rate. -: no limit is being approached.",
        "tenants: usage",
    ),
    "refused": Figure(
        "REFUSED",
        "requests",
        START,
        "Requests refused because of limits or overload.",
        "appliance_tenant_requests_total",
    ),
    "requests": Figure(
        "REQUESTS",
        "requests",
        f"a tenant: {START}; usage: {DAY}",
        "Finished requests.",
        "appliance_tenant_requests_total; usage: requests",
    ),
    "billed_tokens": Figure(
        "BILLED, billed tokens",
        "tokens",
        START,
        "Output tokens delivered to the tenant.",
        "appliance_tenant_billed_tokens_total",
    ),
    "keys": Figure("KEYS", "keys", NOW, "Valid keys of the tenant.", "tenants: keys"),
    "tenant_prompt_tokens": Figure(
        "prompt tokens",
        "tokens",
        START,
        "Prompt tokens of the tenant's finished requests, and how many of them came from the prefix cache.",
        "tenants: prompt_tokens, cached_tokens",
    ),
    "limits": Figure(
        "usage of limits",
        "% of the limit",
        NOW,
        'Each limit of the tenant with its use. Limits per minute and per day refill continuously; "resets '
        'in" is the time until all of the used part is available again.',
        "tenants: usage",
    ),
    "day": Figure("DAY", "day in UTC", "", "Day on which the requests finished.", "usage: day"),
    "failed": Figure(
        "FAILED",
        "requests",
        DAY,
        "Requests that ended with an error or an HTTP status of 400 or higher.",
        "usage: failed",
    ),
    "cached_tokens": Figure(
        "CACHED, cached tokens",
        "tokens",
        REQUEST_OR_DAY,
        "Prompt tokens that came from the prefix cache. PROMPT includes them.",
        "request-log, usage: cached_tokens",
    ),
    "output_tokens": Figure(
        "OUTPUT, output tokens",
        "tokens",
        DAY,
        "Output tokens delivered to the tenant.",
        "usage: output_tokens",
    ),
    "cost": Figure(
        "COST",
        "currency of the prices",
        DAY,
        "Cost at the prices in the settings. Models without a price are not included; -- means that no model "
        "has a price.",
        "usage: cost",
    ),
    "caller_name": Figure(
        "NAME", "", "", "Name of the key, or the local user or group that needs no key.", "keys: name"
    ),
    "caller_id": Figure(
        "ID",
        "",
        "",
        "Id of the key, or the name by which commands refer to the user or group.",
        "keys: id; peers: number",
    ),
    "caller_tenant": Figure(
        "TENANT", "", "", "The tenant that is billed for the requests.", "keys, peers: tenant"
    ),
    "caller_state": Figure(
        "STATE",
        "",
        NOW,
        "State of a key, or source of a mapping: mapped by an operator, or from the settings.",
        "keys: revoked_at, expires_at; peers: source",
    ),
    "expires_at": Figure(
        "EXPIRES, expires", "date and time", "", "Time at which the key expires.", "keys: expires_at"
    ),
    "scopes": Figure("SCOPES", "", "", "What the key permits.", "keys: scopes"),
    "caller_created": Figure(
        "created",
        "date and time",
        "",
        "Time at which the key or mapping was created.",
        "keys, peers: created_at",
    ),
    "caller_limits": Figure(
        "usage of limits", "% of the limit", NOW, "Each limit of the key with its use.", "keys: usage"
    ),
}
