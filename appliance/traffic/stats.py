"""Statistics on requests in flight, for the status, the metrics and the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from appliance.protocol import LimitUsage
from appliance.protocol.status import ClassStatus
from appliance.traffic.model import ModelTraffic
from appliance.traffic.tenants import Tenants
from store.fields import CLASS_NAMES
from store.policies import CLASSES, QuotaScope


class ModelStats(NamedTuple):
    """Statistics for one model. Each list has one entry per service class, starting with P0."""

    name: str
    waiting: list[int]
    """Number of requests waiting for their first dispatch, by class."""
    oldest_wait_s: list[float]
    resuming: int
    """Number of requests that have lost their replica and are waiting to continue."""
    running: int
    overload_step: int
    """The current load-shedding step; 0 if there is no overload."""


def model(one: ModelTraffic, now: float) -> ModelStats:
    """Return the statistics for a model. The cost of this call does not depend on the number of waiting
    requests."""
    oldest = [one.queue.oldest(number) for number in range(CLASSES)]
    return ModelStats(
        name=one.name,
        waiting=[one.queue.length(number) for number in range(CLASSES)],
        oldest_wait_s=[0.0 if at is None else max(0.0, now - at) for at in oldest],
        resuming=len(one.resumed) + len(one.stranded),
        running=one.running,
        overload_step=one.shedder.step,
    )


def overload(models: Iterable[ModelTraffic]) -> tuple[str, int]:
    """Return a description of all models' overloads, and the highest load-shedding step reached."""
    steps = [(model.shedder.step, f"{model.name}: {model.shedder.reason}") for model in models]
    taken = [(step, words) for step, words in steps if step]
    return "; ".join(words for _, words in taken), max((step for step, _ in taken), default=0)


def classes(models: Iterable[ModelTraffic], now: float) -> list[ClassStatus]:
    """Return each class's status, combined over all models. The waiting time is the longest among the
    models."""
    known = list(models)
    waits_s = [model.waits_s(now) for model in known]
    statuses = []
    for number, name in enumerate(CLASS_NAMES):
        oldest = [at for model in known if (at := model.queue.oldest(number)) is not None]
        target_s = known[0].rules.target_s(number) if known else float("inf")
        statuses.append(
            ClassStatus(
                name=name,
                waiting=sum(model.queue.length(number) for model in known),
                oldest_wait_s=max(0.0, now - min(oldest)) if oldest else 0.0,
                expected_wait_s=max(
                    (wait for one in waits_s if (wait := one[number]) is not None), default=None
                ),
                target_s=None if target_s == float("inf") else target_s,
            )
        )
    return statuses


def usage(tenants: Tenants, scope: QuotaScope, name: str, kv_tokens: Mapping[str, int]) -> list[LimitUsage]:
    """Return a tenant's or key's usage of its limits on waiting and running requests. `kv_tokens` is the KV
    cache capacity by model."""
    quota, use = tenants.quota_of(scope, name)
    found = [
        ("concurrent_requests", quota.concurrent_requests, use.running),
        ("queued_requests", quota.queued_requests, use.queued),
    ]
    if quota.kv_share is not None and kv_tokens:
        share = {model: use.kv_tokens.get(model, 0) / max(1, total) for model, total in kv_tokens.items()}
        fullest = max(share, key=lambda model: share[model])
        most = int(quota.kv_share * kv_tokens[fullest])
        found.append(("kv_share", most, use.kv_tokens.get(fullest, 0)))
    return [
        LimitUsage(limit=limit, capacity=most, used=used, held=used, resets_in_s=None)
        for limit, most, used in found
        if most is not None
    ]
