"""Describes an action's current impact, for its dialog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from appliance.actions import Action
from appliance.history.forecasts import QuotaForecast
from appliance.protocol import Key, ModelStatus, NewKey, Silence
from appliance.snapshot import Snapshot, UnfinishedRequest
from console import units
from console.context import Context
from console.fingerprints import (
    Fingerprint,
    alerts_of,
    fingerprint,
    is_drained,
    registered,
    silence_with,
    silenced_alerts,
)
from console.present import present_values
from console.target_state import state_lines, unlisted

_SHOWN_TENANTS = 3
"""Number of tenant forecasts that fit in a 24-line dialog."""


class Impact:
    """An action's impact, shown and kept up to date in its dialog."""

    def __init__(
        self, action: Action, context: Callable[[], Context], problem: Callable[[], str] = str
    ) -> None:
        """`context` returns the latest known state. `problem` returns why this state is out of date, or an
        empty string if it is current."""
        self._action = action
        self._context = context
        self._problem = problem
        self._shown: dict[str | None, Fingerprint] = {}
        """Each target's state when the operator first saw the action's impact on it."""

    def lines(self, target: str | None) -> list[str]:
        """Describe what the action affects: requests, tokens, tenants and memory."""
        context = self._context()
        now = fingerprint(self._action, target, context)
        before = self._shown.setdefault(target, now)
        if before.listed is None or not before.observed:
            self._shown[target] = Fingerprint(before.observed or now.observed, now.listed)
        problem = self._problem()
        return [
            *([f"not up to date: {problem}"] if problem else []),
            *state_lines(self._action, target, context),
            *impact(self._action, target, context),
        ]

    def present(self, target: str | None) -> Mapping[str, Any]:
        """Return the current values of the action's parameters."""
        return present_values(self._action, target, self._context())

    def changes(self, target: str | None) -> str:
        """Describe what has changed in the target's state since the previous call or, on the first call,
        since the operator first saw the impact. Return an empty string if nothing has changed."""
        now = fingerprint(self._action, target, self._context())
        changes = self._shown.get(target, now).changes(now)
        self._shown[target] = now
        return f"{changes}: review the impact and confirm again" if changes else ""


def impact(action: Action, target: str | None, context: Context) -> list[str]:
    """Describe what the action affects: requests, tokens, tenants and memory."""
    snapshot = context.snapshot
    if snapshot is None:
        return ["current load unknown: no data received from the service yet"]
    match action.target:
        case "request":
            return _request(action, target, snapshot)
        case "model":
            return _model(action, target or "", context, snapshot)
        case "tenant" | "key" if target:
            return _caller(action, target, context, snapshot)
        case "rule":
            count = sum(alert.state != "resolved" for alert in alerts_of(target, snapshot))
            return [f"{count} active alert{'' if count == 1 else 's'} for this rule"]
        case "silence":
            return _silence(silence_with(target, context), snapshot)
        case "alert":
            found = [one for one in snapshot.alerts if one.id == target]
            lines = [
                f"{units.about(one.where, one.description)} ({one.severity}, {one.state})" for one in found
            ]
            if any(one.state == "resolved" for one in found):
                lines.append("the service will refuse this action: the alert has ended")
            return lines
    return []


def _caller(action: Action, target: str, context: Context, snapshot: Snapshot) -> list[str]:
    """Describe what an action on a tenant or key affects. Warn if the screens do not list the target."""
    if action.target == "tenant":
        requests = [one for one in snapshot.requests if one.tenant == target]
        tenant = next((one for one in snapshot.tenants if one.name == target), None)
        if action.impact == "remove" and tenant is not None and (tenant.keys or tenant.peers):
            keys = units.counted(tenant.keys, "valid key")
            return [
                f"{keys} and {units.count(tenant.peers)} mapped users or groups",
                "the service will refuse this action: revoke the keys and remove the mappings first",
            ]
        is_listed = tenant is not None
    else:
        requests = [one for one in snapshot.requests if one.key_id == target]
        is_listed = "callers" not in context.rows or any(
            one.id == target for one in context.rows_of("callers", Key)
        )
    if is_listed:
        return [] if action.impact in ("none", "resume") else _load(requests)
    return [unlisted(action.target, target), *(_load(requests) if requests else [])]


def _silence(silence: Silence | None, snapshot: Snapshot) -> list[str]:
    """Describe what ending a silence affects."""
    if silence is None:
        return []
    count = len(silenced_alerts(silence, snapshot))
    by = silence.created_by + (f" ({silence.reason})" if silence.reason else "")
    return [
        f"rule {silence.rule} on {silence.subject} until {units.date(silence.until)}, by {by}",
        f"this silence currently covers {count} active alert{'' if count == 1 else 's'}",
    ]


