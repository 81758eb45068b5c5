"""Finds the likely cause of an alert among the changes that preceded it. Changes are derived from samples, so
causes can also be found in the recorded history."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from appliance.monitoring.alerts.conditions import Condition
from appliance.monitoring.alerts.selection import Scope, related, subject
from store.samples import TelemetryLayout, TelemetrySample

WINDOW_S = 300.0
"""A change can be the cause of alerts raised up to this many seconds later."""
_KEEP_EVERY_S = 10.0
_LOAD = (
    ("rates.requests_per_s", "requests per second"),
    ("rates.prompt_tokens_per_s", "prompt tokens per second"),
    ("queue.running", "running requests"),
)
"""Load metrics, and their names in alert texts."""
_LOAD_FACTOR = 2.0
"""Load that has grown by at least this factor is a likely cause."""
_TENANT_SHARE = 0.5
"""If one tenant has more than this share of the running and waiting requests, the text names the tenant."""
_STATE = re.compile(r"(?:models\[[^\]]*\]\.replicas|fronts)\[([^\]]*)\]\.(state|last_error)")
_THROTTLE = re.compile(r"gpus\[([^\]]*)\]\.throttle_reasons\[\d+\]")
_DRAIN = re.compile(r"drains\[([^\]]*)\]\.state")
_XID = re.compile(r"gpus\[([^\]]*)\]\.last_xid")


class _Change(NamedTuple):
    """A change that may have caused alerts."""

    at: float
    rank: int
    """A change with a lower rank is a more likely cause."""
    text: str
    scope: Scope
    is_clock_reduction: bool = False
    """Whether the change is a GPU clock reduction. It is never reported as the cause of a GPU alert, because
    the alert's condition, such as a high temperature, is what causes the reduction."""


class CauseFinder:
    """Collects changes and finds the one that most likely caused an alert."""

    def __init__(self) -> None:
        self._changes: deque[_Change] = deque()
        self._samples: deque[TelemetrySample] = deque()
        """Samples of the last `WINDOW_S` seconds, about `_KEEP_EVERY_S` seconds apart."""
        self._latest: TelemetrySample | None = None

    def observe(self, sample: TelemetrySample) -> None:
        """Record what has changed since the previous sample."""
        if self._latest is not None:
            self._changes.extend(_changes(self._latest, sample))
        self._latest = sample
        if not self._samples or sample.at - self._samples[-1].at >= _KEEP_EVERY_S:
            self._samples.append(sample)
        for old in (self._changes, self._samples):
            while old and old[0].at < sample.at - WINDOW_S:
                old.popleft()

    def find(self, condition: Condition) -> str:
        """Return a one-line description of the likely cause of an alert raised by the latest sample."""
        assert self._latest is not None
        at = self._latest.at
        is_gpu = condition.rule.metric.startswith("gpus[")
        known = [
            change
            for change in self._changes
            if related(change.scope, condition.scope) and not (is_gpu and change.is_clock_reduction)
        ]
        if known:
            best = min(known, key=lambda change: (change.rank, -change.at))
            return f"{best.text} {_ago(at - best.at)}"
        if (load := self._load()) is not None:
            return load
        return f"nothing else changed within the {(at - self._samples[0].at) / 60:.0f} min before the alert"

    def _load(self) -> str | None:
        assert self._latest is not None
        for metric, name in _LOAD:
            now, before = self._latest.value(metric), self._samples[0].value(metric)
            if now is None or before is None or now < 1 or now < before * _LOAD_FACTOR:
                continue
            text = f"{name} rose from {before:,.3g} to {now:,.3g}"
            tenant = _largest_tenant(self._latest)
            return f"{text}, mostly from tenant {tenant}" if tenant else text
        return None


def _changes(before: TelemetrySample, after: TelemetrySample) -> Iterator[_Change]:
    if before.layout is not after.layout:
        yield from _text_changes(after.at, before.layout, after.layout)
    for name, position in _watched(after.layout).items():
        was, now = before.value(name), after.numbers[position]
        if was is None or now != now or now == was:
            continue
        if name == "audit_rows":
            rows = f"row {now:.0f}" if now == was + 1 else f"rows {was + 1:.0f} to {now:.0f}"
            yield _Change(after.at, 3, f"an operator's action (see audit {rows})", frozenset())
        elif (found := _XID.fullmatch(name)) is not None and now:
            yield _Change(
                after.at, 0, f"GPU {found[1]} reported Xid {now:.0f}", subject(after.layout, name)[1]
            )


def _watched(layout: TelemetryLayout) -> dict[str, int]:
    """Return the indices, by metric name, of the metrics that change only when an event occurs."""
    names = ["audit_rows", *(f"gpus[{number}].last_xid" for number in range(16))]
    return {name: layout.metrics[name] for name in names if name in layout.metrics}


def _text_changes(at: float, before: TelemetryLayout, after: TelemetryLayout) -> Iterator[_Change]:
    was = before.texts
    for name, text in after.texts.items():
        if was.get(name) == text or not text:
            continue
        if (found := _STATE.fullmatch(name)) is not None:
            if found[2] == "last_error":
                yield _Change(at, 1, f"{found[1]} ended: {text}", subject(after, name)[1])
            elif name in was and text in ("restarting", "failed", "silent"):
                yield _Change(at, 2, f"{found[1]} became {text}", subject(after, name)[1])
        elif (found := _THROTTLE.fullmatch(name)) is not None:
            description, scope = f"GPU {found[1]} reduced its clocks ({text})", subject(after, name)[1]
            yield _Change(at, 2, description, scope, is_clock_reduction=True)
        elif (found := _DRAIN.fullmatch(name)) is not None and name not in was:
            model = after.texts.get(f"drains[{found[1]}].model")
            description = f"model {model}" if model else "the service"
            yield _Change(
                at, 2, f"a drain of {description} began", frozenset({("model", model)} if model else ())
            )


def _largest_tenant(sample: TelemetrySample) -> str:
    """Return the tenant with more than `_TENANT_SHARE` of the requests. Return an empty string if there is no
    such tenant, or if only one tenant has requests."""
    requests: dict[str, float] = {}
    for name in sample.layout.metrics:
        if name.startswith("tenants[") and name.endswith(("].running", "].waiting")):
            tenant = name[len("tenants[") : name.rindex("]")]
            requests[tenant] = requests.get(tenant, 0.0) + (sample.value(name) or 0.0)
    total = sum(requests.values())
    if len(requests) < 2 or not total:
        return ""
    largest = max(requests, key=lambda tenant: requests[tenant])
    return largest if requests[largest] > total * _TENANT_SHARE else ""


def _ago(seconds: float) -> str:
    return "at the same time" if seconds < 1.5 else f"{seconds:.0f} s before"
