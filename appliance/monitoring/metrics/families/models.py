"""Model metrics: queues, residency, shadow traffic, and the metrics that gateways expect."""

from __future__ import annotations

import time
from typing import NamedTuple

from appliance.monitoring.metrics.metric import Metric
from appliance.protocol import ReplicaStatus
from appliance.traffic.stats import ModelStats
from engine.messages import BLOCK_TOKENS
from store.fields import CLASS_NAMES


class GatewaySource(NamedTuple):
    """The data from which a model's gateway metrics are read."""

    model: ModelStats
    ready: list[ReplicaStatus]
    """Status of each of the model's ready replicas."""

    def blocks(self) -> int:
        """Return the total number of KV blocks of all ready replicas."""
        return sum(status.blocks_total for status in self.ready)

    def kv_usage(self) -> float:
        """Return the fraction of KV blocks in use, or 1 if no replica is ready."""
        blocks = self.blocks()
        return sum(status.blocks_used for status in self.ready) / blocks if blocks else 1.0


# fmt: off
MODELS = (
    Metric("gauge", "appliance_queue_requests", "requests",
           "Requests waiting for their first dispatch.",
           lambda m: dict(zip(CLASS_NAMES, m.waiting, strict=True)), ("class",)),
    Metric("gauge", "appliance_queue_oldest_wait_seconds", "seconds",
           "Waiting time of the oldest waiting request.",
           lambda m: dict(zip(CLASS_NAMES, m.oldest_wait_s, strict=True)), ("class",)),
    Metric("gauge", "appliance_resuming_requests", "requests",
           "Requests that are waiting to resume after their replica disconnected.",
           lambda m: m.resuming),
    Metric("gauge", "appliance_running_requests", "requests",
           "Unfinished requests already dispatched to a replica.",
           lambda m: m.running),
    Metric("gauge", "appliance_overload_step", "",
           "A model's current load shedding step, or 0 if it is not overloaded.",
           lambda m: m.overload_step),
)
RESIDENCY = (
    Metric("gauge", "appliance_model_in_memory", "",
           "1 if the model is loaded or being loaded, otherwise 0.",
           lambda r: int(r.in_memory)),
    Metric("counter", "appliance_model_demand_loads_total", "",
           "Number of times the model was loaded or woken because a request was waiting for it.",
           lambda r: r.loads),
    Metric("counter", "appliance_model_evictions_total", "",
           "Number of times the model was automatically unloaded or put to sleep, because it was idle, "
           "another model needed the memory, or a group forbids loading both. Unloading a sleeping model is "
           "not counted again.",
           lambda r: r.evictions, ("reason",)),
)
SHADOWS = (
    Metric("counter", "appliance_shadow_requests_total", "requests",
           "Requests selected for copying to a shadow model, by result: compared, dropped or failed.",
           lambda s: {"compared": s.compared, "dropped": s.dropped, "failed": s.failed}, ("result",)),
    Metric("counter", "appliance_shadow_tokens_total", "tokens",
           "Output tokens of compared greedy requests, counted in the longer of the two answers.",
           lambda s: s.greedy_tokens),
    Metric("counter", "appliance_shadow_equal_tokens_total", "tokens",
           "Output tokens of compared greedy requests before the first difference between the two answers.",
           lambda s: s.equal_tokens),
    Metric("summary", "appliance_shadow_time_to_first_token_seconds", "seconds",
           "Time to first token of compared requests, measured from their dispatch to the replica.",
           lambda s: {"original": (s.compared, s.originals.ttft_s), "copy": (s.compared, s.copies.ttft_s)},
           ("answer",)),
    Metric("summary", "appliance_shadow_request_seconds", "seconds",
           "End-to-end latency of compared requests, measured from their dispatch to the replica.",
           lambda s: {"original": (s.compared, s.originals.e2e_s), "copy": (s.compared, s.copies.e2e_s)},
           ("answer",)),
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