def _request(action: Action, target: str | None, snapshot: Snapshot) -> list[str]:
    one = next((one for one in snapshot.requests if one.request_id == target), None)
    if one is None:
        return [] if action.impact == "none" else [f"request {target} has ended"]
    done = f"{units.count(one.generated_tokens)} output tokens"
    lines = [f"tenant {one.tenant}, model {one.model}, age {units.seconds(one.age_s)}, {done}"]
    if action.impact == "none":
        return lines
    if one.phase == "queued":
        return [*lines, "waiting in the queue: uses no KV blocks"]
    cache = next((cache for cache in snapshot.kv if cache.replica == one.replica), None)
    block_bytes = None if cache is None else units.ratio(cache.kv_bytes, cache.blocks_total)
    size = None if block_bytes is None or one.blocks is None else block_bytes * one.blocks
    # Blocks shared with other requests stay in use.
    return [*lines, f"frees up to {units.count(one.blocks)} KV blocks ({units.size(size)})"]


def _model(action: Action, target: str, context: Context, snapshot: Snapshot) -> list[str]:
    """Describe what an action on the model `target` affects. An empty `target` means all models."""
    if action.impact == "resume":
        held = [one for one in snapshot.drains if is_drained(target, one.model, context)]
        counts = [units.counted(one.held, "held request") for one in held]
        return [f"{count} will be served first" for count in counts] or ["not draining"]
    if action.impact == "requests":
        return _load([one for one in snapshot.requests if one.model == target])
    models = _loaded(action, target, context, snapshot)
    if action.impact == "suspend":
        requests = _requests_of(models, target, context, snapshot) if target else snapshot.requests
        return _load(requests, _end(models if target else snapshot.models, snapshot))
    if action.impact in ("unload", "sleep", "replace"):
        load = _load(_requests_of(models, target, context, snapshot), _end(models, snapshot))
        return [*_versions(action, target, context), *load, _freed(action, models)]
    if action.impact == "remove":
        loaded = [one.name for one in models]
        if loaded:
            return [
                f"loaded: {', '.join(loaded)}",
                "the service will refuse this action: unload the model first",
            ]
        return ["not loaded: no requests are affected and no memory is freed"]
    return []


def _versions(action: Action, target: str, context: Context) -> list[str]:
    """Describe how a model's default version changes."""
    name, _, version = target.partition("@")
    entry = registered(name, context)
    if entry is None or action.impact != "replace":
        return []
    after = version if action.is_version_required else entry.previous
    return [f"default version: {entry.default} → {after or units.UNKNOWN}"]


def _loaded(action: Action, target: str, context: Context, snapshot: Snapshot) -> list[ModelStatus]:
    """Return the loaded models that an action affects. Versions in the registry are loaded as NAME@VERSION.
    NAME means the default version, or all versions if `action` removes them."""
    name, _, version = target.partition("@")
    if version and action.impact != "replace":
        return [one for one in snapshot.models if one.name == target]
    entry = registered(name, context)
    name = name if entry is None else entry.name
    found = [one for one in snapshot.models if one.name == name or one.name.startswith(f"{name}@")]
    if entry is not None and action.impact != "remove":
        found = [one for one in found if one.name in (name, f"{name}@{entry.default}")]
    return [one for one in found if not (version and one.name == target)]


def _requests_of(
    models: Iterable[ModelStatus], target: str, context: Context, snapshot: Snapshot
) -> list[UnfinishedRequest]:
    """Return the requests running on these models' replicas, and the requests waiting for these models under
    any of their names."""
    models = list(models)
    replicas = {replica.name for model in models for replica in model.replicas}
    names = {target, *(model.name for model in models)}
    for model in models:
        name, _, version = model.name.partition("@")
        entry = registered(name, context)
        if entry is None or version in ("", str(entry.default)):
            names |= {name, *(entry.aliases if entry is not None else ())}
    return [
        one for one in snapshot.requests if (one.replica in replicas if one.replica else one.model in names)
    ]


def _load(requests: list[UnfinishedRequest], consequences: list[str] | None = None) -> list[str]:
    """Describe the number, tenants and tokens of requests. If there are requests, add the lines in
    `consequences`."""
    if not requests:
        return ["no running or queued requests are affected"]
    tenants = sorted({one.tenant for one in requests})
    tokens = [one.generated_tokens for one in requests if one.phase != "queued"]
    known = sum(token for token in tokens if token is not None)
    generated = units.UNKNOWN if None in tokens else f"{known:,}"
    names = ", ".join(tenants[:5]) + (f" and {len(tenants) - 5} more" if len(tenants) > 5 else "")
    queued = sum(one.state == "queued" for one in requests)
    return [
        f"{len(requests) - queued:,} running and {queued:,} queued requests from {len(tenants)} "
        f"tenant{'s' if len(tenants) > 1 else ''}: "
        f"{names}",
        f"{generated} output tokens generated so far",
        *(consequences or []),
    ]


