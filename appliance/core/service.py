"""The composition root: creates the service's components, passes them their dependencies, and starts and
stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping

from appliance.admin.app import Backend
from appliance.admin.auditing import AuditedActions
from appliance.admin.backend import admin_backend
from appliance.admin.callers import Authenticator, keys_of
from appliance.admin.model_states import ModelStates
from appliance.admin.models import ModelAdmin
from appliance.admin.server import AdminServer
from appliance.admin.status import StatusReader, service_version
from appliance.core.alerting import Alerting
from appliance.core.clock import ClockGuard
from appliance.core.controller import Controller
from appliance.core.housekeeping import Housekeeper
from appliance.core.notifier import Notifier
from appliance.core.observing import ObservingParts
from appliance.core.problems import Problems
from appliance.core.reload import LiveSettings, Reloader
from appliance.core.reload_hooks import reload_hooks
from appliance.core.request_records import RequestRecords
from appliance.core.serving import ServingParts
from appliance.core.state import State, cache_salts
from appliance.core.systemd import Manager
from appliance.front_pool.listeners import Listeners
from appliance.models.preflight_process import ModelChecks
from appliance.models.references import fallback_faults, unknown_targets
from appliance.models.registry import describe_models
from appliance.models.replica import Launch
from appliance.monitoring.metrics.families.service import ServiceSource
from appliance.monitoring.metrics.scrape import Scraper
from appliance.monitoring.metrics.server import MetricsServer
from appliance.settings import Loaded

log = logging.getLogger(__name__)


class Service:
    """All components of a running service. Must be used on the event loop thread."""

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
        """The `held` exit stack closes everything that the constructor opens. `broken` maps each model with
        faulty files to a description of the problem. Raises SettingsError, ListenError or StoreError if a
        component cannot be created."""
        self.settings = LiveSettings(loaded.settings)
        self._state, self._started_at, self._clock = state, time.time(), ClockGuard()
        self._problems = _problems_at_start(loaded, state)
        # The components that serve requests.
        self._records = RequestRecords(self.settings, state, held)
        self._serving = serving = self._serving_parts(loaded, launch, front_module, checks, broken)
        self.listeners = Listeners(
            manager.sockets, loaded.settings, serving.fronts.balancer, self._problems.note
        )
        held.callback(self.listeners.close)
        self.controller = Controller(
            policies=lambda: state.control.policies,
            requests=serving.requests,
            models=serving.models,
            fronts=serving.fronts,
            listeners=self.listeners,
            drains=serving.drains,
        )
        self.controller.apply_policies()
        self._records.levels.restore(state.history.path)
        # The components that report to monitoring systems and to the service manager.
        scrape = self._scraper()
        self.metrics = MetricsServer(scrape)
        self.metrics.change(loaded.settings, self.metrics.prepare(loaded.settings))
        self.readiness = serving.readiness
        self.notifier = Notifier(manager, serving.readiness, lambda: state.stalled_s)
        held.callback(self.notifier.close)
        # The components that serve operators.
        self.authenticator = Authenticator(loaded.settings.admin, keys_of(state.control))
        self.admin = AdminServer(
            loaded.settings.admin_socket, loaded.settings.unix.admin_mode, self.listeners.admin
        )
        self.alerting = Alerting(loaded.settings, state.history)
        held.callback(self.alerting.stop)
        reloader = self._reloader(loaded, reread, checks)
        status = self._status_reader()
        self.observing = ObservingParts(
            self.settings, state, serving, self._records.ended, status, self.alerting.manager, held
        )
        self.backend, self.actions = self._admin_backend(reloader, status, scrape, checks)
        self.housekeeper = Housekeeper(
            state.control, state.history, self._records.contents, self.settings, self._clock
        )

    def _serving_parts(
        self,
        loaded: Loaded,
        launch: Launch,
        front_module: str,
        checks: ModelChecks,
        broken: Mapping[str, str],
    ) -> ServingParts:
        """Return the components that serve requests. They use `self.listeners`, which is created later."""
        return ServingParts(
            self.settings,
            describe_models(loaded, broken=broken),
            registry=self._state.registry,
            model_flags=loaded.model_flags,
            records=self._records,
            salt=cache_salts(self._state.control),
            note=self._problems.note,
            on_availability=lambda: self.listeners.update(),
            launch=launch,
            checks=checks,
            broken=broken,
            front_module=front_module,
        )

    def _scraper(self) -> Scraper:
        """Return the component that collects metric values."""
        serving, state = self._serving, self._state
        return Scraper(
            self._records.counted,
            lambda: ServiceSource(
                ready=not serving.readiness.reason(),
                draining=serving.drains.of_service is not None,
                problems=self._problems.total,
                held=serving.requests.state.held(),
                connections=self.listeners.accepted(),
                version=service_version(),
                started_at=self._started_at,
            ),
            serving.requests.state,
            serving.models,
            serving.on_demand,
            serving.fronts,
            state.control,
            [state.history, state.contents],
            serving.routing.names,
            serving.requests.shadows,
        )

    def _reloader(self, loaded: Loaded, reread: Callable[[], Loaded], checks: ModelChecks) -> Reloader:
        """Return the component that reloads the settings."""
        serving, records = self._serving, self._records
        return Reloader(
            loaded=loaded,
            reread=reread,
            live=self.settings,
            models=serving.models,
            check_models=checks.everything,
            registry=lambda: self._state.registry.current,
            drains=serving.drains,
            publish=serving.fronts.publish_configuration,
            listeners=[self.listeners, self.metrics],
            hooks=reload_hooks(
                serving.fronts,
                serving.models,
                serving.requests,
                records.identities,
                self.authenticator,
                self.admin,
                records.counted.tenants,
                self.alerting,
            ),
        )

    def _status_reader(self) -> StatusReader:
        """Return the component that collects the status for operators."""
        serving, state = self._serving, self._state
        return StatusReader(
            settings=self.settings,
            traffic=serving.requests.state,
            models=serving.models,
            fronts=serving.fronts,
            drains=serving.drains,
            readiness=serving.readiness,
            problems=self._problems,
            trail=state.control.trail,
            databases=[state.control, state.history, state.contents],
            sockets=lambda: [*self.listeners.status(), self.admin.status(), *self.metrics.status()],
            clock=self._clock,
            started_at=self._started_at,
        )

    def _admin_backend(
        self, reloader: Reloader, status: StatusReader, scrape: Scraper, checks: ModelChecks
    ) -> tuple[Backend, AuditedActions]:
        """Return the admin API's backend and the object that performs its actions."""
        serving = self._serving
        states = ModelStates(
            registry=self._state.registry,
            operations=serving.operations,
            on_demand=serving.on_demand,
            manager=serving.models,
            routing=serving.routing,
            settings=self.settings,
            declared_in=reloader.declared_in,
        )
        models = ModelAdmin(
            states=states,
            registry=self._state.registry,
            operations=serving.operations,
            swaps=serving.swaps,
            on_demand=serving.on_demand,
            manager=serving.models,
            routing=serving.routing,
            fronts=serving.fronts,
            check=checks.everything,
            settings=self.settings,
            declared_in=reloader.declared_in,
        )
        return admin_backend(
            control=self._state.control,
            contents=self._records.contents,
            settings=self.settings,
            traffic=serving.requests.state,
            models=models,
            shadow_results=serving.requests.shadows,
            routing=serving.routing,
            drains=serving.drains,
            canceller=serving.canceller,
            reloader=reloader,
            status=status,
            running=self.observing.running,
            alerts=self.alerting.manager,
            metrics=scrape,
            routes=self.observing.routes,
            publish=self.controller.apply_policies,
            note=self._problems.note,
        )

    async def answer_operators(self) -> None:
        """Open `admin.sock` for operators. Raises ListenError if the socket cannot be opened."""
        await self.admin.start(self.backend, self.authenticator)

    def start(self) -> None:
        """Load the models and accept connections."""
        self.controller.start()
        self._serving.operations.restore()
        self._serving.on_demand.start()
        self._records.levels.start()
        self.notifier.start()
        self.housekeeper.start()
        self.alerting.start()
        self.observing.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.actions.reload_on_signal)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service and shut it down. Once the `hurry` event is set, the drain no longer waits for
        requests. The admin API responds until all requests have finished."""
        log.info("stopping: running requests have %g s to finish", self.settings.current.drain_grace_s)
        self.notifier.begin_stop()
        self._serving.on_demand.stop()
        self._serving.operations.stop()
        await self.controller.stop(hurry)
        self._records.levels.close()
        await self.observing.stop()
        await self.metrics.stop()
        await self.admin.stop()
        await self.housekeeper.stop()


def _problems_at_start(loaded: Loaded, state: State) -> Problems:
    """Return the problems that already exist at startup."""
    problems = Problems()
    if state.former is not None and not state.former.stopped:
        problems.note(
            "service",
            f"the previous run (process {state.former.pid}) was killed or crashed, possibly because it "
            "ran out of memory; see the service's log and the kernel log",
        )
    for fault in fallback_faults(loaded, state.registry.current):
        problems.note(str(fault.place), f"{fault.description}: {fault.remedy}")
    for record, description in unknown_targets(state.registry.current, loaded.settings.models):
        problems.note(record, description)
    return problems
