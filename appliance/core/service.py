"""The composition root: creates all components of the service, passes their dependencies to them, and starts
and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping

from appliance.admin.backend import admin_backend
from appliance.admin.callers import Authenticator, keys_of
from appliance.admin.model_states import ModelStates
from appliance.admin.models import ModelAdmin
from appliance.admin.server import AdminServer
from appliance.admin.status import StatusReader, service_version
from appliance.core.alerting import Alerting
from appliance.core.clock import ClockGuard
from appliance.core.contents import ContentKeeper
from appliance.core.controller import Controller
from appliance.core.housekeeping import Housekeeper
from appliance.core.notifier import Notifier
from appliance.core.observing import ObservingParts
from appliance.core.problems import Problems
from appliance.core.quota_levels import LevelKeeper
from appliance.core.reload import LiveSettings, Reloader
from appliance.core.reload_hooks import reload_hooks
from appliance.core.serving import ServingParts
from appliance.core.state import State, cache_salts
from appliance.core.systemd import Manager
from appliance.front_pool.identities import IdentityRegistry
from appliance.front_pool.listeners import Listeners
from appliance.models.on_demand import OnDemand
from appliance.models.operations import ModelOperations
from appliance.models.preflight_process import ModelChecks
from appliance.models.references import fallback_faults, unknown_targets
from appliance.models.registry import describe_models
from appliance.models.replica import Launch
from appliance.models.version_swaps import VersionSwaps
from appliance.monitoring.ended import EndedRequests
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.families.service import ServiceSource
from appliance.monitoring.metrics.scrape import Scraper
from appliance.monitoring.metrics.server import MetricsServer
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.settings import Loaded
from appliance.traffic.quotas import Quotas
from store.quotas import QuotaLog

log = logging.getLogger(__name__)


class Service:
    """All components of a running service. Must be used on the event loop's thread."""

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        state: State,
        manager: Manager,
        held: contextlib.AsyncExitStack,
        launch: Launch,
        front_module: str,
        checks: ModelChecks,
        broken: Mapping[str, str],
    ) -> None:
        """`held` is an exit stack. It later closes everything that this constructor opens. `broken` maps each
        model whose files have a problem to that problem. Raises SettingsError, ListenError or StoreError."""
        self.settings = LiveSettings(loaded.settings)
        settings, control, started_at = loaded.settings, state.control, time.time()
        problems, clock = Problems(), ClockGuard()
        if state.former is not None and not state.former.stopped:
            problems.note(
                "service",
                f"the previous run (process {state.former.pid}) was killed or crashed, possibly for lack of "
                "memory; see the log and the kernel's log",
            )
        # The components that serve requests: identities, quotas, the request log, stored prompts and answers,
        # fronts and models.
        identities = IdentityRegistry(lambda: control.policies, settings.unix)
        quotas = Quotas(time.monotonic)
        self.levels = LevelKeeper(quotas, QuotaLog(state.history))
        contents = ContentKeeper(state.contents, lambda: control.policies, lambda: self.settings.current.log)
        held.callback(contents.close)
        ended = EndedRequests(state.requests, lambda name: name in control.policies.tenants)
        counted = CountedRows(ended, ShownTenants(settings.metrics.tenants, lambda: control.policies.tenants))
        parts = ServingParts(
            self.settings,
            describe_models(loaded, broken=broken),
            registry=state.registry,
            rows=counted,
            salt=cache_salts(control),
            quotas=quotas,
            identities=identities,
            keep=contents.keep,
            note=problems.note,
            on_availability=lambda: self.listeners.update(),
            on_wanted=lambda name: self.on_demand.wanted(name),
            launch=launch,
            checks=checks,
            broken=broken,
            front_module=front_module,
        )
        self.operations = ModelOperations(
            state.registry, parts.models, parts.routing, parts.fronts, problems.note, loaded.model_flags
        )
        self.on_demand = OnDemand(
            self.settings,
            operations=self.operations,
            manager=parts.models,
            routing=parts.routing,
            requests=parts.requests,
            fronts=parts.fronts,
        )
        self.listeners = Listeners(manager.sockets, settings, parts.fronts.balancer, problems.note)
        held.callback(self.listeners.close)
        self.controller = Controller(
            lambda: control.policies, parts.requests, parts.models, parts.fronts, self.listeners, parts.drains
        )
        self.controller.apply_policies()
        for fault in fallback_faults(loaded, state.registry.current):
            problems.note(str(fault.place), f"{fault.description}: {fault.remedy}")
        for record, description in unknown_targets(state.registry.current, settings.models):
            problems.note(record, description)
        self.levels.restore(state.history.path)
        # Monitoring.
        scrape = self._scraper(parts, counted, state, problems, started_at)
        self.metrics = MetricsServer(scrape)
        self.metrics.change(settings, self.metrics.prepare(settings))
        self.readiness = parts.readiness
        self.notifier = Notifier(manager, parts.readiness, lambda: state.stalled_s)
        held.callback(self.notifier.close)
        # The components for operators.
        self.authenticator = Authenticator(settings.admin, keys_of(control))
        self.admin = AdminServer(settings.admin_socket, settings.unix.admin_mode, self.listeners.admin)
        self.alerting = Alerting(settings, state.history)
        held.callback(self.alerting.stop)
        reloader = Reloader(
            loaded=loaded,
            reread=reread,
            live=self.settings,
            models=parts.models,
            check_models=checks.everything,
            registry=lambda: state.registry.current,
            drains=parts.drains,
            publish=parts.fronts.publish_configuration,
            listeners=[self.listeners, self.metrics],
            hooks=reload_hooks(
                parts.fronts,
                parts.models,
                parts.requests,
                identities,
                self.authenticator,
                self.admin,
                counted.tenants,
                self.alerting,
            ),
        )
        status = StatusReader(
            settings=self.settings,
            traffic=parts.requests.state,
            models=parts.models,
            fronts=parts.fronts,
            drains=parts.drains,
            readiness=parts.readiness,
            problems=problems,
            trail=control.trail,
            databases=[control, state.history, state.contents],
            sockets=lambda: [*self.listeners.status(), self.admin.status(), *self.metrics.status()],
            clock=clock,
            started_at=started_at,
        )
        self.observing = ObservingParts(
            self.settings, state, parts, ended, status, self.alerting.manager, held
        )
        self.backend, self.actions = admin_backend(
            control=control,
            contents=contents,
            settings=self.settings,
            traffic=parts.requests.state,
            models=ModelAdmin(
                states=ModelStates(
                    operations=self.operations,
                    on_demand=self.on_demand,
                    manager=parts.models,
                    routing=parts.routing,
                    settings=self.settings,
                    declared_in=reloader.declared_in,
                ),
                operations=self.operations,
                swaps=VersionSwaps(self.operations, parts.models, parts.routing, parts.fronts, problems.note),
                on_demand=self.on_demand,
                manager=parts.models,
                routing=parts.routing,
                fronts=parts.fronts,
                check=checks.everything,
                settings=self.settings,
                declared_in=reloader.declared_in,
            ),
            shadow_results=parts.requests.shadows,
            routing=parts.routing,
            drains=parts.drains,
            canceller=parts.canceller,
            reloader=reloader,
            status=status,
            running=self.observing.running,
            alerts=self.alerting.manager,
            metrics=scrape,
            routes=self.observing.routes,
            publish=self.controller.apply_policies,
            note=problems.note,
        )
        self.housekeeper = Housekeeper(control, state.history, contents, self.settings, clock)

    def _scraper(
        self, parts: ServingParts, counted: CountedRows, state: State, problems: Problems, started_at: float
    ) -> Scraper:
        """Return the component that collects the values of the metrics."""
        return Scraper(
            counted,
            lambda: ServiceSource(
                ready=not parts.readiness.reason(),
                draining=parts.drains.of_service is not None,
                problems=problems.total,
                held=parts.requests.state.held(),
                connections=self.listeners.accepted(),
                version=service_version(),
                started_at=started_at,
            ),
            parts.requests.state,
            parts.models,
            self.on_demand,
            parts.fronts,
            state.control,
            [state.history, state.contents],
            parts.routing.names,
            parts.requests.shadows,
        )

    async def answer_operators(self) -> None:
        """Open `admin.sock`. Raises ListenError."""
        await self.admin.start(self.backend, self.authenticator)

    def start(self) -> None:
        """Load the models, and accept connections."""
        self.controller.start()
        self.operations.restore()
        self.on_demand.start()
        self.levels.start()
        self.notifier.start()
        self.housekeeper.start()
        self.alerting.start()
        self.observing.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.actions.reload_on_signal)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service and shut it down. When `hurry` is set, the drain stops waiting for requests. The
        admin API responds until all requests have ended."""
        log.info("stopping: running requests have %g s to finish", self.settings.current.drain_grace_s)
        self.notifier.begin_stop()
        self.on_demand.stop()
        self.operations.stop()
        await self.controller.stop(hurry)
        self.levels.close()
        await self.observing.stop()
        await self.metrics.stop()
        await self.admin.stop()
        await self.housekeeper.stop()
