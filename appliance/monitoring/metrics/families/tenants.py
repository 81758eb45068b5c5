"""Per-tenant metrics: finished and current requests, and rate limits."""

from __future__ import annotations

from appliance.monitoring.metrics.families.requests import outcome
from appliance.monitoring.metrics.metric import Metric

# fmt: off
TENANT_ROWS = (
    Metric("counter", "appliance_tenant_requests_total", "requests",
           "Finished requests, by tenant.",
           lambda row: {outcome(row): 1}, ("outcome",)),
    Metric("counter", "appliance_tenant_prompt_tokens_total", "tokens",
           "Prompt tokens in a tenant's requests.",
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
           lambda t: t.use.queued),
    Metric("gauge", "appliance_tenant_running_requests", "requests",
           "A tenant's running requests.",
           lambda t: t.use.running),
)
LIMITS = (
    Metric("gauge", "appliance_tenant_limit", "",
           "Capacity of a tenant's rate limit: the largest burst it allows.",
           lambda bucket: bucket.rate.capacity),
    Metric("gauge", "appliance_tenant_limit_left", "",
           "Remaining capacity of a tenant's rate limit. Unfinished requests are counted at their maximum "
           "usage.",
           lambda bucket: bucket.level),
)
# fmt: on