def _end(models: list[ModelStatus], snapshot: Snapshot) -> list[str]:
    """Describe when these models' unfinished requests are expected to end if no more are accepted. The models
    are assumed to work in parallel."""
    etas = [one.drain_eta_s for one in models]
    known = [eta for eta in etas if eta is not None]
    if not known or len(known) < len(etas):
        return [f"expected end: {units.UNKNOWN} (model rates have not been measured yet)"]
    return [f"expected end: in {units.seconds(max(known))}, at {units.clock(snapshot.at + max(known))}"]


def _freed(action: Action, models: list[ModelStatus]) -> str:
    """Describe the memory that these models' replicas would release. Replicas report totals over their
    ranks."""
    replicas = [replica for model in models for replica in model.replicas]
    awake = [one for one in replicas if one.state != "sleeping"]
    host_bytes = sum(one.host_bytes for one in replicas)
    if not replicas:
        return "not loaded: no memory is freed"
    if not awake and action.impact == "sleep":
        return "already asleep: no memory is freed"
    parts = []
    if awake:
        for name, title in (("weight_bytes", "weights"), ("kv_bytes", "KV cache")):
            sizes = [getattr(one, name) for one in awake]
            parts.append(f"{units.size(sum(sizes) if all(sizes) else None)} {title}")
    if host_bytes and action.impact != "sleep":
        parts.append(f"{units.size(host_bytes)} host memory")
    of = f"{len(replicas)} replica{'' if len(replicas) == 1 else 's'}"
    return f"frees {' + '.join(parts) or units.UNKNOWN} of {of}"


def result_lines(result: msgspec.Struct) -> list[str]:
    """Return a result's fields as lines, omitting unknown and empty values."""
    lines = _fields(result, "")
    return [*lines, "The key is shown only once: save it now."] if isinstance(result, NewKey) else lines


def _fields(result: msgspec.Struct, indent: str) -> list[str]:
    lines = []
    inner = f"{indent}  "
    for name, value in msgspec.structs.asdict(result).items():
        title = f"{indent}{name.replace('_', ' ')}:"
        if value is None or value == "":
            continue
        if isinstance(value, msgspec.Struct):
            lines += [title, *_fields(value, inner)]
        elif isinstance(value, list):
            lines.append(title if value else f"{title} none")
            for one in value:
                lines += _fields(one, inner) if isinstance(one, msgspec.Struct) else [f"{inner}{one}"]
        elif isinstance(value, float) and name.endswith(("_at", "until")):
            lines.append(f"{title} {units.date(value)}")
        else:
            first, *more = str(value).split("\n")
            lines += [f"{title} {first}", *(f"{inner}{one}" for one in more)]
    return lines


def forecast_lines(forecast: QuotaForecast, concerned: str | None) -> list[str]:
    """Describe what the new limits would have changed: rejections avoided or added, and other tenants'
    latency. `concerned` is the tenant whose limits change, if known."""
    minutes = max(1, round((forecast.until - forecast.since) / 60))
    requests = units.counted(forecast.requests, "request")
    lines = [f"replay of {requests} (last {minutes} min), recorded → with the new limits:"]
    changed = [one for one in forecast.tenants if one.tenant == concerned or one.predicted != one.recorded]
    for one in sorted(changed, key=lambda one: one.tenant != concerned)[:_SHOWN_TENANTS]:
        before, after = one.recorded, one.predicted
        rejected, predicted = (each.over_quota + each.refused for each in (before, after))
        added = predicted - rejected
        change = f"{units.count(abs(added))} {'more' if added > 0 else 'fewer'}" if added else "unchanged"
        ttft = _latency_change(before.ttft_p99_ms, after.ttft_p99_ms)
        e2e = _latency_change(before.e2e_p99_ms, after.e2e_p99_ms)
        lines.append(
            f"{one.tenant}: rejections {units.count(rejected)} → {units.count(predicted)} ({change})"
        )
        lines.append(f"  p99 TTFT {ttft}, p99 E2E {e2e}")
    if not forecast.requests:
        lines.append("no requests to replay: the effect is unknown")
    elif not changed:
        lines.append("no change for any tenant")
    if len(changed) > _SHOWN_TENANTS:
        more = len(changed) - _SHOWN_TENANTS
        lines.append(f"for {more} more tenants: run appliance tenants set NAME … --what-if")
    if forecast.left_out:
        left_out = units.counted(forecast.left_out, "request")
        lines.append(f"not replayed: {left_out} (invalid, or no ready replica has a known speed)")
    return lines


def _latency_change(before: float | None, after: float | None) -> str:
    """Format two latencies, given in milliseconds, and their difference."""
    text = f"{units.ms(before)} → {units.ms(after)}"
    if before is None or after is None:
        return text
    return f"{text} ({'-' if after < before else '+'}{units.ms(abs(after - before))})"
