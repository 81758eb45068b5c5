"""Synthetic histories for tests of alerts: one sample per second of a small service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.evaluation import Evaluator, Transition
from store.samples import Splitter, TelemetrySample

START = 1_800_000_000.0
Change = Callable[[int, dict[str, Any]], None]
"""Changes the tree of measured values for one second."""


def quiet_service(models: int = 1, replicas: int = 2) -> dict[str, Any]:
    """Return the tree of measured values of a service that is working normally."""
    names = [(f"model-{model}", f"model-{model}-{one}") for model in range(models) for one in range(replicas)]
    return {
        "at": START,
        "queue": {
            "waiting": 0,
            "running": 4,
            "limit": 100,
            "overload_step": 0,
            "classes": [
                {"name": f"P{n}", "oldest_wait_s": 0.0, "target_s": 1.0 + n if n < 3 else None}
                for n in range(4)
            ],
        },
        "rates": {
            "requests_per_s": 4.0,
            "failed_per_s": 0.0,
            "refused_per_s": 0.0,
            "prompt_tokens_per_s": 900.0,
        },
        "latency": {"ttft": {"p50_ms": 80.0}, "itl": {"p50_ms": 12.0}},
        "batches": [],
        "kv": [
            {"model": model, "replica": name, "blocks_total": 1000, "blocks_used": 200, "preemptions": 0}
            for model, name in names
        ],
        "gpus": [
            {
                "number": number,
                "replicas": [name],
                "temperature_c": 60.0,
                "ecc_uncorrected": 0,
                "last_xid": 0,
                "throttle_reasons": [],
            }
            for number, (_, name) in enumerate(names)
        ],
        "models": [
            {
                "name": f"model-{model}",
                "state": "ready",
                "replicas": [
                    {"name": name, "state": "ready", "restarts": 0, "last_error": ""}
                    for owner, name in names
                    if owner == f"model-{model}"
                ],
            }
            for model in range(models)
        ],
        "tenants": [
            {
                "name": name,
                "running": 2,
                "waiting": 0,
                "usage": [{"limit": "tokens_per_day", "capacity": 1000, "used": 100}],
            }
            for name in ("acme", "beta")
        ],
        "host": {
            "disk_bytes": 1 << 40,
            "disk_free_bytes": 1 << 39,
            "memory_bytes": 1 << 37,
            "memory_used_bytes": 1 << 35,
        },
        "drains": [],
        "fronts": [{"name": "front-0", "state": "ready"}],
        "current_problems": [],
        "audit_rows": 10,
        "gpu_error": "",
    }


def history(seconds: int, change: Change, **service: int) -> Iterator[TelemetrySample]:
    """Yield samples of a service to which `change` is applied in each second."""
    splitter = Splitter()
    # Decoding the tree again for each second takes far less time than a deep copy.
    normal = msgspec.msgpack.encode(quiet_service(**service))
    for second in range(seconds):
        tree = msgspec.msgpack.decode(normal)
        tree["at"] = START + second
        change(second, tree)
        yield splitter.split(START + second, tree)


def transitions(
    rules: Iterable[AlertRule], samples: Iterable[TelemetrySample]
) -> list[tuple[int, str, str, str]]:
    """Return the alert rules' transitions as tuples (time in seconds, event, rule, subject)."""
    return [summary(one) for one in evaluate(list(rules), samples)]


def summary(one: Transition) -> tuple[int, str, str, str]:
    """Return a transition as a tuple (time in seconds, event, rule, subject)."""
    return round(one.at - START), one.event, one.alert.rule, one.alert.subject


def evaluate(rules: Sequence[AlertRule], samples: Iterable[TelemetrySample]) -> Iterator[Transition]:
    """Yield the alert rules' transitions over a history."""
    evaluator = Evaluator(rules)
    for sample in samples:
        yield from evaluator.step(sample)
