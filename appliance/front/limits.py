"""Rate limit headers in the format of OpenAI's API."""

from __future__ import annotations

from appliance.channel.core_messages import RateLimits
from appliance.quantities import duration


def rate_limit_headers(limits: RateLimits | None) -> dict[str, str]:
    """Return the `x-ratelimit-*` response headers, which describe the request limit and the token limit
    closest to exhaustion."""
    if limits is None:
        return {}
    kinds = {
        "requests": (limits.limit_requests, limits.remaining_requests, limits.reset_requests_s),
        "tokens": (limits.limit_tokens, limits.remaining_tokens, limits.reset_tokens_s),
    }
    headers = {}
    for kind, (limit, remaining, reset_s) in kinds.items():
        if limit is not None and reset_s is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration(reset_s)
    return headers
