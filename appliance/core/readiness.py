"""What answers now and what does not, in words: for gateways, operators and the service manager."""

from __future__ import annotations

from typing import Protocol

from appliance.core.drains import STOPPING, Drain, Drains
from appliance.front_pool.front import Front
from appliance.messages import ServedModel
from appliance.models.manager import Fleet
from appliance.models.replica import Replica
from appliance.traffic.request_manager import RequestManager


class House(Protocol):
    """Whose readiness it is."""

    requests: RequestManager
    fleet: Fleet
    fronts: list[Front]
    drains: Drains
    stopping: Drain | None

    @property
    def models(self) -> dict[str, ServedModel]: ...
    @property
    def replicas(self) -> list[Replica]: ...


class Readiness:
    """Looks at the house whenever it is asked."""

    def __init__(self, house: House) -> None:
        self._house = house

    def reason(self) -> str:
        """Why not every model answers; empty when all do. A model that an operator took out of service is
        not looked for, unless it is the last one."""
        wanted = [model for model in self._house.models if self._house.drains.of(model) is None]
        return self.closed() or "; ".join(filter(None, map(self.silence, wanted or self._house.models)))

    def started(self) -> bool:
        """Whether what the service is for is there: a front, and every pinned model."""
        fronts = any(front.state == "ready" for front in self._house.fronts)
        return fronts and not any(map(self.silence, self._house.fleet.pinned()))

    def worth_waiting_for(self) -> bool:
        """Whether a start that is not complete should go on: something is on its way, or one model answers
        already, which must not end because another is broken."""
        return any(replica.state in ("starting", "loading", "ready") for replica in self._house.replicas)

    def headline(self) -> str:
        """The service in a line, as `systemctl status` shows it."""
        figures = self._house.requests.stats()
        work = f"{figures.running} running, {figures.waiting} waiting"
        closing = self._house.stopping or self._house.drains.of(None)
        if closing is not None:
            return f"{closing.state_word}: {work}"
        loading = [
            f"{replica.name} {replica.detail or replica.state}"
            for replica in self._house.replicas
            if replica.state in ("starting", "loading")
        ]
        if reason := self.reason():
            return f"loading: {', '.join(loading)}" if loading else f"not ready: {reason}"
        models = f"{len(self._house.models)} model{'s' if len(self._house.models) != 1 else ''}"
        return f"ready: {models}, {work}"

    def silence(self, model: str) -> str:
        """Why the model does not answer; empty when it does."""
        if drain := self._house.drains.of(model):
            return drain.why
        replicas = self._house.fleet.of(model)
        if not any(replica.answers for replica in replicas):
            states = ", ".join(f"{replica.name} is {replica.word}" for replica in replicas)
            return f"model {model!r} does not answer ({states or 'it has no replica now'})"
        problem = self.front_trouble(model)
        return f"model {model!r} does not answer ({problem})" if problem else ""

    def closed(self) -> str:
        """Why nothing new is taken at all; empty if it is."""
        if self._house.stopping is not None:
            return STOPPING
        drain = self._house.drains.of(None)
        return drain.why if drain is not None else ""

    def front_trouble(self, model: str) -> str:
        """Why a front cannot serve the model; empty when all can."""
        troubled: dict[str, list[str]] = {}
        for front in self._house.fronts:
            if model in front.problems:
                troubled.setdefault(front.problems[model], []).append(front.name)
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in troubled.items())
