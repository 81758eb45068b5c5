"""The hooks that apply changed top-level settings to the running service."""

from __future__ import annotations

import logging

from appliance.admin.callers import Authenticator
from appliance.admin.server import AdminServer
from appliance.core.controller import Switchboard
from appliance.core.reload import ReloadHook
from appliance.front_pool.identities import IdentityTable
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.settings import Settings


def reload_hooks(
    switchboard: Switchboard,
    identities: IdentityTable,
    authenticator: Authenticator,
    admin: AdminServer,
    shown_tenants: ShownTenants,
) -> dict[str, ReloadHook]:
    """Return the hook of each setting, except those that `appliance.core.reload` applies itself."""

    def fronts(settings: Settings) -> None:
        switchboard.set_fronts(settings.fronts)

    def timeouts(settings: Settings) -> None:
        switchboard.set_timeouts()

    def log_level(settings: Settings) -> None:
        logging.getLogger().setLevel(settings.log_level.upper())

    def unix(settings: Settings) -> None:
        identities.unix = settings.unix
        switchboard.tell_identities()
        admin.change(settings.unix.admin_mode, authenticator.gid)

    def operators(settings: Settings) -> None:
        authenticator.configure(settings.admin)
        admin.change(settings.unix.admin_mode, authenticator.gid)

    def queue(settings: Settings) -> None:
        switchboard.requests.set_rules(settings.queue)

    def idempotency(settings: Settings) -> None:
        switchboard.claims.keep_s = settings.idempotency.keep_s

    def metrics(settings: Settings) -> None:
        shown_tenants.most = settings.metrics.tenants

    def nothing(settings: Settings) -> None:
        """The setting is read when it is needed, or is a part of the fronts' configuration."""

    return {
        "fronts": fronts,
        "drain_grace_s": nothing,
        "drain_notice_s": nothing,
        "hang_timeout_s": timeouts,
        "load_timeout_s": timeouts,
        "log_level": log_level,
        "unix": unix,
        "admin": operators,
        "queue": queue,
        "log": nothing,
        "limits": nothing,
        "idempotency": idempotency,
        "metrics": metrics,
    }
