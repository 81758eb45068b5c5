"""Detects changes to an action's target while the action's dialog is open."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from appliance.actions import Action
from appliance.protocol import Key, PeerMapping, Silence, Tenant
from appliance.protocol.registry import RegisteredModel
from appliance.snapshot import Alert, Snapshot, TenantUse
from console import units
from console.context import Context
from console.source import ListName

Facts = dict[str, str]
_NOT_COMPARED = {"id", "prefix", "created_at", "usage"}
"""Fields of an API key that operators cannot change."""
_TENANT_SETTINGS = (
    "default_class",
    "default_max_tokens",
    "cache_group",
    "log_policy",
    "log_days",
    "burst_s",
    "context_tokens",
    "kv_share",
)
"""Tenant fields that are not in snapshots."""
_TIMES = ("expires_at", "revoked_at")
_SHOWN_CHANGES = 3
"""Maximum number of changes that fit in a 24-line dialog."""


class Fingerprint(NamedTuple):
    """The part of a target's state that matters when an operator confirms an action."""

    observed: Facts
    """The target's state in the snapshot, as facts keyed by name."""
    listed: Facts | None
    """Fields from the lists returned by `required_lists`, such as the list of keys. None if the lists have
    not been read."""

    def changes(self, later: Fingerprint) -> str:
        """Describe the changes from this fingerprint to a later one. Return an empty string if there are
        none."""
        found = _changes(self.observed, later.observed)
        if self.listed is not None and later.listed is not None:
            found += _changes(self.listed, later.listed)
        more = len(found) - _SHOWN_CHANGES
        return ", ".join(found[:_SHOWN_CHANGES]) + (f" and {more} more" if more > 0 else "")


def required_lists(action: Action) -> tuple[ListName, ...]:
    """Return the names of the lists that describe an action's targets in more detail than the snapshot
    does."""
    match action.target:
        case "model":
            return ("models",)
        case "tenant" if action.named_by == "name":
            return ("tenants",)
        case "key" | "peer":
            return ("callers",)
        case "silence":
            return ("silences",)
    return ()


def registered(name: str, context: Context) -> RegisteredModel | None:
    """Return the model with this name or alias, if the model list has been read."""
    models = context.rows_of("models", RegisteredModel)
    found = next((one for one in models if one.name == name), None)
    return found or next((one for one in models if name in one.aliases), None)


def alerts_of(rule: str | None, snapshot: Snapshot) -> list[Alert]:
    """Return the alerts with rule names that match the pattern `rule`, or all alerts if it is empty."""
    return [one for one in snapshot.alerts if fnmatchcase(one.rule, rule or "*")]


def peer_name(peer: PeerMapping) -> str:
    """Return the name that commands use for a mapped user or group, such as "uid:1000" or "any"."""
    return "any" if peer.kind == "any" else f"{peer.kind}:{peer.number}"


def silenced_alerts(silence: Silence, snapshot: Snapshot) -> list[Alert]:
    """Return the active alerts matched by a silence."""
    return [
        one
        for one in alerts_of(silence.rule, snapshot)
        if one.state != "resolved" and fnmatchcase(one.where, silence.subject)
    ]


def silence_with(silence_id: str | None, context: Context) -> Silence | None:
    """Return the silence with this id, if the silences have been read."""
    return next((one for one in context.rows_of("silences", Silence) if one.id == silence_id), None)


def is_drained(target: str, drained: str | None, context: Context) -> bool:
    """Return whether `target` refers to the model that is being drained, `drained`. For the whole service,
    `target` is empty and `drained` is None. A name or alias also matches the version that serves its
    requests."""
    model = registered(target, context)
    names = {target} if model is None else {target, model.name, f"{model.name}@{model.default}"}
    return (drained or "") in (names if target else {""})


def fingerprint(action: Action, target: str | None, context: Context) -> Fingerprint:
    """Return the target's fingerprint."""
    snapshot = context.snapshot
    if snapshot is None:
        return Fingerprint({}, None)
    observed = {"service start": units.clock(snapshot.started_at)}
    match action.target:
        case "request":
            unfinished = any(one.request_id == target for one in snapshot.requests)
            observed["state"] = "unfinished" if unfinished else "ended"
        case "tenant":
            observed |= _tenant(next((one for one in snapshot.tenants if one.name == target), None))
        case "model":
            observed |= _model(target or "", snapshot, context)
        case "rule":
            matching = [f"{one.id} {one.state}" for one in alerts_of(target, snapshot)]
            observed["matching alerts"] = ", ".join(matching) or "none"
        case "alert":
            observed |= _alert(next((one for one in snapshot.alerts if one.id == target), None))
    read = all(name in context.rows for name in required_lists(action))
    return Fingerprint(observed, _listed(action, target, context, snapshot.at) if read else None)


