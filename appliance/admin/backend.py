"""Assembles the admin API's backend from the service's components."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from appliance.admin.alerts import AlertAdmin, alert_routes
from appliance.admin.app import Backend
from appliance.admin.auditing import AuditedActions
from appliance.admin.drains import DrainAdmin
from appliance.admin.handlers import BackupAdmin, RequestAdmin, handlers
from appliance.admin.keys import KeyAdmin
from appliance.admin.models import ModelAdmin
from appliance.admin.peers import PeerAdmin
from appliance.admin.running import RunningRequests
from appliance.admin.shadows import ShadowAdmin
from appliance.admin.splits import SplitAdmin
from appliance.admin.status import StatusReader
from appliance.admin.tenants import TenantAdmin
from appliance.core.cancellation import RequestCanceller
from appliance.core.contents import ContentKeeper
from appliance.core.drains import Drains
from appliance.core.reload import Reloader
from appliance.models.routing import Routing
from appliance.monitoring.alerts.manager import AlertManager
from appliance.scopes import ScopedRoute
from appliance.settings import Settings
from appliance.traffic.shadows import ShadowResults
from appliance.traffic.state import TrafficState
from store.control import ControlStore


def admin_backend(
    *,
    control: ControlStore,
    contents: ContentKeeper,
    settings: Callable[[], Settings],
    traffic: TrafficState,
    models: ModelAdmin,
    shadow_results: ShadowResults,
    routing: Routing,
    drains: Drains,
    canceller: RequestCanceller,
    reloader: Reloader,
    status: StatusReader,
    running: RunningRequests,
    alerts: AlertManager,
    metrics: Callable[[], bytes],
    routes: Sequence[ScopedRoute],
    publish: Callable[[], None],
    note: Callable[[str, str], None],
) -> tuple[Backend, AuditedActions]:
    """Return the backend and the object that performs its actions. `publish` applies tenant and key changes
    to the queue and the front processes. `note` reports a problem to the operator."""
    cancel = canceller.cancel_matching
    peers = PeerAdmin(control=control, unix=lambda: settings().unix, publish=publish)
    tenants = TenantAdmin(
        control=control, usage=traffic.usage, peers=peers.list, publish=publish, cancel=cancel
    )
    shadows = ShadowAdmin(
        registry=models.registry,
        routing=routing,
        fronts=models.fronts,
        states=models.states,
        results=shadow_results,
    )
    splits = SplitAdmin(
        registry=models.registry,
        routing=routing,
        fronts=models.fronts,
        check_declared=models.check_declared,
    )
    keys = KeyAdmin(control=control, usage=traffic.usage, publish=publish, cancel=cancel)
    actions = AuditedActions(
        control,
        handlers(
            tenants=tenants,
            keys=keys,
            peers=peers,
            models=models,
            splits=splits,
            shadows=shadows,
            drains=DrainAdmin(drains, status.drain, routing.unit_of),
            requests=RequestAdmin(lambda: running.known({}, time.time()), canceller.cancel, contents.show),
            alerts=AlertAdmin(alerts),
            backups=BackupAdmin(control.trail),
            reload=reloader.reload,
        ),
    )
    backend = Backend(
        status=status.status,
        in_flight=running.read,
        keys=keys.list,
        tenants=tenants.list,
        peers=peers.list,
        models=shadows.shown,
        configuration=reloader.configuration,
        metrics=metrics,
        routes=[*routes, *alert_routes(alerts)],
        act=actions.act,
        record_denied=actions.record_denied,
        note=note,
    )
    return backend, actions
