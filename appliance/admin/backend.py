"""Puts the admin API's backend together: gives each part what it needs of the service."""

from __future__ import annotations

from collections.abc import Callable

from appliance.admin.app import Backend
from appliance.admin.auditing import AuditedActions
from appliance.admin.drains import DrainAdmin
from appliance.admin.handlers import BackupAdmin, RequestAdmin, handlers
from appliance.admin.keys import KeyAdmin
from appliance.admin.peers import PeerAdmin
from appliance.admin.status import drain_status, in_flight
from appliance.admin.tenants import TenantAdmin
from appliance.core.contents import ContentKeeper
from appliance.core.controller import Switchboard
from appliance.core.reload import Reloader
from appliance.messages import Identity
from appliance.protocol import Status
from store.control import ControlStore


def admin_backend(
    switchboard: Switchboard,
    control: ControlStore,
    contents: ContentKeeper,
    reloader: Reloader,
    status: Callable[[], Status],
    metrics: Callable[[], bytes],
) -> tuple[Backend, AuditedActions]:
    """Return the backend, and what performs its actions."""
    requests, publish = switchboard.requests, switchboard.tell_identities

    def cancel_matching(matches: Callable[[Identity], bool], message: str) -> int:
        ids = [request.request_id for request in requests if matches(request.first.identity)]
        return sum([switchboard.cancel(request_id, message) for request_id in ids])

    peers = PeerAdmin(control, unix=lambda: switchboard.settings.unix, publish=publish)
    tenants = TenantAdmin(
        control, usage=requests.usage, peers=peers.list, publish=publish, cancel=cancel_matching
    )
    keys = KeyAdmin(control, usage=requests.usage, publish=publish, cancel=cancel_matching)
    actions = AuditedActions(
        control,
        handlers(
            tenants=tenants,
            keys=keys,
            peers=peers,
            drains=DrainAdmin(switchboard, lambda drain: drain_status(switchboard, drain)),
            requests=RequestAdmin(lambda: in_flight(switchboard), switchboard.cancel, contents.show),
            backups=BackupAdmin(control.trail),
            reload=reloader.reload,
        ),
    )
    return (
        Backend(
            status=status,
            in_flight=lambda: in_flight(switchboard),
            keys=keys.list,
            tenants=tenants.list,
            peers=peers.list,
            configuration=reloader.configuration,
            metrics=metrics,
            act=actions.act,
            record_denied=actions.record_denied,
        ),
        actions,
    )
