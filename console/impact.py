"""Describes what an action would currently affect, for its dialog, and detects whether that has changed since
the dialog opened."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from appliance.actions import Action
from appliance.history.forecasts import QuotaForecast
from appliance.protocol import ModelStatus, NewKey
from appliance.snapshot import Snapshot, UnfinishedRequest
from console import units

_SHOWN_TENANTS = 3
"""Maximum number of tenants whose forecasts fit in a dialog of 24 lines."""


def impact(action: Action, target: str | None, snapshot: Snapshot | None) -> list[str]:
    """Return what the action affects: requests, tokens and tenants."""
    if snapshot is None:
        return ["current load unknown: no data received from the service yet"]
    affected = _affected(action, target, snapshot)
    if affected is None:
        return []
    if action.target == "request":
        if not affected:
            return [f"request {target} has ended"]
        one = affected[0]
        done = f"{units.count(one.generated_tokens)} output tokens"
        return [f"tenant {one.tenant}, model {one.model}, age {units.seconds(one.age_s)}, {done}"]
    tenant = next((one for one in snapshot.tenants if one.name == target), None)
    if action.name == "tenants.delete" and tenant is not None and (tenant.keys or tenant.peers):
        return [
            f"{units.count(tenant.keys)} valid keys and {units.count(tenant.peers)} mapped users or groups",
            "the service will refuse: revoke the keys and remove the mappings first",
        ]
    if not affected:
        return ["no running or queued requests are affected"]
    tenants = sorted({one.tenant for one in affected})
    tokens = [one.generated_tokens for one in affected]
    known = sum(token for token in tokens if token is not None)
    generated = units.UNKNOWN if None in tokens else f"{known:,}"
    ends = _drain_end(target, snapshot) if action.name == "drain" else []
    names = ", ".join(tenants[:5]) + (f" and {len(tenants) - 5} more" if len(tenants) > 5 else "")
    queued = sum(one.state == "queued" for one in affected)
    return [
        f"{len(affected) - queued:,} running and {queued:,} queued requests of {len(tenants)} "
        f"tenant{'s' if len(tenants) > 1 else ''}: "
        f"{names}",
        f"{generated} output tokens generated so far",
        *ends,
    ]


def _drain_end(model: str | None, snapshot: Snapshot) -> list[str]:
    """Return when a drain that begins now would end. The models finish their requests at the same time."""
    etas = [one.drain_eta_s for one in snapshot.models if model in (None, "", one.name)]
    known = [eta for eta in etas if eta is not None]
    if not known or len(known) < len(etas):
        return [f"expected end: {units.UNKNOWN} (the rates of the models have not been measured yet)"]
    return [f"expected end: in {units.seconds(max(known))}, at {units.clock(snapshot.at + max(known))}"]


def watch(action: Action, target: str | None, snapshot: Callable[[], Snapshot | None]) -> Callable[[], str]:
    """Return a function that checks whether the target's state has changed since the previous check. That
    function returns a message if the state has changed, and an empty string otherwise."""
    before = _fingerprint(action, target, snapshot())

    def check() -> str:
        nonlocal before
        after = _fingerprint(action, target, snapshot())
        if after == before:
            return ""
        text = f"state changed from {before} to {after}: review the impact and confirm again"
        before = after
        return text

    return check


def _affected(action: Action, target: str | None, snapshot: Snapshot) -> list[UnfinishedRequest] | None:
    """Return the affected requests, or None if the action does not affect requests."""
    if action.name == "drain":
        return [one for one in snapshot.requests if target in (None, "", one.model)]
    match action.target:
        case "request":
            return [one for one in snapshot.requests if one.request_id == target]
        case "tenant" if action.name != "tenants.create":
            return [one for one in snapshot.requests if one.tenant == target]
        case "key":
            return [one for one in snapshot.requests if one.key_id == target]
    return None


def _fingerprint(action: Action, target: str | None, snapshot: Snapshot | None) -> str:
    """Return the part of the target's state on which the operator's decision depends."""
    if snapshot is None:
        return units.UNKNOWN
    if action.target == "request":
        return "unfinished" if any(one.request_id == target for one in snapshot.requests) else "ended"
    if action.target == "tenant":
        tenant = next((one for one in snapshot.tenants if one.name == target), None)
        return "absent" if tenant is None else "active" if tenant.suspended_at is None else "suspended"
    if action.target == "model":
        return _drained(target, snapshot) + _version(target, snapshot.models)
    return f"service started at {snapshot.started_at:.0f}"


def _drained(target: str | None, snapshot: Snapshot) -> str:
    drain = next((one for one in snapshot.drains if one.model == (target or None)), None)
    return "accepting requests" if drain is None else "draining"


def _version(target: str | None, models: list[ModelStatus]) -> str:
    model = next((one for one in models if one.name == target), None)
    return "" if model is None else f" with version {model.version}"


def result_lines(result: msgspec.Struct) -> list[str]:
    """Return a result's fields as lines."""
    lines = []
    for name, value in msgspec.structs.asdict(result).items():
        if value is not None:
            lines.append(f"{name}: {units.date(value) if name.endswith(('_at', '_until')) else value}")
    return [*lines, "The key is shown only once: save it now."] if isinstance(result, NewKey) else lines


def forecast_lines(forecast: QuotaForecast, concerned: str | None) -> list[str]:
    """Describe what the new limits would have changed: the rejections avoided or added, and the latency of
    other tenants. `concerned` is the tenant whose limits change, if known."""
    minutes = max(1, round((forecast.until - forecast.since) / 60))
    lines = [f"replay of {forecast.requests:,} requests (last {minutes} min), recorded → new limits:"]
    changed = [one for one in forecast.tenants if one.tenant == concerned or one.predicted != one.recorded]
    for one in sorted(changed, key=lambda one: one.tenant != concerned)[:_SHOWN_TENANTS]:
        before, after = one.recorded, one.predicted
        added = after.over_quota + after.refused - before.over_quota - before.refused
        rejections = f"{abs(added):,} {'more' if added > 0 else 'fewer'} rejections"
        rejections = rejections if added else "rejections unchanged"
        lines.append(
            f"{one.tenant}: {rejections}, "
            f"p99 TTFT {units.ms(before.ttft_p99_ms)} → {units.ms(after.ttft_p99_ms)}, "
            f"E2E {units.ms(before.e2e_p99_ms)} → {units.ms(after.e2e_p99_ms)}"
        )
    if not changed:
        lines.append("no change for any tenant")
    if len(changed) > _SHOWN_TENANTS:
        lines.append(f"{len(changed) - _SHOWN_TENANTS} more tenants: appliance tenants set NAME … --what-if")
    return lines
