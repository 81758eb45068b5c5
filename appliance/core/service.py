"""The service's parts, put together: what each is given, in which order they begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable

from appliance.admin.backend import admin_backend
from appliance.admin.callers import Authenticator, keys_of
from appliance.admin.server import AdminServer
from appliance.admin.status import audit_status, database_status, service_version, status_of
from appliance.core.clock import ClockGuard
from appliance.core.contents import ContentKeeper
from appliance.core.controller import Switchboard
from appliance.core.housekeeping import Housekeeper
from appliance.core.notifier import Notifier
from appliance.core.quota_levels import LevelKeeper
from appliance.core.reload import Reloader
from appliance.core.reload_hooks import reload_hooks
from appliance.core.state import State, cache_salts
from appliance.core.systemd import Manager
from appliance.front_pool.identities import IdentityTable
from appliance.front_pool.listeners import Doors
from appliance.models.registry import describe_models
from appliance.models.replica import Launch
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.scrape import Scraper
from appliance.monitoring.metrics.server import MetricsServer
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.protocol import SocketStatus, Status
from appliance.settings import Loaded
from appliance.traffic.quotas import Quotas
from store.quotas import QuotaLog

log = logging.getLogger(__name__)


class Service:
    """Everything between the sockets and the state. Belongs to the event loop's thread."""

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        state: State,
        manager: Manager,
        held: contextlib.AsyncExitStack,
        launch: Launch,
        front_module: str,
    ) -> None:
        """What is opened here ends with `held`. Raises SettingsError, ListenError or a StoreError."""
        settings, control, started_at = loaded.settings, state.control, time.time()
        # Requests: who asks, what they may use, where it is written down.
        identities = IdentityTable(lambda: control.policies, settings.unix)
        quotas = Quotas(time.monotonic)
        self.levels = LevelKeeper(quotas, QuotaLog(state.history))
        self.kept = ContentKeeper(
            state.contents, lambda: control.policies, lambda: self.switchboard.settings.log
        )
        held.callback(self.kept.close)
        counted = CountedRows(
            state.requests, ShownTenants(settings.metrics.tenants, lambda: control.policies.tenants)
        )
        self.switchboard = Switchboard(
            settings,
            describe_models(loaded),
            rows=counted,
            salt=cache_salts(control),
            quotas=quotas,
            identities=identities,
            keep=self.kept.keep,
            launch=launch,
            front_module=front_module,
        )
        self.switchboard.tell_identities()
        self.levels.restore(state.history.path)
        # The outside: apps, operators, monitoring, the service manager.
        self.doors = Doors(manager.sockets, settings, self.switchboard.dealer, self.switchboard.problems.note)
        held.callback(self.doors.close)
        self.authenticator = Authenticator(settings.admin, keys_of(control))
        self.admin = AdminServer(settings.admin_socket, settings.unix.admin_mode, self.doors.admin)
        scrape = Scraper(
            counted,
            self.switchboard,
            control,
            [state.history, state.contents],
            self.doors,
            version=service_version(),
            started_at=started_at,
        )
        self.metrics = MetricsServer(scrape)
        self.metrics.change(settings, self.metrics.prepare(settings))
        self.notifier = Notifier(manager, self.switchboard.readiness, lambda: state.stalled_s)
        held.callback(self.notifier.close)
        # Operators: what they see and do.
        clock = ClockGuard()
        reloader = Reloader(
            loaded,
            reread,
            self.switchboard,
            [self.doors, self.metrics],
            reload_hooks(self.switchboard, identities, self.authenticator, self.admin, counted.tenants),
        )

        def status() -> Status:
            return status_of(
                self.switchboard,
                sockets=self._sockets(),
                databases=[database_status(one) for one in (control, state.history, state.contents)],
                audit=audit_status(control.trail.state()),
                started_at=started_at,
                clock_jump_s=clock.jump_s,
            )

        self.backend, self.actions = admin_backend(
            self.switchboard, control, self.kept, reloader, status, scrape
        )
        self.housekeeper = Housekeeper(
            control, state.history, self.kept, lambda: self.switchboard.settings.log, clock
        )

    def _sockets(self) -> list[SocketStatus]:
        apps = [listener.status() for listener in self.doors.listeners]
        return [*apps, self.admin.status(), *self.metrics.status()]

    async def answer_operators(self) -> None:
        """Open `admin.sock`. Raises ListenError."""
        await self.admin.start(self.backend, self.authenticator)

    def start(self) -> None:
        """Load the models and take connections."""
        self.switchboard.start(self.doors.listeners)
        self.levels.start()
        self.notifier.start()
        self.housekeeper.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.actions.reload_on_signal)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain, at once when `hurry` is set; operators are answered until nothing runs any more."""
        log.info("stopping: running requests get %g s", self.switchboard.settings.drain_grace_s)
        self.notifier.begin_stop()
        await self.switchboard.stop(hurry)
        self.levels.close()
        await self.metrics.stop()
        await self.admin.stop()
        await self.housekeeper.stop()
