"""Classes of service: what a client may ask for, and what it gets."""

from __future__ import annotations

from appliance.messages import Identity

CLASS_NAMES = ("P0", "P1", "P2", "P3")
"""Real-time, interactive, batch, background."""

_ASKED = {name: number for number, name in enumerate(CLASS_NAMES)} | {"priority": 0, "flex": 2}
"""Our names, and OpenAI's service tiers; its "auto", "default" and "scale" ask for nothing in particular."""


def service_class(asked: str, identity: Identity) -> int:
    """The class of a request whose client asked so: the tenant's default where it asked for none, and never
    better than its tenant and key allow. Anybody may ask for less."""
    return max(_ASKED.get(asked, identity.default_class), identity.highest_class)
