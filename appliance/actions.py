"""The one registry of operator actions (DESIGN §8).

CLI commands, key bindings, confirmation dialogs and the audit record are derived from these entries. An
action is called by `POST /actions/NAME` on the admin socket with its parameters as JSON; `appliance.admin`
holds what each one does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from appliance.protocol import Done, NewKey

Danger = Literal["none", "confirm", "typed"]


class CreateKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make a bearer key."""

    name: str
    """What or whom it is for; for people to tell keys apart."""
    tenant: str = "default"
    """Who its requests are billed to."""
    expires_at: float | None = None
    """Unix seconds from which on it is worthless; never by default."""


class RevokeKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make a key worthless, for good."""

    id: str
    """The key's id, as `keys list` shows it."""


class CancelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """End a request now; its client gets an error."""

    request_id: str
    """As `requests` shows it."""


class Action(NamedTuple):
    """One thing that an operator can do."""

    name: str
    """As it stands in the URL and in the audit chain."""
    title: str
    """For a person, in the imperative."""
    danger: Danger
    """What to ask before: nothing, yes or no, or the name typed out."""
    parameters: type[msgspec.Struct]
    """Its fields are the parameters; their docstrings the help."""
    result: type[msgspec.Struct]


ACTIONS: tuple[Action, ...] = (
    Action("keys.create", "Create a key", "none", CreateKey, NewKey),
    Action("keys.revoke", "Revoke a key", "confirm", RevokeKey, Done),
    Action("requests.cancel", "Cancel a request", "confirm", CancelRequest, Done),
)


def action_named(name: str) -> Action:
    """Raises LookupError for a name that is not in the registry."""
    for action in ACTIONS:
        if action.name == name:
            return action
    raise LookupError(f"there is no action {name!r}: there are {', '.join(a.name for a in ACTIONS)}")


def action_of(parameters: msgspec.Struct) -> Action:
    """The action whose parameters these are. Raises LookupError."""
    for action in ACTIONS:
        if isinstance(parameters, action.parameters):
            return action
    raise LookupError(f"{type(parameters).__name__} belongs to no action")