def _tenant(tenant: TenantUse | None) -> Facts:
    if tenant is None:
        return {"state": "absent"}
    # The service converts the KV cache share limit to tokens of the model whose cache the tenant uses most.
    # The token count can change without any operator action, so it is not compared.
    limits = {
        one.limit.replace("_", " "): "set" if one.limit == "kv_share" else f"{one.capacity:,}"
        for one in tenant.usage
    }
    return {
        "state": "active" if tenant.suspended_at is None else "suspended",
        "weight": units.UNKNOWN if tenant.weight is None else f"{tenant.weight:g}",
        "highest class": units.UNKNOWN if tenant.highest_class is None else f"P{tenant.highest_class}",
        "valid keys": units.count(tenant.keys),
        "mapped users and groups": units.count(tenant.peers),
        **limits,
    }


def _model(target: str, snapshot: Snapshot, context: Context) -> Facts:
    draining = any(is_drained(target, one.model, context) for one in snapshot.drains)
    facts = {"admission": "draining" if draining else "accepting requests"}
    model = registered(target, context)
    name = target if model is None else model.name
    for one in snapshot.models if target else []:
        if one.name not in (target, name) and not one.name.startswith(f"{name}@"):
            continue
        prefix = "" if one.name == target else f"{one.name} "
        facts[f"{prefix}state"] = one.state
        facts[f"{prefix}version"] = one.version
        facts[f"{prefix}replicas"] = f"{len(one.replicas)}"
    return facts


def _alert(alert: Alert | None) -> Facts:
    if alert is None:
        return {"state": "absent"}
    return {
        "state": alert.state,
        "acknowledged by": alert.acknowledged_by or "none",
        "silenced until": units.date(alert.silenced_until),
    }


def _listed(action: Action, target: str | None, context: Context, now: float) -> Facts:
    match action.target:
        case "model":
            return _registered(registered((target or "").partition("@")[0], context))
        case "tenant":
            tenants = context.rows_of("tenants", Tenant)
            return _tenant_settings(next((one for one in tenants if one.name == target), None))
        case "key":
            keys = context.rows_of("callers", Key)
            return _key(next((one for one in keys if one.id == target), None), now)
        case "peer":
            mappings = context.rows_of("callers", PeerMapping)
            peer = next((one for one in mappings if peer_name(one) == target), None)
            return {"mapping": "absent" if peer is None else f"tenant {peer.tenant} from {peer.source}"}
        case "silence":
            return {"silence": "ended" if silence_with(target, context) is None else "active"}
    return {}


def _tenant_settings(tenant: Tenant | None) -> Facts:
    """Return the tenant fields that are not in snapshots."""
    if tenant is None:
        return {}
    values = msgspec.structs.asdict(tenant) | msgspec.structs.asdict(tenant.quota)
    return {name.replace("_", " "): str(values[name]) for name in _TENANT_SETTINGS}


def _registered(model: RegisteredModel | None) -> Facts:
    if model is None:
        return {"registration": "absent"}
    split = ", ".join(f"{name} {weight:g}" for name, weight in sorted(model.split.items()))
    return {
        "default version": str(model.default),
        "previous version": str(model.previous or "none"),
        "aliases": ", ".join(model.aliases) or "none",
        "split": split or "none",
        **{f"version {one.version}": one.state for one in model.versions},
    }


def _key(key: Key | None, now: float) -> Facts:
    if key is None:
        return {"key": "absent"}
    values = msgspec.to_builtins(key)
    values |= values.pop("quota")
    facts = {
        name.replace("_", " "): "none"
        if value is None
        else units.date(value)
        if name in _TIMES
        else str(value)
        for name, value in values.items()
        if name not in _NOT_COMPARED
    }
    return {"key": "valid" if key.valid_at(now) else "revoked" if key.revoked_at else "expired", **facts}


def _changes(before: Facts, after: Facts) -> list[str]:
    return [
        f"{name} changed from {before.get(name, 'none')} to {after.get(name, 'none')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
