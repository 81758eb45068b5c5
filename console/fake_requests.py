"""The simulated service's request log and usage."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from appliance.pages import NamedRequest, UsageRow
from appliance.protocol.status import CLASS_NAMES
from console.simulated import KEY_NAMES, SimRequest, SimTenant, key_id
from console.simulation import Simulation
from console.source import USAGE_DAYS

_STATUS = {"cancelled": 499, "error": 429}
_PROMPT_PRICE, _CACHED_PRICE, _OUTPUT_PRICE = 0.6, 0.15, 1.8
"""Prices per million tokens."""
_MAX_TOKENS_PER_S = 900
"""Mean tokens per second on earlier days for the tenant with the highest weight."""


def finished_requests(simulation: Simulation) -> list[NamedRequest]:
    """Return finished requests, most recently finished first."""
    return [_logged(number, one) for number, one in enumerate(simulation.finished)][::-1]


def _logged(number: int, one: SimRequest) -> NamedRequest:
    assert one.ended_at is not None
    e2e_s = one.ended_at - one.arrived
    generated = int(one.generated)
    first_s = None if one.first_token is None else one.first_token - one.arrived
    queue_s = None if one.started is None else one.started - one.arrived
    refused = one.finish_reason == "error"
    return NamedRequest(
        request_id=one.id,
        created_at=one.arrived,
        finished_at=one.ended_at,
        tenant=one.tenant,
        key_id=one.key_id,
        key_name=one.key_name,
        endpoint="/v1/chat/completions",
        model=one.model,
        request_class=CLASS_NAMES[one.number],
        stream=one.key != 1,
        prompt_tokens=one.prompt,
        cached_tokens=one.cached,
        generated_tokens=generated,
        billed_tokens=generated,
        queue_ms=None if queue_s is None else queue_s * 1000,
        ttft_ms=None if first_s is None else first_s * 1000,
        itl_ms=None if first_s is None else (e2e_s - first_s) * 1000 / max(1, generated),
        e2e_ms=e2e_s * 1000,
        finish_reason=one.finish_reason,
        status=_STATUS.get(one.finish_reason, 200),
        error="tokens_per_minute is exhausted: retry in 12 s" if refused else None,
        replica=one.replica or None,
        preemptions=one.preemptions,
        sequence=number + 1,
        state="ended",
        double_ends=0,
    )


def usage_rows(simulation: Simulation) -> list[UsageRow]:
    """Return recent usage by day, tenant and key, newest day first. A given day always has the same usage."""
    today = datetime.fromtimestamp(simulation.now, UTC)
    rows = []
    for back in range(USAGE_DAYS):
        day = (today - timedelta(days=back)).date().isoformat()
        seconds = 86_400 if back else today.hour * 3600 + today.minute * 60 + today.second
        rows += [
            _used(tenant, key, day, seconds) for tenant in simulation.tenants.values() for key in KEY_NAMES
        ]
    return rows


def _used(tenant: SimTenant, key: str, day: str, seconds: int) -> UsageRow:
    name = f"{tenant.name}-{key}"
    drawn = random.Random(f"{day} {name}")
    tokens = int(seconds * _MAX_TOKENS_PER_S * tenant.weight / 4.0 * drawn.uniform(0.1, 1.0))
    prompt = int(tokens * drawn.uniform(0.6, 0.8))
    cached, output = int(prompt * drawn.uniform(0.1, 0.5)), tokens - prompt
    requests = tokens // 1500
    cost = (prompt - cached) * _PROMPT_PRICE + cached * _CACHED_PRICE + output * _OUTPUT_PRICE
    return UsageRow(
        day=day,
        tenant=tenant.name,
        key_id=key_id(name),
        key_name=name,
        requests=requests,
        failed=int(requests * drawn.uniform(0.0, 0.01)),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        cost=cost / 1e6,
    )
