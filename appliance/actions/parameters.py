"""The parameters of operator actions. Each parameter is declared and described only here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from store.fields import Declared, declared
from store.policies import KeyFields, Quota, TenantRecord

MAX_GRACE_S = 7 * 86400.0
"""Maximum grace period of a drain: one week."""

MAX_ARMS = 16
"""Maximum number of targets (models or versions) in a traffic split."""

Weight = Annotated[float, Meta(gt=0, le=1e6)]

MAX_SILENCE_S = 30 * 86400.0
"""Maximum length of a silence: 30 days."""

# Keys of `Meta.extra`, which describe an action's parameter on the command line. "metavar" is the placeholder
# for the parameter's value in help, and "short" its short option. "option" is the parameter's option if it is
# not named after the parameter. "none_option" is the option that stands for null, and "none_help" its help.
# "after" marks a parameter that is not an option but an argument after the target; the key's value is the
# text between target and argument. "form" gives the notation of the parameter's value if its type does not
# determine it: weights or a percentage.
NAME = {"metavar": "NAME"}
ID = {"metavar": "ID"}
VERSION = {"metavar": "NAME[@VERSION]"}

TenantName = Annotated[str, Meta(description="The tenant's name, as shown by `tenants list`.", extra=NAME)]

BilledTenant = Annotated[str, Meta(description="The tenant that is billed for the requests.", extra=NAME)]

KeyId = Annotated[str, Meta(description="The key's id, as shown by `keys list`.", extra=ID)]

PeerName = Annotated[
    str,
    Meta(
        description="A user or group, such as uid:1000 or gid:100. The command line also accepts names, such "
        "as user:alice and group:staff.",
        extra={"metavar": "PEER"},
    ),
]

RequestId = Annotated[str, Meta(description="The request's id, as shown by `requests`.", extra=ID)]

ModelVersion = Annotated[
    str, Meta(description="The version: NAME@VERSION, or NAME for the default one.", extra=VERSION)
]

ModelOrService = Annotated[
    str | None,
    Meta(description="Name of the model. Default: the whole service.", extra=NAME | {"short": "-m"}),
]

Grace = Annotated[
    float,
    Meta(ge=0, le=MAX_GRACE_S, description="Time after which unfinished requests end with an error."),
]

PreviousGrace = Annotated[
    float,
    Meta(
        ge=0,
        le=MAX_GRACE_S,
        description="Time after which unfinished requests of the previous version end with an error.",
    ),
]


def _changes(record: type[msgspec.Struct]) -> Any:
    """Return a struct type with the declared fields of `record` and `Quota`, all optional."""
    fields = {**declared(record), **declared(Quota)}
    return msgspec.defstruct(
        f"{record.__name__}Changes",
        [(field.name, _parameter(field), UNSET) for field in fields.values()],
        namespace={"DECLARED": fields},
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _parameter(field: Declared) -> Any:
    """Return the type of an optional field. The type documents the allowed values in the JSON schema but does
    not enforce them: `store.rules` validates values, with error messages that explain how to fix the
    problem."""
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
    return Annotated[kind | UnsetType, Meta(description=field.description, extra_json_schema=schema or None)]


_TenantChanges: Any = _changes(TenantRecord)
_KeyChanges: Any = _changes(KeyFields)


class _Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of an action."""


class CreateTenant(_TenantChanges):
    """Create a tenant. Omitted fields get the same defaults as the built-in tenants, which have no limits."""

    name: Annotated[str, Meta(description="The tenant's name. It cannot be changed later.", extra=NAME)]


class SetTenant(_TenantChanges):
    """Change a tenant's fields. The change takes effect immediately. Omitted fields keep their values."""

    name: TenantName


class SuspendTenant(_Parameters):
    """Refuse new requests from a tenant. Running requests continue unless `cancel` is set."""

    name: TenantName
    cancel: Annotated[bool, Meta(description="Also cancel the tenant's running and queued requests.")] = False


class ResumeTenant(_Parameters):
    """Accept requests from a suspended tenant again."""

    name: TenantName


class DeleteTenant(_Parameters):
    """Delete a tenant that has no valid key and no mapped user or group."""

    name: TenantName


class CreateKey(_KeyChanges):
    """Create a bearer key. The key is shown only once. The key's limits apply in addition to those of its
    tenant."""

    name: Annotated[str, Meta(description="What the key is used for, or by whom.", extra=NAME)]
    tenant: BilledTenant = "default"


class SetKey(_KeyChanges):
    """Change a key's fields. The change takes effect immediately. Omitted fields keep their values."""

    id: KeyId


class RotateKey(_Parameters):
    """Replace a key with a new one that has the same rights. The old key stays valid for `overlap_s`
    seconds."""

    id: KeyId
    overlap_s: Annotated[float, Meta(description="How long the old key stays valid after the rotation.")] = (
        86400.0
    )
    expires_at: Annotated[
        float | None,
        Meta(description="When the new key expires. Default: after the old key's original lifetime."),
    ] = None


