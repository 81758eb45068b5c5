"""The registry of operator actions. Each action is declared only here.

CLI commands, key bindings, confirmation dialogs and audit rows are derived from these entries. An action is
called with `POST /actions/NAME` on the admin socket, with its parameters as JSON. `appliance.admin.handlers`
maps each action to the code that performs it, so this module can be imported without the service's modules.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from appliance.protocol import (
    AddedVersion,
    AuditHead,
    Contents,
    Done,
    DrainStatus,
    Key,
    NewKey,
    PrunedVersions,
    Reloaded,
    Tenant,
    VersionStatus,
)
from appliance.snapshot import Alert
from store.fields import Declared, declared
from store.policies import KeyFields, Quota, TenantRecord
from store.structs import Silence

MAX_GRACE_S = 7 * 86400.0
"""Maximum grace period of a drain: one week."""

MAX_ARMS = 16
"""Maximum number of models and versions over which the requests for a name are distributed."""
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]

MAX_SILENCE_S = 30 * 86400.0
"""Maximum length of a silence: 30 days."""

Danger = Literal["none", "confirm", "typed"]
"""Required confirmation: none, yes or no, or typing the target's name."""
TargetKind = Literal["service", "model", "tenant", "key", "peer", "request", "alert"]
Visibility = Literal["shown", "internal"]
"""Whether operators can choose the action. An internal action is performed only by a command, as one of its
steps."""


def _changes(record: type[msgspec.Struct]) -> Any:
    """Return a struct with the declared fields of `record` and of `Quota`, all of them optional."""
    fields = [*declared(record).values(), *declared(Quota).values()]
    return msgspec.defstruct(
        f"{record.__name__}Changes",
        [(field.name, _parameter(field), UNSET) for field in fields],
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _parameter(field: Declared) -> Any:
    """Return the type of an optional field, which documents the allowed values in the schema. `store.rules`
    validates the values, because its error messages say how to fix the problem."""
    plain: dict[str, Any] = {"choice": str, "list": tuple[str, ...]}
    kind = plain.get(field.kind, field.type)
    if field.optional:
        kind = kind | None
    schema: dict[str, Any] = {}
    if field.kind == "choice":
        schema["enum"] = list(field.choices)
    elif field.kind == "list" and field.choices:
        schema["items"] = {"enum": list(field.choices)}
    elif field.kind in ("number", "count", "span", "class"):
        schema.update(minimum=field.field.low, maximum=field.field.high)
    return Annotated[
        kind | UnsetType, msgspec.Meta(description=field.description, extra_json_schema=schema or None)
    ]


_TenantChanges: Any = _changes(TenantRecord)
_KeyChanges: Any = _changes(KeyFields)


class CreateTenant(_TenantChanges):
    """Create a tenant. Omitted fields get the same defaults as the built-in tenants, which have no limits."""

    name: str
    """The tenant's name, which cannot change."""


class SetTenant(_TenantChanges):
    """Change a tenant, effective immediately. Omitted fields keep their values."""

    name: str
    """The tenant's name, as shown by `tenants list`."""


class SuspendTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Refuse new requests from a tenant. Running requests continue unless `cancel` is set."""

    name: str
    """The tenant's name, as shown by `tenants list`."""
    cancel: bool = False
    """Also cancel the tenant's running and queued requests."""


class ResumeTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Accept requests from a suspended tenant again."""

    name: str
    """The tenant's name, as shown by `tenants list`."""


class DeleteTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Delete a tenant that has no valid key and no mapped user or group."""

    name: str
    """The tenant's name, as shown by `tenants list`."""


class CreateKey(_KeyChanges):
    """Create a bearer key. The key is shown only once. Its limits apply in addition to its tenant's
    limits."""

    name: str
    """The purpose or user of the key."""
    tenant: str = "default"
    """The tenant that is billed for the key's requests."""


class SetKey(_KeyChanges):
    """Change a key, effective immediately. Omitted fields keep their values."""

    id: str
    """The key's id, as shown by `keys list`."""


class RotateKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Replace a key with a new key that has the same rights. The old key stays valid for `overlap_s`
    seconds."""

    id: str
    """The key's id, as shown by `keys list`."""
    overlap_s: float = 86400.0
    """Number of seconds for which the old key stays valid."""
    expires_at: float | None = None
    """Expiry of the new key, as unix time. By default, the new key gets the lifetime that the old key was
    created with."""


class RevokeKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Revoke a key permanently. Running requests continue unless `cancel` is set."""

    id: str
    """The key's id, as shown by `keys list`."""
    cancel: bool = False
    """Also cancel the key's running and queued requests."""


class MapPeer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Map a local user or group to a tenant. The mapping applies to requests on `api.sock`. A user's mapping
    takes precedence over the mappings of the user's groups."""

    peer: str
    """The user or group, such as uid:1000 or gid:100."""
    tenant: str
    """The tenant that is billed for the requests."""


class UnmapPeer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Remove the mapping of a local user or group."""

    peer: str
    """The user or group, such as uid:1000 or gid:100."""


class DrainService(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Stop accepting requests, and finish the requests that were already accepted."""

    model: str | None = None
    """The model to drain, or null for the whole service."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = 120.0
    """Number of seconds after which unfinished requests end with an error."""
    queue: bool = False
    """Hold new requests until service resumes, instead of refusing them."""


class ResumeService(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Cancel or end a drain and accept requests again. Held requests are served first."""

    model: str | None = None
    """The model to resume, or null for the whole service."""


class ReloadConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Read the settings files again and apply the changes."""


class CancelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Cancel a request. Its client gets an error."""

    request_id: str
    """The request's id, as shown by `requests`."""


class ShowContents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Show a request's stored prompts and answers. The audit trail records the operator who reads them."""

    request_id: str
    """The request's id, as shown by `requests`."""


class AcknowledgeAlert(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record that you are handling an alert. The alert is listed as acknowledged until it ends."""

    id: str
    """The alert's id, as shown by `alerts list`."""


class SilenceAlerts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Stop announcing a rule's alerts for some time. Silenced alerts are still listed and recorded."""

    rule: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    """Name of the rule. `*` stands for any characters."""
    where: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "*"
    """The model, replica, GPU or other component that the alerts concern. `*` stands for any characters."""
    for_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_SILENCE_S)] = 3600.0
    """Length of the silence in seconds."""
    reason: Annotated[str, msgspec.Meta(max_length=400)] = ""
    """Why the alerts are silenced."""


