"""Maps each registered action to its handler. Handlers that are too small for a separate module are defined
here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from appliance.actions.parameters import (
    AcknowledgeAlert,
    AddModel,
    BeginBackup,
    CancelRequest,
    CreateKey,
    CreateTenant,
    DeleteTenant,
    DrainService,
    EndBackup,
    LoadModel,
    MapPeer,
    PinModel,
    PruneModels,
    ReloadConfig,
    RemoveModel,
    ResumeService,
    ResumeTenant,
    RetryModel,
    RevokeKey,
    RollbackModel,
    RotateKey,
    SetAlias,
    SetDefaultModel,
    SetKey,
    SetTenant,
    ShadowModel,
    ShowContents,
    SilenceAlerts,
    SleepModel,
    SplitModel,
    SuspendTenant,
    UnloadModel,
    UnmapPeer,
    UnpinModel,
    UnsilenceAlerts,
    WakeModel,
)
from appliance.admin.alerts import AlertAdmin
from appliance.admin.drains import DrainAdmin
from appliance.admin.effects import Effect, Handler, done
from appliance.admin.keys import KeyAdmin
from appliance.admin.models import ModelAdmin
from appliance.admin.peers import PeerAdmin
from appliance.admin.shadows import ShadowAdmin
from appliance.admin.splits import SplitAdmin
from appliance.admin.tenants import TenantAdmin
from appliance.protocol import AuditHead, Contents, Done, InFlight, Reloaded
from store.audit import Actor
from store.trail import AuditTrail


def handlers(
    *,
    tenants: TenantAdmin,
    keys: KeyAdmin,
    peers: PeerAdmin,
    models: ModelAdmin,
    splits: SplitAdmin,
    shadows: ShadowAdmin,
    drains: DrainAdmin,
    requests: RequestAdmin,
    alerts: AlertAdmin,
    backups: BackupAdmin,
    reload: Callable[[], Awaitable[Reloaded]],
) -> Mapping[type[msgspec.Struct], Handler]:
    """Return the action handlers, keyed by parameter type."""

    async def reload_config(actor: Actor, asked: ReloadConfig) -> Effect:
        reloaded = await reload()
        return Effect(reloaded, after=msgspec.to_builtins(reloaded))

    return {
        CreateTenant: tenants.create,
        SetTenant: tenants.set,
        SuspendTenant: tenants.suspend,
        ResumeTenant: tenants.resume,
        DeleteTenant: tenants.delete,
        CreateKey: keys.create,
        RotateKey: keys.rotate,
        SetKey: keys.set,
        RevokeKey: keys.revoke,
        MapPeer: peers.map,
        UnmapPeer: peers.unmap,
        AddModel: models.add,
        LoadModel: models.load,
        UnloadModel: models.unload,
        RetryModel: models.retry,
        SleepModel: models.sleep,
        WakeModel: models.wake,
        PinModel: models.pin,
        UnpinModel: models.unpin,
        SetDefaultModel: models.set_default,
        RollbackModel: models.rollback,
        SetAlias: models.alias,
        SplitModel: splits.split,
        ShadowModel: shadows.shadow,
        RemoveModel: models.remove,
        PruneModels: models.prune,
        DrainService: drains.drain,
        ResumeService: drains.resume,
        ReloadConfig: reload_config,
        CancelRequest: requests.cancel,
        ShowContents: requests.show,
        AcknowledgeAlert: alerts.acknowledge,
        SilenceAlerts: alerts.silence,
        UnsilenceAlerts: alerts.unsilence,
        BeginBackup: backups.begin,
        EndBackup: backups.end,
    }


class RequestAdmin:
    """Performs operators' actions on individual requests."""

    def __init__(
        self,
        in_flight: Callable[[], Sequence[InFlight]],
        cancel: Callable[[str, str], bool],
        contents: Callable[[str], Awaitable[Contents]],
    ) -> None:
        """`cancel` takes a request id and a message for the client, and returns False for an unknown id.
        `contents` returns a request's stored texts."""
        self._in_flight = in_flight
        self._cancel = cancel
        self._contents = contents

    async def cancel(self, actor: Actor, asked: CancelRequest) -> Effect:
        """Cancel a request. Raises LookupError if the request is finished or unknown."""
        request_id = asked.request_id
        before = next((one for one in self._in_flight() if one.request_id == request_id), None)
        if not self._cancel(request_id, "an operator cancelled the request"):
            raise LookupError(f"no running or queued request has id {request_id!r}")
        return Effect(
            Done(message=f"cancelling request {request_id}"),
            before={"state": before.state, "tenant": before.tenant} if before else None,
            after={"state": "ending"},
        )

    async def show(self, actor: Actor, asked: ShowContents) -> Effect:
        """Return a request's stored prompts and answers. Raises LookupError if there are none, and StoreError
        if the database fails."""
        return Effect(await self._contents(asked.request_id))


class BackupAdmin:
    """Records backups in the audit trail. The backups themselves are made by `appliance backup`."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    async def begin(self, actor: Actor, asked: BeginBackup) -> Effect:
        """Record the head of the audit chain and return it, so that the backup can later be checked against
        it."""
        self._trail.record_head()
        head = self._trail.state().head
        return Effect(AuditHead(seq=head.seq, hash=head.hash))

    async def end(self, actor: Actor, asked: EndBackup) -> Effect:
        """Record the result of a backup. Raises ValueError if the result is neither complete nor failed."""
        if asked.error is not None and asked.rows is None and asked.sha256 is None:
            return Effect(Done(message=f"backup {asked.path} failed"), outcome=f"failed: {asked.error}")
        if asked.error is not None or asked.rows is None or asked.sha256 is None:
            raise ValueError(
                "backup.end: give either rows and sha256 (complete backup) or error (failed backup)"
            )
        return done(f"backup {asked.path} is complete")
