"""What a reload does in the running service for each top-level setting that has changed."""

from __future__ import annotations

import logging

from appliance.admin.callers import Doorkeeper
from appliance.admin.server import AdminServer
from appliance.identities import IdentityTable
from appliance.reload import Applier
from appliance.settings import Settings
from appliance.switchboard import Switchboard
from appliance.watch.metrics.tenants import ShownTenants


def appliers(
    switchboard: Switchboard,
    identities: IdentityTable,
    doorkeeper: Doorkeeper,
    admin: AdminServer,
    shown_tenants: ShownTenants,
) -> dict[str, Applier]:
    """By setting. Those that `appliance.reload` sees to itself are not here."""

    def fronts(settings: Settings) -> None:
        switchboard.set_fronts(settings.fronts)

    def timeouts(settings: Settings) -> None:
        switchboard.set_timeouts()

    def log_level(settings: Settings) -> None:
        logging.getLogger().setLevel(settings.log_level.upper())

    def unix(settings: Settings) -> None:
        identities.unix = settings.unix
        switchboard.tell_identities()
        admin.change(settings.unix.admin_mode, doorkeeper.gid)

    def operators(settings: Settings) -> None:
        doorkeeper.configure(settings.admin)
        admin.change(settings.unix.admin_mode, doorkeeper.gid)

    def queue(settings: Settings) -> None:
        switchboard.ledger.set_rules(settings.queue)

    def idempotency(settings: Settings) -> None:
        switchboard.claims.keep_s = settings.idempotency.keep_s

    def metrics(settings: Settings) -> None:
        shown_tenants.most = settings.metrics.tenants

    def nothing(settings: Settings) -> None:
        """It is read when it is needed, or fronts are told of it whenever it is new."""

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
