"""Hooks that apply changed top-level settings to the running service."""

from __future__ import annotations

import logging

from appliance.admin.callers import Authenticator
from appliance.admin.server import AdminServer
from appliance.core.alerting import Alerting
from appliance.core.reload import ReloadHook
from appliance.front_pool.identities import IdentityRegistry
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.settings import Settings
from appliance.traffic.request_manager import RequestManager


def reload_hooks(
    fronts: FrontPool,
    models: ModelManager,
    requests: RequestManager,
    identities: IdentityRegistry,
    authenticator: Authenticator,
    admin: AdminServer,
    shown_tenants: ShownTenants,
    alerts: Alerting,
) -> dict[str, ReloadHook]:
    """Return the reload hook for each setting, except those that `appliance.core.reload` applies itself."""

    def front_count(settings: Settings) -> None:
        fronts.set_count(settings.fronts)

    def timeouts(settings: Settings) -> None:
        fronts.set_timeouts()
        models.set_timeouts()

    def log_level(settings: Settings) -> None:
        logging.getLogger().setLevel(settings.log_level.upper())

    def unix(settings: Settings) -> None:
        identities.unix = settings.unix
        fronts.publish_identities()
        admin.change(settings.unix.admin_mode, authenticator.gid)

    def operators(settings: Settings) -> None:
        authenticator.configure(settings.admin)
        admin.change(settings.unix.admin_mode, authenticator.gid)

    def queue(settings: Settings) -> None:
        requests.set_rules(settings.queue)

    def metrics(settings: Settings) -> None:
        shown_tenants.most = settings.metrics.tenants

    def alert_rules(settings: Settings) -> None:
        alerts.configure(settings)

    def nothing(settings: Settings) -> None:
        """Do nothing. This is the hook for settings that are read each time they are needed, or that are part
        of the fronts' configuration."""

    return {
        "fronts": front_count,
        "drain_grace_s": nothing,
        "drain_notice_s": nothing,
        "hang_timeout_s": timeouts,
        "load_timeout_s": timeouts,
        "log_level": log_level,
        "unix": unix,
        "admin": operators,
        "queue": queue,
        "log": nothing,
        "telemetry": nothing,
        "alerts": alert_rules,
        "restarts": nothing,
        "autoscaling": nothing,
        "groups": nothing,
        "on_demand": nothing,
        "prices": nothing,
        "limits": nothing,
        "idempotency": nothing,
        "metrics": metrics,
    }
