"""Metrics of finished requests, counted when their request log rows are closed."""

from __future__ import annotations

from typing import Literal

from appliance.monitoring.metrics.metric import Metric
from store.requests import RequestRow

QUEUE_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120)
FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
NEXT_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5),
)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 45, 60, 120, 300, 600, 1800)


def outcome(row: RequestRow) -> Literal["ok", "cancelled", "refused", "rejected", "failed"]:
    """Return a request's outcome."""
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
    return None if milliseconds is None else milliseconds * 1e-3


def _successful_seconds(row: RequestRow) -> float | None:
    return _seconds(row.e2e_ms) if outcome(row) == "ok" else None


# fmt: off
ROWS = (
    Metric("counter", "appliance_requests_total", "requests",
           "Finished requests by outcome: ok, cancelled (client disconnected or front process crashed), "
           "rejected (client error), refused (429 or 503 because of a limit or overload), or failed.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("counter", "appliance_prompt_tokens_total", "tokens",
           "Prompt tokens in finished requests.",
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
           "Number of times requests were preempted, counted when each request finishes.",
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
           "Finished requests, by the model or version they were sent to.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("histogram", "appliance_arm_time_to_first_token_seconds", "seconds",
           "Time to first token, by the model or version the requests were sent to.",
           lambda row: _seconds(row.ttft_ms), bounds=FIRST_TOKEN_BOUNDS_S),
    Metric("histogram", "appliance_arm_request_seconds", "seconds",
           "End-to-end latency of successful requests, by the model or version they were sent to.",
           _successful_seconds, bounds=REQUEST_BOUNDS_S),
)
FALLBACKS = (
    Metric("counter", "appliance_fallbacks_total", "requests",
           "Finished requests that were passed to the model's fallback because the model could not answer "
           "them, by outcome.",
           lambda row: {outcome(row): 1}, ("outcome",)),
)
# fmt: on
