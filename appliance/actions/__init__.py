"""The registry of operator actions. Each action is declared only here; CLI commands, key bindings,
confirmation dialogs and audit rows are derived from these declarations. To perform an action, send
`POST /actions/NAME` on the admin socket, with the parameters as JSON. `appliance.admin.handlers` maps each
action to its handler, so importing this module does not import the service's modules.
"""

from __future__ import annotations

import inspect
from typing import Literal, NamedTuple

import msgspec

from appliance.actions import parameters
from appliance.protocol import AuditHead, Contents, Done, DrainStatus, Key, NewKey, Reloaded, Tenant
from appliance.protocol.registry import AddedVersion, PrunedVersions, VersionStatus
from appliance.snapshot import Alert
from store.fields import Declared
from store.structs import Silence

Danger = Literal["none", "confirm", "typed"]
"""How an operator must confirm the action. "typed": by typing the target's name, because the action cannot be
undone. "confirm": by answering yes or no, because requests may be refused or ended. "none": no
confirmation."""
TargetKind = Literal["service", "model", "tenant", "key", "peer", "request", "alert", "rule", "silence"]
ImpactKind = Literal["none", "requests", "suspend", "resume", "unload", "sleep", "replace", "remove"]
"""What the action does to the target's requests and replicas. "none": nothing that is known in advance.
"requests": the dialog shows the running and queued requests that the action concerns. "suspend": new requests
are refused or held until "resume". "unload": the version finishes its requests and then releases its memory.
"sleep": like "unload", but the weights stay in host memory. "replace": another version becomes the default,
and the previous one is unloaded. "remove": the target is deleted; a target in use cannot be deleted."""
Visibility = Literal["shown", "internal"]
"""Whether operators can choose the action. Internal actions are performed only as steps of a command."""


class Action(NamedTuple):
    """An operation that an operator can perform."""

    name: str
    """Name of the action in its URL and in the audit chain."""
    title: str
    """Title of the action on screen, in the imperative. The confirmation dialog appends the target: "Revoke
    key X?"."""
    danger: Danger
    target: TargetKind
    parameters: type[msgspec.Struct]
    """Struct type of the action's parameters. The struct's docstring describes the action."""
    result: type[msgspec.Struct]
    named_by: str = ""
    """Name of the parameter that selects the action's target; empty if there is only one possible target."""
    visibility: Visibility = "shown"
    is_long: bool = False
    """Whether the service may take minutes to respond. Clients set no time limit for such an action, because
    the service enforces one."""
    impact: ImpactKind = "none"
    creates_object: bool = False
    """Whether the action creates an object, such as a key or an alias, so its dialog asks for the object's
    name."""
    is_version_required: bool = False
    """Whether the target must include a version, as in NAME@VERSION."""

    @property
    def description(self) -> str:
        """Description of the action, in full sentences."""
        return " ".join((inspect.getdoc(self.parameters) or "").split())

    @property
    def declared_fields(self) -> dict[str, Declared]:
        """The action's parameters that set declared fields of a tenant or key, keyed by name."""
        return getattr(self.parameters, "DECLARED", {})

    @property
    def changes_fields(self) -> bool:
        """Whether the action changes fields of an existing tenant or key. Omitted fields keep their values.
        The effect of new limits can be forecast by replaying recent requests."""
        return bool(self.declared_fields) and not self.creates_object

    @property
    def applies_to_service(self) -> bool:
        """Whether the action applies to the whole service if no target is named."""
        return self.target == "service" or (self.target == "model" and not self.is_target_required)

    @property
    def is_target_required(self) -> bool:
        """Whether a target must be named. If so, the command line takes the target's name as a positional
        argument; otherwise, as an option."""
        fields = msgspec.structs.fields(self.parameters)
        return any(field.required for field in fields if field.name == self.named_by)

    def typed_text(self, target: str) -> str:
        """Return the text that must be typed to confirm an action that cannot be undone: the target's name
        or, if the action has no target, the last word of the action's name."""
        return target if self.named_by else self.name.rpartition(".")[2]

    def target_name(self, parameters: msgspec.Struct) -> str:
        """Return the display name of the action's target."""
        return self.shown_target(getattr(parameters, self.named_by) if self.named_by else None)

    def shown_target(self, name: str | None) -> str:
        """Return the name of the action's target as displayed after the title. A `name` of None means the
        whole service."""
        if self.target == "model" and not self.is_target_required:
            return f"model {name}" if name else "the service"
        if self.named_by == "tenant":
            return f"for tenant {name}" if name else ""
        return name or ""


