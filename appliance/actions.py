"""The one registry of operator actions (DESIGN §8).

CLI commands, key bindings, confirmation dialogs and the audit record are derived from these entries. An
action is called by `POST /actions/NAME` on the admin socket with its parameters as JSON; `appliance.admin`
holds what each one does.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from appliance.protocol import AuditHead, Contents, Done, DrainStatus, Key, NewKey, Reloaded, Tenant

MAX_GRACE_S = 7 * 86400.0
"""Of a drain: a week."""

Danger = Literal["none", "confirm", "typed"]


class Limits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a tenant, or a key within its tenant, may use. A field that is not given stays as it is; null
    lifts the limit."""

    requests_per_minute: float | UnsetType | None = UNSET
    """Requests a minute."""
    tokens_per_minute: float | UnsetType | None = UNSET
    """Prompt and output tokens a minute."""
    tokens_per_day: float | UnsetType | None = UNSET
    """Prompt and output tokens a day, which refill all the time."""
    burst_s: float | UnsetType = UNSET
    """Seconds of the limits a minute that may be used at once."""
    concurrent_requests: int | UnsetType | None = UNSET
    """Requests that run at once; more wait."""
    queued_requests: int | UnsetType | None = UNSET
    """Requests that wait; more are refused."""
    context_tokens: int | UnsetType | None = UNSET
    """Longest request in tokens, prompt and output together."""
    kv_share: float | UnsetType | None = UNSET
    """Part of a model's KV blocks, over its replicas, that its running requests may hold, 0 to 1."""


class TenantFields(Limits, kw_only=True):
    """What is decided about a tenant."""

    weight: float | UnsetType = UNSET
    """Share of service against other tenants of the same class."""
    highest_class: int | UnsetType = UNSET
    """The best class that its requests get, 0 to 3."""
    default_class: int | UnsetType = UNSET
    """Of a request that asks for none."""
    default_max_tokens: int | UnsetType | None = UNSET
    """Output of a request that names no max_tokens; null: what the model's length leaves."""
    cache_group: str | UnsetType | None = UNSET
    """Share cached prefixes with the tenants of this group."""
    log_policy: str | UnsetType = UNSET
    """What the request log keeps of prompts and answers: metadata, hashes or full."""
    log_days: float | UnsetType | None = UNSET
    """For how many days; null: the service's retention."""


class CreateTenant(TenantFields, kw_only=True):
    """Make a tenant; what is not given is as for the built-in ones."""

    name: str
    """What it is called, for good."""


class SetTenant(TenantFields, kw_only=True):
    """Change a tenant, at once."""

    name: str
    """As `tenants list` shows it."""


class SuspendTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Serve nothing of a tenant any more; what runs goes on."""

    name: str
    """As `tenants list` shows it."""
    cancel: bool = False
    """End what runs and waits as well."""


class ResumeTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Serve a suspended tenant again."""

    name: str
    """As `tenants list` shows it."""


class DeleteTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Remove a tenant that no valid key and no peer stands for."""

    name: str
    """As `tenants list` shows it."""


class KeyRights(Limits, kw_only=True):
    """What a key opens, within what its tenant may."""

    scopes: list[str] | UnsetType = UNSET
    """Of inference (the API of models), admin (every operator action) and read (looking at the service)."""
    models: list[str] | UnsetType | None = UNSET
    """The only models that it opens; null: all."""
    highest_class: int | UnsetType | None = UNSET
    """The best class that its requests get, 0 to 3; null: the tenant's."""


class CreateKey(KeyRights, kw_only=True):
    """Make a bearer key."""

    name: str
    """What or whom it is for; for people to tell keys apart."""
    tenant: str = "default"
    """Who its requests are billed to."""
    expires_at: float | None = None
    """Unix seconds from which on it is worthless; never by default."""


class SetKey(KeyRights, kw_only=True):
    """Change what a key opens, at once."""

    id: str
    """The key's id, as `keys list` shows it."""
    name: str | UnsetType = UNSET
    """What or whom it is for."""
    expires_at: float | UnsetType | None = UNSET
    """Unix seconds from which on it is worthless; null: never."""


class RotateKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make a key with the same rights in the place of one, which goes on for a while."""

    id: str
    """The key's id, as `keys list` shows it."""
    overlap_s: float = 86400.0
    """Seconds for which the old key goes on."""
    expires_at: float | None = None
    """Unix seconds from which on the new key is worthless; by default it is good for as long as the old one
    was made for."""


class RevokeKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make a key worthless, for good; what runs goes on."""

    id: str
    """The key's id, as `keys list` shows it."""
    cancel: bool = False
    """End what runs and waits as well."""


class MapPeer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Let a user or group of the box use `api.sock` for a tenant."""

    peer: str
    """As uid:1000 or gid:100."""
    tenant: str
    """Who its requests are billed to."""


class UnmapPeer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Forget for whom a user or group of the box stands."""

    peer: str
    """As uid:1000 or gid:100."""


class DrainService(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Take nothing new, and finish what was accepted."""

    model: str | None = None
    """Only this model; null: the whole service."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = 120.0
    """What still runs after so many seconds is ended with an error."""
    queue: bool = False
    """Let new requests wait until service is resumed, instead of refusing them."""


class ResumeService(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Leave off or end a drain: take requests again, those that waited first."""

    model: str | None = None
    """As it was drained."""


class ReloadConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Read the settings files again and apply what changed."""


class CancelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """End a request now; its client gets an error."""

    request_id: str
    """As `requests` shows it."""


class ShowContents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Look at what is kept of a request's prompts and answers."""

    request_id: str
    """As `requests` shows it."""


class BeginBackup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record that a backup begins, which the command takes by itself; `EndBackup` says what came of it."""

    path: str
    """Where it goes."""
    contents: bool = True
    """Prompts and answers are in it."""


class EndBackup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record what came of a backup, as the command that took it says: complete with `rows` and `sha256`, or
    failed with `error`."""

    path: str
    """Where it is, or was to go."""
    rows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of the audit chain in it."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Hex, of the archive; of a folder's `backup.json`, which has those of its other files."""
    error: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)] | None = None
    """Why there is none."""


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
    Action("tenants.create", "Create tenant", "none", CreateTenant, Tenant),
    Action("tenants.set", "Change tenant", "none", SetTenant, Tenant),
    Action("tenants.suspend", "Suspend tenant", "confirm", SuspendTenant, Done),
    Action("tenants.resume", "Resume tenant", "none", ResumeTenant, Done),
    Action("tenants.delete", "Delete tenant", "typed", DeleteTenant, Done),
    Action("keys.create", "Create key", "none", CreateKey, NewKey),
    Action("keys.rotate", "Rotate key", "confirm", RotateKey, NewKey),
    Action("keys.set", "Change key", "none", SetKey, Key),
    Action("keys.revoke", "Revoke key", "confirm", RevokeKey, Done),
    Action("peers.map", "Map peer", "none", MapPeer, Done),
    Action("peers.unmap", "Unmap peer", "confirm", UnmapPeer, Done),
    Action("drain", "Drain", "confirm", DrainService, DrainStatus),
    Action("resume", "Resume", "none", ResumeService, Done),
    Action("config.reload", "Reload settings", "none", ReloadConfig, Reloaded),
    Action("requests.cancel", "Cancel request", "confirm", CancelRequest, Done),
    Action("requests.show", "Show prompts and answers of request", "none", ShowContents, Contents),
    Action("backup.begin", "Begin backup", "none", BeginBackup, AuditHead),
    Action("backup.end", "End backup", "none", EndBackup, Done),
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