class UnsilenceAlerts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """End a silence early."""

    id: str
    """The silence's id, as shown by `alerts list`."""


class BeginBackup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record that the backup command starts a backup. `EndBackup` records its result."""

    path: str
    """Path of the backup."""
    contents: bool = True
    """Whether the backup includes prompts and answers."""


class EndBackup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Record the result of a backup. A complete backup is reported with `rows` and `sha256`, a failed backup
    with `error`."""

    path: str
    """Path of the backup, or the intended path if the backup failed."""
    rows: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of audit chain rows in the backup."""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 (hex) of the archive. For a backup folder, the hash of its `backup.json`, which contains the
    hashes of the other files."""
    error: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)] | None = None
    """Reason why the backup failed."""


_Grace = Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)]


class AddModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Add the checkpoint in a folder to the registry. Another checkpoint under the same name becomes a new
    version of the model. Nothing is loaded."""

    name: str
    """The name that applications use."""
    folder: str
    """Folder of a Hugging Face checkpoint, as an absolute path."""
    settings: dict[str, Any] = {}
    """Settings of the version, by their names in settings files."""


class LoadModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Load a version of a model. If it does not fit into memory, idle models that are not pinned are removed
    from memory first."""

    model: str
    """NAME@VERSION, or NAME for the default version."""
    wait: bool = False
    """Respond when the version is loaded, or when it is known that it cannot be loaded."""


class UnloadModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Unload a version of a model after its requests have finished. A later request loads it again."""

    model: str
    """NAME@VERSION, or NAME for the default version."""
    wait: bool = False
    """Respond when the version is unloaded."""
    grace_s: _Grace = 120.0
    """Number of seconds after which unfinished requests end with an error."""


class RetryModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Immediately restart a model's replicas that have failed or are waiting for their next start. Their
    earlier exits are forgotten."""

    model: str
    """The name of a model in the settings, NAME@VERSION, or NAME for the default version."""


class SleepModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Release the memory of a loaded version after its requests have finished. On GPUs, its weights are
    copied to host memory, so that waking takes about a second. The next request wakes the version."""

    model: str
    """NAME@VERSION, or NAME for the default version."""
    wait: bool = False
    """Respond when the version sleeps, or when it is known that it stays awake."""
    grace_s: _Grace = 120.0
    """Number of seconds to wait for unfinished requests. If any remain after that, the version stays
    awake."""


class WakeModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Restore the memory of a sleeping version, so that it answers requests again."""

    model: str
    """NAME@VERSION, or NAME for the default version."""
    wait: bool = False
    """Respond when the version is awake, or when it is known that it stays asleep."""


class PinModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keep a version of a model loaded: once loaded, it is removed from memory only by a command. This action
    does not load it."""

    model: str
    """NAME@VERSION, or NAME for the default version."""


class UnpinModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Allow a pinned version of a model to be removed from memory when it is idle or another model needs the
    memory."""

    model: str
    """NAME@VERSION, or NAME for the default version."""


class SetDefaultModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make a version the default of its model, and end a split of the model. If the model is loaded, the
    version is loaded first. After the response, every new request gets the new version. The previous version
    finishes its requests and is then unloaded."""

    model: str
    """NAME@VERSION."""
    grace_s: _Grace = 3600.0
    """Number of seconds after which unfinished requests of the previous version end with an error."""


class RollbackModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Make the previous default version of a model the default again."""

    name: str
    """The model's name."""
    grace_s: _Grace = 3600.0
    """Number of seconds after which unfinished requests of the replaced version end with an error."""