ACTIONS: tuple[Action, ...] = (
    Action(
        "tenants.create",
        "Create tenant",
        "none",
        "service",
        parameters.CreateTenant,
        Tenant,
        "name",
        creates_object=True,
    ),
    Action(
        "tenants.set",
        "Change tenant",
        "none",
        "tenant",
        parameters.SetTenant,
        Tenant,
        "name",
        impact="requests",
    ),
    Action(
        "tenants.suspend",
        "Suspend tenant",
        "confirm",
        "tenant",
        parameters.SuspendTenant,
        Done,
        "name",
        impact="suspend",
    ),
    Action(
        "tenants.resume",
        "Resume tenant",
        "none",
        "tenant",
        parameters.ResumeTenant,
        Done,
        "name",
        impact="resume",
    ),
    Action(
        "tenants.delete",
        "Delete tenant",
        "typed",
        "tenant",
        parameters.DeleteTenant,
        Done,
        "name",
        impact="remove",
    ),
    Action(
        "keys.create",
        "Create key",
        "none",
        "tenant",
        parameters.CreateKey,
        NewKey,
        "tenant",
        creates_object=True,
    ),
    Action(
        "keys.rotate", "Rotate key", "confirm", "key", parameters.RotateKey, NewKey, "id", impact="requests"
    ),
    Action("keys.set", "Change key", "none", "key", parameters.SetKey, Key, "id", impact="requests"),
    Action("keys.revoke", "Revoke key", "typed", "key", parameters.RevokeKey, Done, "id", impact="requests"),
    Action("peers.map", "Map peer", "none", "peer", parameters.MapPeer, Done, "peer", creates_object=True),
    Action("peers.unmap", "Unmap peer", "confirm", "peer", parameters.UnmapPeer, Done, "peer"),
    Action(
        "drain", "Drain", "confirm", "model", parameters.DrainService, DrainStatus, "model", impact="suspend"
    ),
    Action("resume", "Resume", "none", "model", parameters.ResumeService, Done, "model", impact="resume"),
    Action(
        "models.add",
        "Add model",
        "none",
        "model",
        parameters.AddModel,
        AddedVersion,
        "name",
        is_long=True,
        creates_object=True,
    ),
    Action(
        "models.load",
        "Load model",
        "none",
        "model",
        parameters.LoadModel,
        VersionStatus,
        "model",
        is_long=True,
    ),
    Action(
        "models.unload",
        "Unload model",
        "confirm",
        "model",
        parameters.UnloadModel,
        VersionStatus,
        "model",
        is_long=True,
        impact="unload",
    ),
    Action("models.retry", "Retry failed model", "none", "model", parameters.RetryModel, Done, "model"),
    Action("models.pin", "Pin model", "none", "model", parameters.PinModel, Done, "model"),
    Action("models.unpin", "Unpin model", "none", "model", parameters.UnpinModel, Done, "model"),
    Action(
        "models.sleep",
        "Put model to sleep",
        "none",
        "model",
        parameters.SleepModel,
        VersionStatus,
        "model",
        is_long=True,
        impact="sleep",
    ),
    Action(
        "models.wake",
        "Wake model",
        "none",
        "model",
        parameters.WakeModel,
        VersionStatus,
        "model",
        is_long=True,
    ),
    Action(
        "models.default",
        "Change default version",
        "none",
        "model",
        parameters.SetDefaultModel,
        VersionStatus,
        "model",
        is_long=True,
        impact="replace",
        is_version_required=True,
    ),
    Action(
        "models.rollback",
        "Return to previous version",
        "none",
        "model",
        parameters.RollbackModel,
        VersionStatus,
        "name",
        is_long=True,
        impact="replace",
    ),
    Action(
        "models.alias",
        "Set alias",
        "none",
        "model",
        parameters.SetAlias,
        Done,
        "name",
        is_long=True,
        impact="requests",
        creates_object=True,
    ),
    Action(
        "models.split",
        "Split requests",
        "none",
        "model",
        parameters.SplitModel,
        Done,
        "name",
        is_long=True,
        impact="requests",
    ),
    Action(
        "models.shadow",
        "Shadow requests",
        "none",
        "model",
        parameters.ShadowModel,
        Done,
        "name",
        is_long=True,
        impact="requests",
    ),
    Action(
        "models.remove",
        "Remove model",
        "typed",
        "model",
        parameters.RemoveModel,
        Done,
        "model",
        impact="remove",
    ),
    Action("models.prune", "Prune versions", "typed", "service", parameters.PruneModels, PrunedVersions),
    Action("config.reload", "Reload settings", "none", "service", parameters.ReloadConfig, Reloaded),
    Action(
        "requests.cancel",
        "Cancel request",
        "confirm",
        "request",
        parameters.CancelRequest,
        Done,
        "request_id",
        impact="requests",
    ),
    Action(
        "requests.show",
        "Show prompts and answers of request",
        "none",
        "request",
        parameters.ShowContents,
        Contents,
        "request_id",
    ),
    Action("alerts.ack", "Acknowledge alert", "none", "alert", parameters.AcknowledgeAlert, Alert, "id"),
    Action("alerts.silence", "Silence alerts", "none", "rule", parameters.SilenceAlerts, Silence, "rule"),
    Action("alerts.unsilence", "End silence", "none", "silence", parameters.UnsilenceAlerts, Done, "id"),
    Action(
        "backup.begin",
        "Begin backup",
        "none",
        "service",
        parameters.BeginBackup,
        AuditHead,
        visibility="internal",
    ),
    Action("backup.end", "End backup", "none", "service", parameters.EndBackup, Done, visibility="internal"),
)


def flag(parameter: str) -> str:
    """Return the command-line option for a parameter or a declared field, such as `--grace` or `--burst`."""
    return "--" + parameter.removesuffix("_s").removesuffix("_at").replace("_", "-")


def action_named(name: str) -> Action:
    """Return the action with this name. Raises LookupError if there is none."""
    for action in ACTIONS:
        if action.name == name:
            return action
    raise LookupError(f"unknown action {name!r}; available actions: {', '.join(a.name for a in ACTIONS)}")


def action_of(parameters: msgspec.Struct) -> Action:
    """Return the action that takes parameters of this type. Raises LookupError if there is none."""
    for action in ACTIONS:
        if isinstance(parameters, action.parameters):
            return action
    raise LookupError(f"{type(parameters).__name__} is not the parameter type of any action")
