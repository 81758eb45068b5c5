"""Service classes, from P0 to P3."""

from __future__ import annotations

from appliance.channel.identity import Identity
from store.fields import CLASS_NAMES

_ASKED = {name: number for number, name in enumerate(CLASS_NAMES)} | {"priority": 0, "flex": 2}
"""The service class for each class name and each OpenAI service tier. The tiers "auto", "default" and "scale"
are omitted, because they select the default class."""


def service_class(asked: str, identity: Identity) -> int:
    """Return a request's service class: the class that the client requested or, by default, the tenant's. The
    class is lowered if the tenant or the key does not permit such a high priority."""
    return max(_ASKED.get(asked, identity.default_class), identity.highest_class)