class RevokeKey(_Parameters):
    """Revoke a key permanently. Running requests continue unless `cancel` is set."""

    id: KeyId
    cancel: Annotated[bool, Meta(description="Also cancel the key's running and queued requests.")] = False


class MapPeer(_Parameters):
    """Map a local user or group to a tenant. The mapping applies to requests on `api.sock`. A user's mapping
    takes precedence over those of the user's groups."""

    peer: PeerName
    tenant: BilledTenant


class UnmapPeer(_Parameters):
    """Remove the mapping of a local user or group."""

    peer: PeerName


class DrainService(_Parameters):
    """Stop accepting requests and finish those already accepted. Requests that are unfinished after the grace
    period end with an error."""

    model: ModelOrService = None
    grace_s: Grace = 120.0
    queue: Annotated[
        bool, Meta(description="Instead of refusing new requests, hold them until service resumes.")
    ] = False


class ResumeService(_Parameters):
    """Cancel or end a drain and accept requests again. Held requests are served before new requests."""

    model: ModelOrService = None


class ReloadConfig(_Parameters):
    """Reload the settings files and apply the changes."""


class CancelRequest(_Parameters):
    """Cancel a request. Its client gets an error."""

    request_id: RequestId


class ShowContents(_Parameters):
    """Show a request's stored prompts and answers. The audit trail records the operator who reads them."""

    request_id: RequestId


class AcknowledgeAlert(_Parameters):
    """Record that you are handling an alert. The alert is listed as acknowledged until it ends."""

    id: Annotated[str, Meta(description="The alert's id, as shown by `alerts list`.", extra=ID)]


class SilenceAlerts(_Parameters):
    """Stop notifications of a rule's alerts for a limited time. Silenced alerts are still listed and
    recorded."""

    rule: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=100,
            description="Name of the alert rule. `*` stands for any characters.",
            extra={"metavar": "RULE"},
        ),
    ]
    where: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="The model, replica, GPU or other component that the alerts are about. `*` stands "
            "for any characters.",
            extra={"metavar": "SUBJECT"},
        ),
    ] = "*"
    for_s: Annotated[float, Meta(ge=1, le=MAX_SILENCE_S, description="Length of the silence.")] = 3600.0
    reason: Annotated[
        str, Meta(max_length=400, description="Reason for silencing the alerts.", extra={"metavar": "TEXT"})
    ] = ""


class UnsilenceAlerts(_Parameters):
    """End a silence early."""

    id: Annotated[str, Meta(description="The silence's id, as shown by `alerts list`.", extra=ID)]


class BeginBackup(_Parameters):
    """Record that the backup command has started a backup. `EndBackup` records the result."""

    path: Annotated[str, Meta(description="Path of the backup.")]
    contents: Annotated[bool, Meta(description="Whether the backup includes prompts and answers.")] = True


class EndBackup(_Parameters):
    """Record the result of a backup. Give `rows` and `sha256` if the backup is complete, or `error` if it
    failed."""

    path: Annotated[str, Meta(description="Path of the backup, or the intended path if the backup failed.")]
    rows: Annotated[int, Meta(ge=0, description="Number of audit chain rows in the backup.")] | None = None
    sha256: (
        Annotated[
            str,
            Meta(
                pattern="^[0-9a-f]{64}$",
                description="SHA-256 (hex) of the archive. For a backup folder, the hash of its "
                "`backup.json`, which contains the hashes of the other files.",
            ),
        ]
        | None
    ) = None
    error: (
        Annotated[str, Meta(min_length=1, max_length=2000, description="Reason why the backup failed.")]
        | None
    ) = None


class AddModel(_Parameters):
    """Add the checkpoint in a folder to the registry, without loading it. If a model with this name exists,
    the checkpoint becomes its next version."""

    name: Annotated[str, Meta(description="The model's name, as used by applications.")]
    folder: Annotated[
        str,
        Meta(description="Absolute path of a folder with a Hugging Face checkpoint.", extra={"after": "="}),
    ]
    settings: Annotated[
        dict[str, Any], Meta(description="The version's settings, named as in the settings files.")
    ] = {}


class LoadModel(_Parameters):
    """Load a version of a model, or a model that the settings declare as not required. If it does not fit
    into memory, idle models that are not pinned are removed from memory first."""

    model: ModelVersion
    wait: Annotated[
        bool,
        Meta(description="Wait until the version is loaded or loading has failed."),
    ] = False


class UnloadModel(_Parameters):
    """Unload a version of a model after its requests have finished. A later request loads it again."""

    model: ModelVersion
    wait: Annotated[bool, Meta(description="Wait until the version is unloaded.")] = False
    grace_s: Grace = 120.0


