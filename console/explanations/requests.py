"""Fields and metrics of requests, tenants and usage."""

from __future__ import annotations

from console.explanations.explanation import DAY, LIFE, MINUTE, NOW, REQUEST_OR_DAY, START, Explanation

REQUESTS: dict[str, Explanation] = {
    "request_id": Explanation(
        "REQUEST", "", "", "Request id, as in the request log.", "requests: request_id"
    ),
    "phase": Explanation(
        "PHASE",
        "",
        NOW,
        "Q queued: waiting for a replica. P prefill: the prompt is being processed. D decode: output tokens "
        "are being generated. E ending: the response is complete or cancelled, and is being recorded. I "
        "interrupted: the replica has exited, and the request will be sent to another one.",
        "requests: phase",
    ),
    "class_name": Explanation(
        "CL, class",
        "",
        "",
        "Service class: P0 real-time, P1 interactive, P2 batch, P3 background.",
        "requests: class_name",
    ),
    "tenant": Explanation("TENANT", "", "", "The tenant that is billed for the request.", "requests: tenant"),
    "key_name": Explanation(
        "KEY", "", "", "Name of the API key, or its id if it has no name.", "requests: key_name, key_id"
    ),
    "model": Explanation("MODEL", "", "", "The model that the client requested.", "requests: model"),
    "age_s": Explanation("AGE", "s", LIFE, "Time since the request arrived.", "requests: age_s"),
    "queue_s": Explanation(
        "QUEUE", "ms, s", LIFE, "Time from arrival to the first dispatch to a replica.", "requests: queue_s"
    ),
    "ttft_s": Explanation("TTFT", "ms, s", LIFE, "Time from arrival to the first token.", "requests: ttft_s"),
    "prompt_tokens": Explanation(
        "PROMPT, prompt tokens",
        "tokens",
        f"a request; usage: {DAY}",
        "Prompt tokens in a request, or in all of a day's requests.",
        "requests, usage: prompt_tokens",
    ),
    "generated_tokens": Explanation(
        "OUT, OUTPUT, output tokens",
        "tokens",
        "a request so far; a model: since its replicas started",
        "Output tokens generated.",
        "requests: generated_tokens; status: models.replicas.generated_tokens",
    ),
    "max_tokens": Explanation(
        "MAX",
        "tokens",
        LIFE,
        "The request's maximum number of output tokens.",
        "requests: max_tokens",
    ),
    "tokens_per_s": Explanation(
        "TOK/S, tokens/s, output tokens/s",
        "tokens/s",
        "a request: since its first token; a tenant: last 10 s",
        "A request's output tokens per second, or a tenant's prompt and output tokens per second.",
        "requests: generated_tokens; tenants: tokens_per_s",
    ),
    "blocks": Explanation(
        "BLOCKS, KV blocks", "blocks", NOW, "KV blocks that the request uses.", "requests: blocks"
    ),
    "replica": Explanation("REPLICA", "", "", "The replica that runs the request.", "requests: replica"),
    "front": Explanation(
        "FRONT", "", "", "The front process that holds the client's connection.", "requests: front"
    ),
    "request_state": Explanation(
        "state",
        "",
        NOW,
        "queued: waiting in the core. running: on a replica. interrupted: its replica has exited, and the "
        "request is waiting for another one.",
        "requests: state",
    ),
    "attempt": Explanation(
        "attempt",
        "times",
        LIFE,
        "How often the request was sent to another replica because its replica had exited.",
        "requests: attempt",
    ),
    "streamed": Explanation("streamed", "", "", "Whether the response is streamed.", "requests: stream"),
    "request_computed_tokens": Explanation(
        "computed tokens",
        "tokens",
        LIFE,
        "Prompt tokens whose keys and values are in the KV cache, including those from the prefix cache.",
        "requests: computed_tokens",
    ),
    "request_preemptions": Explanation(
        "preemptions",
        "preemptions",
        LIFE,
        "How often the request lost its KV blocks to other requests and had to be recomputed.",
        "requests, request-log: preemptions",
    ),
    "deadline_left_s": Explanation(
        "deadline in",
        "s",
        NOW,
        "Time left until the client's deadline.",
        "requests: deadline_left_s",
    ),
    "peer": Explanation(
        "peer",
        "",
        "",
        "The local user or group that sent the request over the Unix socket. Requests with a key have none.",
        "requests, request-log: peer",
    ),
    "phases": Explanation(
        "queue, prefill, decode",
        "ms, s",
        "the request so far",
        "Time spent waiting for a replica, processing the prompt until the first token, and generating the "
        "remaining tokens.",
        "requests: queue_s, ttft_s",
    ),
    "finished_at": Explanation(
        "ENDED", "date and time", "", "When the request ended.", "request-log: finished_at"
    ),
    "result": Explanation(
        "RESULT",
        "",
        "",
        "Finish reason: stop, length or cancelled. If the request failed, the HTTP status comes first.",
        "request-log: finish_reason, status, error",
    ),
    "duration_s": Explanation(
        "TIME", "ms, s", "the request", "End-to-end time, from arrival to completion.", "request-log: e2e_ms"
    ),
    "error": Explanation("error", "", "", "Why the request failed.", "request-log: error"),
    "arrived": Explanation(
        "arrived", "date and time", "", "When the request arrived.", "request-log: created_at"
    ),
    "user": Explanation(
        "user", "", "", 'The request\'s "user" field, set by the client.', "request-log: user"
    ),
    "endpoint": Explanation("endpoint", "", "", "API path that the client called.", "request-log: endpoint"),
    "unit": Explanation(
        "answered by",
        "",
        "",
        "The model and version that answered. They can differ from the name requested.",
        "request-log: unit",
    ),
    "itl_ms": Explanation(
        "inter-token time", "ms", "the request", "Mean time between output tokens.", "request-log: itl_ms"
    ),
    "resubmissions": Explanation(
        "resubmissions",
        "times",
        "the request",
        "How often the request was sent to another replica because its replica had exited.",
        "request-log: resubmissions",
    ),
    "name": Explanation("MODEL, TENANT", "", "", "Name of the model or tenant.", "status: models; tenants"),
    "state": Explanation(
        "STATE",
        "",
        NOW,
        "State of the model or tenant. on demand: the next request loads the model into memory. sleeping: "
        "the model has released its memory until it is woken. suspended: the tenant's requests are refused.",
        "status: models.state; tenants: suspended_at",
    ),
    "highest_class": Explanation(
        "CL", "", NOW, "Highest service class allowed for the tenant's requests.", "tenants: highest_class"
    ),
    "weight": Explanation(
        "WEIGHT", "relative weight", NOW, "The tenant's weight in fair sharing.", "tenants: weight"
    ),
    "share": Explanation(
        "SHARE, share of service",
        "% of service",
        MINUTE,
        "The tenant's share of the weighted tokens processed for all tenants.",
        "appliance_tenant_service_total",
    ),
    "fair_share": Explanation(
        "FAIR",
        "% of service",
        NOW,
        "The tenant's fair share, by weight, among tenants that have requests. If SHARE exceeds FAIR, the "
        "tenant is using capacity that others leave unused.",
        "tenants: weight",
    ),
    "limit_used": Explanation(
        "LIMIT MOST USED",
        "%",
        NOW,
        "The limit closest to being exhausted. Running requests are counted at their maximum length.",
        "tenants: usage",
    ),
    "exhausted_in_s": Explanation(
        "FULL IN, limit reached in",
        "s",
        MINUTE,
        "Time until a limit is reached at the current rate; - if no limit is being approached.",
        "tenants: usage",
    ),
    "refused": Explanation(
        "REFUSED",
        "requests",
        START,
        "Requests refused because of limits or overload.",
        "appliance_tenant_requests_total",
    ),
    "requests": Explanation(
        "REQUESTS",
        "requests",
        f"a tenant: {START}; usage: {DAY}",
        "Finished requests.",
        "appliance_tenant_requests_total; usage: requests",
    ),
    "billed_tokens": Explanation(
        "BILLED, billed tokens",
        "tokens",
        START,
        "Output tokens delivered to the tenant.",
        "appliance_tenant_billed_tokens_total",
    ),
    "keys": Explanation("KEYS", "keys", NOW, "The tenant's valid keys.", "tenants: keys"),
    "tenant_prompt_tokens": Explanation(
        "prompt tokens",
        "tokens",
        START,
        "Prompt tokens in the tenant's finished requests, and how many of them were served from the prefix "
        "cache.",
        "tenants: prompt_tokens, cached_tokens",
    ),
    "limits": Explanation(
        "limit usage",
        "% of the limit",
        NOW,
        "Each limit, and how much of it is used. Limits per minute and per day refill continuously; "
        "'resets in' is the time until they are full again.",
        "tenants: usage",
    ),
    "day": Explanation("DAY", "day in UTC", "", "The day on which the requests finished.", "usage: day"),
    "failed": Explanation(
        "FAILED",
        "requests",
        DAY,
        "Requests that ended with an error or an HTTP status of 400 or higher.",
        "usage: failed",
    ),
    "cached_tokens": Explanation(
        "CACHED, cached tokens",
        "tokens",
        REQUEST_OR_DAY,
        "Prompt tokens served from the prefix cache. PROMPT includes them.",
        "request-log, usage: cached_tokens",
    ),
    "output_tokens": Explanation(
        "OUTPUT, output tokens",
        "tokens",
        DAY,
        "Output tokens delivered to the tenant.",
        "usage: output_tokens",
    ),
    "cost": Explanation(
        "COST",
        "the prices' currency",
        DAY,
        "Cost at the configured prices, excluding models without a price. -- means that no model has a "
        "price.",
        "usage: cost",
    ),
    "caller_name": Explanation(
        "NAME", "", "", "Key name, or the local user or group that needs no key.", "keys: name"
    ),
    "caller_id": Explanation(
        "ID",
        "",
        "",
        "Key id, or the name that commands use for the user or group.",
        "keys: id; peers: number",
    ),
    "caller_tenant": Explanation(
        "TENANT", "", "", "The tenant that is billed for the requests.", "keys, peers: tenant"
    ),
    "caller_state": Explanation(
        "STATE",
        "",
        NOW,
        "A key's state, or a mapping's source: mapped by an operator, or from the settings.",
        "keys: revoked_at, expires_at; peers: source",
    ),
    "expires_at": Explanation(
        "EXPIRES, expires", "date and time", "", "When the key expires.", "keys: expires_at"
    ),
    "scopes": Explanation("SCOPES", "", "", "What the key permits.", "keys: scopes"),
    "caller_created": Explanation(
        "created",
        "date and time",
        "",
        "When the key or mapping was created.",
        "keys, peers: created_at",
    ),
    "caller_limits": Explanation(
        "limit usage",
        "% of the limit",
        NOW,
        "The key's limits, and how much of each is used.",
        "keys: usage",
    ),
}