class SetAlias(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Set an additional name for a model or for one of its versions. After the response, every new request
    for the alias gets the new target."""

    name: str
    """The alias."""
    target: str | None
    """A model's name, or NAME@VERSION. Null deletes the alias."""


class SplitModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Distribute the requests for a name over several loaded models or versions. Requests with the same key
    and `user` go to the same target as long as the weights do not change. After the response, every new
    request is distributed by the new weights."""

    name: str
    """A model of the registry, or an alias."""
    weights: Annotated[dict[str, Weight], msgspec.Meta(min_length=1, max_length=MAX_ARMS)] | None
    """Weight of each target: a version of the model (1), a model's name, or NAME@VERSION. Null ends the
    split."""


class ShadowModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Mirror a share of a name's requests to another loaded model or version, to compare answers and latency.
    Copies run after the originals, in the lowest class, and only when no other request is waiting. Their
    answers are discarded and not billed."""

    name: str
    """The name whose requests are copied."""
    target: str | None
    """A version of the model (2), a model's name, or NAME@VERSION. Null ends the shadow."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.05
    """Fraction of the requests that are copied."""


class RemoveModel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Remove a model, or one of its versions, from the registry. It must not be loaded. The files are
    kept."""

    model: str
    """NAME for all versions, or NAME@VERSION."""


class PruneModels(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Remove unused versions from the registry: versions that are not loaded, are neither the default of
    their model nor the version to which a rollback returns, and have no alias. The files are kept."""

    dry_run: bool = False
    """Only list the versions, without removing them."""


class Action(NamedTuple):
    """An operation that an operator can perform."""

    name: str
    """Name in the URL and in the audit chain."""
    title: str
    """Displayed title, in the imperative. The confirmation dialog appends the target to it: "Revoke key
    X?"."""
    danger: Danger
    target: TargetKind
    parameters: type[msgspec.Struct]
    """Struct whose fields are the parameters and whose docstring describes the action."""
    result: type[msgspec.Struct]
    named_by: str = ""
    """Parameter that names the target, or empty if there is only one possible target."""
    visibility: Visibility = "shown"
    is_long: bool = False
    """Whether the service may take minutes to respond. The service bounds the time itself."""

    @property
    def description(self) -> str:
        """Description of the action, in full sentences."""
        return " ".join((inspect.getdoc(self.parameters) or "").split())

    def target_name(self, parameters: msgspec.Struct) -> str:
        """Return the display name of the action's target."""
        name = getattr(parameters, self.named_by) if self.named_by else None
        if self.target == "model":
            return "the service" if name is None else f"model {name}"
        return "" if name is None else str(name)


ACTIONS: tuple[Action, ...] = (
    Action("tenants.create", "Create tenant", "none", "service", CreateTenant, Tenant, "name"),
    Action("tenants.set", "Change tenant", "none", "tenant", SetTenant, Tenant, "name"),
    Action("tenants.suspend", "Suspend tenant", "confirm", "tenant", SuspendTenant, Done, "name"),
    Action("tenants.resume", "Resume tenant", "none", "tenant", ResumeTenant, Done, "name"),
    Action("tenants.delete", "Delete tenant", "typed", "tenant", DeleteTenant, Done, "name"),
    Action("keys.create", "Create key", "none", "tenant", CreateKey, NewKey, "tenant"),
    Action("keys.rotate", "Rotate key", "confirm", "key", RotateKey, NewKey, "id"),
    Action("keys.set", "Change key", "none", "key", SetKey, Key, "id"),
    Action("keys.revoke", "Revoke key", "confirm", "key", RevokeKey, Done, "id"),
    Action("peers.map", "Map peer", "none", "peer", MapPeer, Done, "peer"),
    Action("peers.unmap", "Unmap peer", "confirm", "peer", UnmapPeer, Done, "peer"),
    Action("drain", "Drain", "confirm", "model", DrainService, DrainStatus, "model"),
    Action("resume", "Resume", "none", "model", ResumeService, Done, "model"),
    Action("models.add", "Add model", "none", "model", AddModel, AddedVersion, "name", is_long=True),
    Action("models.load", "Load model", "none", "model", LoadModel, VersionStatus, "model", is_long=True),
    Action(
        "models.unload", "Unload model", "confirm", "model", UnloadModel, VersionStatus, "model", is_long=True
    ),
    Action("models.retry", "Retry failed model", "none", "model", RetryModel, Done, "model"),
    Action("models.pin", "Pin model", "none", "model", PinModel, Done, "model"),
    Action("models.unpin", "Unpin model", "none", "model", UnpinModel, Done, "model"),
    Action(
        "models.sleep",
        "Put model to sleep",
        "none",
        "model",
        SleepModel,
        VersionStatus,
        "model",
        is_long=True,
    ),
    Action("models.wake", "Wake model", "none", "model", WakeModel, VersionStatus, "model", is_long=True),
    Action(
        "models.default",
        "Change default version",
        "none",
        "model",
        SetDefaultModel,
        VersionStatus,
        "model",
        is_long=True,
    ),
    Action(
        "models.rollback",
        "Return to previous version",
        "none",
        "model",
        RollbackModel,
        VersionStatus,
        "name",
        is_long=True,
    ),
    Action("models.alias", "Set alias", "none", "model", SetAlias, Done, "name", is_long=True),
    Action("models.split", "Split requests", "none", "model", SplitModel, Done, "name", is_long=True),
    Action("models.shadow", "Shadow requests", "none", "model", ShadowModel, Done, "name", is_long=True),
    Action("models.remove", "Remove model", "typed", "model", RemoveModel, Done, "model"),
    Action("models.prune", "Prune versions", "confirm", "service", PruneModels, PrunedVersions),
    Action("config.reload", "Reload settings", "none", "service", ReloadConfig, Reloaded),
    Action("requests.cancel", "Cancel request", "confirm", "request", CancelRequest, Done, "request_id"),
    Action(
        "requests.show",
        "Show prompts and answers of request",
        "none",
        "request",
        ShowContents,
        Contents,
        "request_id",
    ),
    Action("alerts.ack", "Acknowledge alert", "none", "alert", AcknowledgeAlert, Alert, "id"),
    Action("alerts.silence", "Silence alerts", "none", "alert", SilenceAlerts, Silence, "rule"),
    Action("alerts.unsilence", "End silence", "none", "alert", UnsilenceAlerts, Done, "id"),
    Action("backup.begin", "Begin backup", "none", "service", BeginBackup, AuditHead, visibility="internal"),
    Action("backup.end", "End backup", "none", "service", EndBackup, Done, visibility="internal"),
)


def action_named(name: str) -> Action:
    """Return the action with this name. Raises LookupError if there is none."""
    for action in ACTIONS:
        if action.name == name:
            return action
    raise LookupError(f"unknown action {name!r}; available actions: {', '.join(a.name for a in ACTIONS)}")


def action_of(parameters: msgspec.Struct) -> Action:
    """Return the action that these parameters belong to. Raises LookupError if there is none."""
    for action in ACTIONS:
        if isinstance(parameters, action.parameters):
            return action
    raise LookupError(f"{type(parameters).__name__} is not the parameter type of any action")
