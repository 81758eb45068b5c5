"""Every metric of the service, by name. `docs/metrics.md` has the same table; a test holds them together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from appliance.watch.metrics.exposition import Family, Histograms, Numbers, Summaries

QUEUE_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)
FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
NEXT_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5),
)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 45, 60, 120, 300, 600, 1800)


class Families:
    """The metrics, in the order in which they are shown."""

    def __init__(self) -> None:
        by_class = ("model", "class")
        self.info = _gauge("appliance_info", "Always 1; the version that runs.", "version")
        self.ready = _gauge("appliance_ready", "1 if every model answers: what /health/ready says.")
        self.draining = _gauge("appliance_draining", "1 while the service is out of service: it drains.")
        self.problems = _counter(
            "appliance_problems_total",
            "What went wrong: deaths of processes, bad files. The status says what.",
        )
        self.accepted = _counter(
            "appliance_connections_total", "Connections accepted, by listening socket.", "listener"
        )

        self.requests = _counter(
            "appliance_requests_total",
            "Requests that ended: ok, cancelled (the client left or its front died), rejected (its own "
            "fault), refused (429 or 503: a limit, or no room), failed.",
            *(*by_class, "outcome"),
        )
        self.retries = _counter(
            "appliance_retries_total",
            "Of these, retries with a known Idempotency-Key: joined the run under way, repeated its kept "
            "answer, or ran anew.",
            "model",
            "retry",
        )
        self.prompt_tokens = _counter(
            "appliance_prompt_tokens_total", "Prompt tokens of requests that ended.", *by_class
        )
        self.cached_tokens = _counter(
            "appliance_cached_prompt_tokens_total", "Of these, found in the prefix cache.", *by_class
        )
        self.generated_tokens = _counter(
            "appliance_generated_tokens_total", "Tokens generated for requests that ended.", *by_class
        )
        self.billed_tokens = _counter(
            "appliance_billed_tokens_total", "Of these, delivered: what tenants are billed.", *by_class
        )
        self.request_preemptions = _counter(
            "appliance_request_preemptions_total",
            "How often requests that ended had made room for others and were computed again.",
            *by_class,
        )
        self.waiting = _gauge(
            "appliance_queue_requests", "Requests that wait for their first turn.", *by_class
        )
        self.oldest_wait = _gauge(
            "appliance_queue_oldest_wait_seconds", "How long the oldest of them has waited.", *by_class
        )
        self.resuming = _gauge(
            "appliance_resuming_requests", "Requests that wait to go on: they lost their replica.", "model"
        )
        self.held = _gauge("appliance_held_requests", "Requests that wait for the end of a drain.")
        self.running = _gauge(
            "appliance_running_requests", "Requests handed to a replica that have not ended.", "model"
        )
        self.overload = _gauge(
            "appliance_overload_step", "How far up the overload ladder a model is; 0: it is not.", "model"
        )
        self.queue_seconds = Histograms(
            "appliance_queue_seconds",
            "From admission to a request's first turn.",
            QUEUE_BOUNDS_S,
            *by_class,
        )
        self.first_token_seconds = Histograms(
            "appliance_time_to_first_token_seconds",
            "From arrival to the first token's bytes handed to the socket (TTFT).",
            FIRST_TOKEN_BOUNDS_S,
            *by_class,
        )
        self.next_token_seconds = Histograms(
            "appliance_inter_token_seconds",
            "A request's mean time between tokens after the first (ITL).",
            NEXT_TOKEN_BOUNDS_S,
            *by_class,
        )
        self.request_seconds = Histograms(
            "appliance_request_seconds",
            "From arrival to the answer's end (E2E), of requests that ended ok.",
            REQUEST_BOUNDS_S,
            *by_class,
        )

        self.tenant_requests = _counter(
            "appliance_tenant_requests_total", "Requests that ended, by tenant.", "tenant", "outcome"
        )
        self.tenant_prompt_tokens = _counter(
            "appliance_tenant_prompt_tokens_total", "Prompt tokens of a tenant's requests.", "tenant"
        )
        self.tenant_cached_tokens = _counter(
            "appliance_tenant_cached_prompt_tokens_total", "Of these, found in the prefix cache.", "tenant"
        )
        self.tenant_generated_tokens = _counter(
            "appliance_tenant_generated_tokens_total", "Tokens generated for a tenant.", "tenant"
        )
        self.tenant_billed_tokens = _counter(
            "appliance_tenant_billed_tokens_total", "Tokens billed to a tenant.", "tenant"
        )
        self.tenant_service = _counter(
            "appliance_tenant_service_total",
            "Weighted tokens of service that a tenant got: what fair share evens out by weight.",
            "tenant",
        )
        self.tenant_waiting = _gauge(
            "appliance_tenant_queue_requests", "A tenant's requests that wait for a turn.", "tenant"
        )
        self.tenant_running = _gauge(
            "appliance_tenant_running_requests", "A tenant's requests that run.", "tenant"
        )
        self.tenant_limit = _gauge(
            "appliance_tenant_limit",
            "What a tenant may use at once of a limit on a rate.",
            *("tenant", "limit"),
        )
        self.tenant_limit_left = _gauge(
            "appliance_tenant_limit_left",
            "What is left of it; requests that have not ended count with the most that they may use.",
            *("tenant", "limit"),
        )

        by_replica = ("model", "replica")
        self.replica_state = _gauge(
            "appliance_replica_state", "1 for the state that a replica is in.", *by_replica, "state"
        )
        self.replica_restarts = _counter(
            "appliance_replica_restarts_total", "How often a replica was started again.", *by_replica
        )
        self.sequences = _gauge(
            "appliance_sequences", "Sequences that a replica runs, or holds back.", *by_replica, "state"
        )
        self.kv_blocks = _gauge("appliance_kv_blocks", "Blocks of a replica's KV cache.", *by_replica)
        self.kv_used = _gauge(
            "appliance_kv_used_blocks", "Of these, used by sequences that have not ended.", *by_replica
        )
        self.kv_cached = _gauge(
            "appliance_kv_cached_blocks", "Of these, free but kept for their prefix.", *by_replica
        )
        self.credit_seqs = _gauge(
            "appliance_credit_rows", "Sequences that a replica can start now.", *by_replica
        )
        self.credit_tokens = _gauge(
            "appliance_credit_tokens", "Prompt tokens that a replica takes now.", *by_replica
        )
        self.engine_prompt_tokens = _counter(
            "appliance_engine_prompt_tokens_total", "Prompt tokens that a replica has taken.", *by_replica
        )
        self.engine_cached_tokens = _counter(
            "appliance_engine_cached_tokens_total",
            "Of these, found in the prefix cache: cache hits.",
            *by_replica,
        )
        self.engine_generated_tokens = _counter(
            "appliance_engine_generated_tokens_total",
            "Tokens that a replica has generated, as it makes them.",
            *by_replica,
        )
        self.preemptions = _counter(
            "appliance_preemptions_total",
            "Sequences that gave their place up and were computed again.",
            *by_replica,
        )
        self.step_seconds = Summaries(
            "appliance_step_seconds",
            "Steps that only decoded (decode) or computed prompts (mixed), and how long they took.",
            *(*by_replica, "kind"),
        )
        self.idle_seconds = Summaries(
            "appliance_device_idle_seconds",
            "How long the device waited for the host before these steps.",
            *(*by_replica, "kind"),
        )

        self.front_state = _gauge(
            "appliance_front_state", "1 for the state that a front is in.", "front", "state"
        )
        self.front_restarts = _counter(
            "appliance_front_restarts_total", "How often a front was started again.", "front"
        )
        self.front_cpu = _counter(
            "appliance_front_cpu_seconds_total", "CPU time of the front process.", "front"
        )
        self.front_connections = _gauge(
            "appliance_front_connections", "Open connections of a front.", "front"
        )
        self.front_unauthenticated_connections = _gauge(
            "appliance_front_unauthenticated_connections",
            "Open connections that have not yet sent a request with a valid key.",
            "front",
        )
        self.front_refused_connections = _counter(
            "appliance_front_refused_connections_total",
            "Connections that were refused because no place was free.",
            "front",
        )
        self.front_evicted_connections = _counter(
            "appliance_front_evicted_connections_total",
            "Connections without a valid key that were closed to make room for others.",
            "front",
        )
        self.front_cut_off_connections = _counter(
            "appliance_front_cut_off_connections_total",
            "Connections that were closed because their clients did not take the answers.",
            "front",
        )
        self.front_refused_bodies = _counter(
            "appliance_front_refused_bodies_total",
            "Requests that were refused because too many bytes of bodies were under way.",
            "front",
        )
        self.front_streams = _gauge("appliance_front_streams", "Streams that a front writes.", "front")
        self.front_requests = _counter(
            "appliance_front_requests_total", "Requests that reached a front.", "front"
        )
        self.front_tokens = _counter("appliance_front_tokens_total", "Tokens through a front.", "front")
        self.front_unauthenticated = _counter(
            "appliance_front_unauthenticated_total", "Requests without a valid identity.", "front"
        )
        self.front_kept_answers = _gauge(
            "appliance_front_kept_answers", "Answers that a front keeps for retries.", "front"
        )
        self.front_kept_bytes = _gauge("appliance_front_kept_bytes", "What these take.", "front")
        self.front_dropped_texts = _counter(
            "appliance_front_dropped_texts_total",
            "Requests whose texts were not kept, because too much waited.",
            "front",
        )

        self.store_waiting = _gauge(
            "appliance_store_waiting_rows", "Changes that wait for their commit.", "database"
        )
        self.store_lag = _gauge("appliance_store_lag_seconds", "Age of the oldest of them.", "database")
        self.store_failing = _gauge(
            "appliance_store_failing_seconds", "For how long a database has refused writes.", "database"
        )
        self.store_committed = _counter(
            "appliance_store_committed_rows_total", "Changes committed.", "database"
        )
        self.store_dropped = _counter(
            "appliance_store_dropped_rows_total", "Changes lost because memory for them was full.", "database"
        )
        self.store_rejected = _counter(
            "appliance_store_rejected_rows_total", "Changes that a database cannot hold.", "database"
        )

        self.audit_rows = _counter("appliance_audit_rows_total", "Rows of the audit chain.")
        self.audit_spooled = _gauge(
            "appliance_audit_spooled_rows", "Audit rows that the database did not take yet."
        )
        self.audit_lost = _counter(
            "appliance_audit_lost_rows_total", "Audit rows for which there was no room; the log has them."
        )

        self.log_dropped_lines = _counter(
            "appliance_log_dropped_lines_total",
            "Lines of the log that were dropped because standard error was not read.",
            "process",
        )
        self.process_cpu = _counter("process_cpu_seconds_total", "CPU time of the core.")
        self.process_memory = _gauge("process_resident_memory_bytes", "Resident memory of the core.")
        self.process_started = _gauge("process_start_time_seconds", "When the core started, unix seconds.")

        self.vllm_waiting = _gauge(
            "vllm:num_requests_waiting", "As appliance_queue_requests, for gateways.", "model_name"
        )
        self.vllm_running = _gauge(
            "vllm:num_requests_running", "As appliance_running_requests, for gateways.", "model_name"
        )
        self.vllm_kv_usage = _gauge(
            "vllm:kv_cache_usage_perc",
            "Used part of the KV blocks of a model's ready replicas, 0 to 1.",
            "model_name",
        )
        self.vllm_cache_config = _gauge(
            "vllm:cache_config_info",
            "Always 1; tokens of a block, and blocks of a model's ready replicas.",
            *("model_name", "block_size", "num_gpu_blocks"),
        )
        self.vllm_lora = _gauge(
            "vllm:lora_requests_info",
            "Unix seconds; adapters that run and wait. There are none.",
            *("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )

    def __iter__(self) -> Iterator[Family[Any]]:
        return iter(vars(self).values())

    def by(self, label: str) -> list[Family[Any]]:
        """The metrics with this label."""
        return [family for family in self if label in family.labels]


def _counter(name: str, help_text: str, *labels: str) -> Numbers:
    return Numbers("counter", name, help_text, *labels)


def _gauge(name: str, help_text: str, *labels: str) -> Numbers:
    return Numbers("gauge", name, help_text, *labels)
