"""Warnings for action dialogs: the target does not exist, or is already in the state that the action would
bring about."""

from __future__ import annotations

from appliance.actions import Action
from appliance.protocol import Key, PeerMapping
from appliance.snapshot import Snapshot
from console import units
from console.context import Context
from console.fingerprints import is_drained, peer_name, registered, silence_with


def state_lines(action: Action, target: str | None, context: Context) -> list[str]:
    """Return warnings about the target's state."""
    snapshot = context.snapshot
    if snapshot is None:
        return []
    match action.target:
        case "model":
            return _model(action, target or "", context, snapshot)
        case "tenant":
            return _tenant(action, target, snapshot)
        case "key" if target and "callers" in context.rows:
            return _key(target, context, snapshot)
        case "peer" if not action.creates_object and target and "callers" in context.rows:
            peers = context.rows_of("callers", PeerMapping)
            return [] if any(peer_name(one) == target for one in peers) else [unlisted("mapping", target)]
        case "silence" if target and "silences" in context.rows:
            return [] if silence_with(target, context) else [unlisted("silence", target)]
        case "alert" if target:
            return [] if any(one.id == target for one in snapshot.alerts) else [unlisted("alert", target)]
    return []


def unlisted(kind: str, name: str) -> str:
    """Return a warning that the target is not listed."""
    return f"no {kind} {name} is listed: check the name"


def _model(action: Action, target: str, context: Context, snapshot: Snapshot) -> list[str]:
    name = target.partition("@")[0]
    is_known = registered(name, context) is not None or any(
        one.name.partition("@")[0] == name for one in snapshot.models
    )
    if name and not is_known and "models" in context.rows and not action.creates_object:
        return [unlisted("model", name)]
    if action.impact != "suspend":
        return []
    return [
        f"already draining, grace left {units.seconds(one.grace_left_s)}"
        for one in snapshot.drains
        if is_drained(target, one.model, context)
    ]


def _tenant(action: Action, target: str | None, snapshot: Snapshot) -> list[str]:
    tenant = next((one for one in snapshot.tenants if one.name == target), None)
    if tenant is None:
        return []
    if action.impact == "suspend" and tenant.suspended_at is not None:
        return [f"already suspended since {units.date(tenant.suspended_at)}"]
    if action.impact == "resume":
        since = tenant.suspended_at
        return ["not suspended" if since is None else f"suspended since {units.date(since)}"]
    return []


def _key(target: str, context: Context, snapshot: Snapshot) -> list[str]:
    key = next((one for one in context.rows_of("callers", Key) if one.id == target), None)
    if key is None or key.valid_at(snapshot.at):
        return []
    if key.revoked_at is not None:
        return [f"already revoked at {units.date(key.revoked_at)}"]
    return [f"expired at {units.date(key.expires_at)}"]