class RetryModel(_Parameters):
    """Immediately restart a model's replicas that have failed or are waiting to restart. Earlier exits of
    these replicas no longer count towards `max_deaths`. A replica that runs on the CPU because its GPU was
    missing is restarted on a GPU."""

    model: Annotated[
        str,
        Meta(
            description="The name of a model in the settings, NAME@VERSION, or NAME for the default version.",
            extra=VERSION,
        ),
    ]


class SleepModel(_Parameters):
    """Release the memory of a loaded version after its requests have finished. The next request wakes the
    version. On GPUs, the weights are copied to host memory, so waking takes only about a second."""

    model: ModelVersion
    wait: Annotated[
        bool,
        Meta(description="Wait until the version is asleep or the attempt has failed."),
    ] = False
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=MAX_GRACE_S,
            description="Time to wait for unfinished requests. If any remain after this time, the version "
            "stays awake.",
        ),
    ] = 120.0


class WakeModel(_Parameters):
    """Wake a sleeping version, so that it answers requests again."""

    model: ModelVersion
    wait: Annotated[
        bool,
        Meta(description="Wait until the version is awake or waking has failed."),
    ] = False


class PinModel(_Parameters):
    """Pin a version of a model. Once loaded, a pinned version is removed from memory only by a command.
    Pinning does not load the version."""

    model: ModelVersion


class UnpinModel(_Parameters):
    """Unpin a version of a model. The version may then be removed from memory when it is idle or when another
    model needs the memory."""

    model: ModelVersion


class SetDefaultModel(_Parameters):
    """Make a version the default of its model and end any split of the model's requests. If the model is
    loaded, the new default version is loaded before the change takes effect. After the response, the new
    version answers all new requests. The previous version finishes its requests and is then unloaded."""

    model: Annotated[
        str,
        Meta(description="The new default version.", extra={"metavar": "NAME@VERSION"}),
    ]
    grace_s: PreviousGrace = 3600.0


class RollbackModel(_Parameters):
    """Make a model's previous default version the default again."""

    name: Annotated[str, Meta(description="The model's name, as shown by `models list`.", extra=NAME)]
    grace_s: PreviousGrace = 3600.0


class SetAlias(_Parameters):
    """Set an additional name for a model or for one of its versions. After the response, the new target
    answers all new requests for the alias."""

    name: Annotated[str, Meta(description="The alias.", extra={"metavar": "ALIAS"})]
    target: Annotated[
        str | None,
        Meta(
            description="The alias's target: a model's name, or NAME@VERSION. Null deletes the alias.",
            extra={
                **VERSION,
                "option": "--to",
                "none_option": "--delete",
                "none_help": "Delete the alias.",
                "after": " ",
            },
        ),
    ]


class SplitModel(_Parameters):
    """Distribute the requests for a name over several loaded models or versions. Requests with the same key
    and `user` go to the same target as long as the weights do not change. After the response, the new weights
    apply to all new requests."""

    name: Annotated[
        str, Meta(description="The name to split: a model in the registry, or an alias.", extra=NAME)
    ]
    weights: Annotated[
        Annotated[dict[str, Weight], Meta(min_length=1, max_length=MAX_ARMS)] | None,
        Meta(
            description="Each target's weight. A target is a version number such as 1, a model name, or "
            "NAME@VERSION. Null ends the split.",
            extra={
                "metavar": "TARGET=WEIGHT...",
                "form": "weights",
                "none_option": "--clear",
                "none_help": "End the split: all requests go to the default version again.",
                "after": " ",
            },
        ),
    ]


class ShadowModel(_Parameters):
    """Copy a share of the requests for a name to another loaded model or version, to compare answers and
    latency. A copy runs after its original, in the lowest priority class, and only when no other request is
    waiting. The answers to copies are discarded and not billed."""

    name: Annotated[str, Meta(description="The model name whose requests are copied.", extra=NAME)]
    target: Annotated[
        str | None,
        Meta(
            description="The target: a version number such as 2, a model name, or NAME@VERSION. Null "
            "ends the shadow.",
            extra={
                "metavar": "TARGET",
                "option": "--to",
                "none_option": "--clear",
                "none_help": "End the shadow.",
            },
        ),
    ]
    share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Fraction of the requests to copy.",
            extra={"metavar": "PERCENT", "form": "percentage"},
        ),
    ] = 0.05


class RemoveModel(_Parameters):
    """Remove a model, or one of its versions, from the registry. The model or version must not be loaded. The
    files are kept."""

    model: Annotated[
        str, Meta(description="What to remove: NAME for all versions, or NAME@VERSION.", extra=VERSION)
    ]


class PruneModels(_Parameters):
    """Remove unused versions from the registry. A version is unused if it is not loaded, has no alias, and is
    neither its model's default nor the version that a rollback would restore. The files are kept."""

    dry_run: Annotated[bool, Meta(description="Only list the versions, without removing them.")] = False
