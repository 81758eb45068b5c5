"""Determines whether the service and its models can answer requests and, if not, why. The result is reported
to gateways, operators and the service manager. Each call reads the state of `Drains`, `ModelManager`,
`FrontPool` and the request manager; this module stores no state of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.channel.core_messages import Configure
from appliance.channel.served_models import Route
from appliance.core.drains import STOPPING, Drains
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.models.replica import Replica
from appliance.models.replica_status import replica_detail
from appliance.models.routing import Routing
from appliance.settings import Settings
from appliance.traffic.state import TrafficState


@dataclass
class Readiness:
    """Determines from the other components' state whether the service is ready."""

    settings: Callable[[], Settings]
    traffic: TrafficState
    models: ModelManager
    routing: Routing
    fronts: FrontPool
    drains: Drains

    def reason(self) -> str:
        """Return why a required model is not ready, or an empty string if all are ready. Required models
        drained by an operator are ignored, unless all of them are drained."""
        names = self.models.required()
        wanted = [name for name in names if self.drains.of(name) is None]
        return self.service_drain() or "; ".join(filter(None, map(self.silence, wanted or names)))

    def started(self) -> bool:
        """Return whether at least one front and all required models are ready."""
        ready = any(front.state == "ready" for front in self.fronts.fronts)
        return ready and not any(map(self.silence, self.models.required()))

    def worth_waiting_for(self) -> bool:
        """Return whether the service manager should keep waiting for the service to start. True while a
        replica is loading, or if any model is already being served: one model that cannot start must not make
        the service manager stop the working models too.
        """
        return any(replica.state in ("starting", "loading", "ready") for replica in self.models.replicas)

    def serves(self) -> bool:
        """Return whether any model answers requests."""
        return not all(map(self.silence, self.models.models))

    def permanent_problems(self) -> str:
        """Return all models' problems if no model can be served until an operator corrects files or settings.
        Return an empty string if any model may still become ready, or if a registered version is loaded or
        being loaded."""
        models = self.models.models
        if not all(map(self.models.is_declared, models)):
            return ""
        problems = [self.models.unusable(model) or self.front_problems(model) for model in models]
        return "; ".join(problems) if all(problems) else ""

    def headline(self) -> str:
        """Return the one-line description of the service's state that `systemctl status` shows."""
        stats = self.traffic.queue_stats()
        work = f"{stats.running} running, {stats.waiting} waiting"
        if (drain := self.drains.of_service) is not None:
            return f"{drain.public_state}: {work}"
        loading = [
            f"{replica.name} {replica_detail(replica) or replica.state}"
            for replica in self.models.replicas
            if replica.state in ("starting", "loading")
        ]
        if reason := self.reason():
            return f"loading: {', '.join(loading)}" if loading else f"not ready: {reason}"
        count = sum(not self.silence(model) for model in self.models.models)
        ready = f"ready: {count} model{'s' if count != 1 else ''}, {work}"
        return f"{ready}; loading: {', '.join(loading)}" if loading else ready

    def silence(self, model: str) -> str:
        """Return why the model is not answering requests, or an empty string if it is."""
        if drain := self.drains.of(model):
            return drain.reason
        if self.models.accepts_early(model):
            return self.routing.problems.get(model, "")  # requests wait until the model is loaded
        replicas = self.models.of(model)
        if not any(replica.answers for replica in replicas):
            states = ", ".join(map(_state, replicas))
            return f"model {model!r} is unavailable ({states or 'it currently has no replica'})"
        problem = self.front_problems(model)
        return f"model {model!r} is unavailable ({problem})" if problem else ""

    def _silence_of(self, route: Route) -> str:
        if not route.unit:
            return route.problem if route.on_demand else f"model {route.name!r} is being loaded"
        silent = [self.silence(unit) for unit in [arm.unit for arm in route.arms] or [route.unit]]
        return "" if "" in silent else silent[0]

    def service_drain(self) -> str:
        """Return why the whole service refuses requests, or an empty string if it accepts them."""
        if self.drains.stopping is not None:
            return STOPPING
        drain = self.drains.of_service
        return drain.reason if drain is not None else ""

    def front_problems(self, model: str) -> str:
        """Return why fronts cannot serve the model, or an empty string if they all can."""
        names: dict[str, list[str]] = {}
        for front in self.fronts.fronts:
            if (problem := front.report.problems.get(model)) is not None:
                names.setdefault(problem, []).append(front.name)
        return "; ".join(f"{', '.join(fronts)}: {text}" for text, fronts in names.items())

    def configuration(self) -> Configure:
        """Return the fronts' current configuration."""
        settings, reason, drain = self.settings(), self.reason(), self.service_drain()
        routes = self.routing.routes()
        return Configure(
            front="",
            models=list(self.models.models.values()),
            routes=routes,
            max_held=settings.queue.limit,
            hold_timeout_s=settings.queue.timeout_s,
            limits=settings.limits,
            ready=not reason,
            reason=reason,
            silent={route.name: text for route in routes if (text := drain or self._silence_of(route))},
            log_level=settings.log_level,
            retries=settings.idempotency,
            keeping=settings.log,
        )


def _state(replica: Replica) -> str:
    failure = f": {replica.failure}" if replica.failure else ""
    return f"{replica.name} is {replica.client_state}{failure}"
