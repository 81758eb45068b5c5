"""The current values of an action's parameters, such as a tenant's limits. The action's dialog shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from appliance.actions import Action
from appliance.protocol import Key, PeerMapping, Tenant
from console.context import Context
from console.fingerprints import peer_name, registered
from console.parameters import Parameter


def present_values(action: Action, target: str | None, context: Context) -> Mapping[str, Any]:
    """Return the current values of the action's parameters, by name. Values that are unknown, or not changed
    by the action, are left out."""
    match action.name:
        case "tenants.set":
            tenants = context.rows_of("tenants", Tenant)
            return _fields(next((one for one in tenants if one.name == target), None))
        case "keys.set" | "keys.rotate":
            keys = context.rows_of("callers", Key)
            return _fields(next((one for one in keys if one.id == target), None))
        case "peers.map":
            peers = context.rows_of("callers", PeerMapping)
            peer = next((one for one in peers if peer_name(one) == target), None)
            return {} if peer is None else {"tenant": peer.tenant}
        case "models.default":
            model = registered((target or "").partition("@")[0], context)
            return {} if model is None else {"model": f"{model.name}@{model.default}"}
        case "models.alias" | "models.split" | "models.shadow":
            return _routing(action, target or "", context)
    return {}


def _fields(record: Tenant | Key | None) -> Mapping[str, Any]:
    """Return the fields and limits of a tenant or key."""
    if record is None:
        return {}
    return msgspec.structs.asdict(record) | msgspec.structs.asdict(record.quota)


def _routing(action: Action, name: str, context: Context) -> Mapping[str, Any]:
    """Return which models currently serve requests for a model name."""
    model = registered(name, context)
    if model is None:
        return {}
    if action.name == "models.alias":
        return {"target": model.name} if name in model.aliases else {}
    if action.name == "models.split":
        return {"weights": model.split or None}
    shadow = next((one for one in model.shadows if one.name == name), None)
    return {"target": None} if shadow is None else {"target": shadow.target, "share": shadow.share}


def absent_text(action: Action, parameter: Parameter, present: Mapping[str, Any]) -> str:
    """Return the text to show in an empty field: the value used if the field stays empty."""
    if parameter.name in present:
        return f"now: {parameter.shown(present[parameter.name])}"
    if parameter.name == action.named_by and action.target == "model" and not parameter.required:
        return "the service"
    if parameter.required:
        return "required"
    if action.changes_fields:
        return "unchanged"
    return "none" if parameter.preset == "" else f"default: {parameter.shown(parameter.preset)}"
