"""A scrape: the counters, and the gauges read at that moment.

Its cost depends on the number of series only: it looks at no request, and sends nothing to fronts or
replicas. The reports of computing replicas are at most 100 ms or one step old."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from appliance.core.controller import Switchboard
from appliance.front_pool.listeners import Doors
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.exposition import render
from appliance.monitoring.metrics.families import GatewaySource, ReplicaSource, ServiceSource
from appliance.monitoring.metrics.tenants import OTHERS
from appliance.traffic.stats import ModelStats
from engine.logs import log_state
from store.control import ControlStore
from store.policies import Policies
from store.writer import Writer

_KEPT_S = 0.05


class Scraper:
    """Returns the metrics of one service."""

    def __init__(
        self,
        counted: CountedRows,
        switchboard: Switchboard,
        control: ControlStore,
        writers: Sequence[Writer],
        doors: Doors,
        *,
        version: str,
        started_at: float,
    ) -> None:
        self._families = counted.families
        self._tenants = counted.tenants
        self._switchboard = switchboard
        self._control = control
        self._databases: list[ControlStore | Writer] = [control, *writers]
        self._doors = doors
        self._policies: Policies | None = None
        self._models: list[str] = []
        self._text, self._made_at = b"", -math.inf
        self._version = version
        self._started_at = started_at

    def __call__(self) -> bytes:
        """Return every metric in Prometheus' text format, at most 50 ms old, so that frequent scrapes do not
        keep the core busy."""
        now = time.monotonic()
        if now >= self._made_at + _KEPT_S:
            self._text, self._made_at = self.make(), now
        return self._text

    def make(self) -> bytes:
        """Return the present text."""
        self._forget()
        self._read_service()
        self._read_models(self._switchboard.requests.models())
        self._read_tenants()
        self._read_replicas()
        self._read_fronts()
        self._read_store()
        return render(self._families)

    def _forget(self) -> None:
        """Drop the series of deleted tenants and models."""
        families, policies = self._families, self._control.policies
        if policies is not self._policies:
            self._policies = policies
            families.limits.clear()  # a limit may have been lifted
            if self._tenants.forget_deleted():
                for family in families.by("tenant"):
                    family.keep("tenant", (*self._tenants, OTHERS))
        models = list(self._switchboard.models)
        if models != self._models:
            self._models = models
            for family in families.by("model"):
                family.keep("model", (*models, OTHERS))

    def _read_service(self) -> None:
        families = self._families
        source = ServiceSource(
            self._switchboard,
            {listener.name: listener.accepted for listener in self._doors.listeners},
            self._version,
            self._started_at,
        )
        families.service.clear()
        families.service.set(source)
        families.process.set(source)
        families.logs.clear()
        families.logs.set(log_state().dropped_lines, "core")

    def _read_models(self, models: list[ModelStats]) -> None:
        families, fleet = self._families, self._switchboard.fleet
        families.gateways.clear()
        for model in models:
            families.models.set(model, model.name)
            ready = [replica.status() for replica in fleet.of(model.name) if replica.account is not None]
            families.gateways.set(GatewaySource(model, ready), model.name)

    def _read_tenants(self) -> None:
        families, requests = self._families, self._switchboard.requests
        for name in self._tenants:
            families.tenants.set(requests.tenant(name), name)
            for bucket in requests.quotas.buckets(name):
                families.limits.set(bucket, name, bucket.limit)

    def _read_replicas(self) -> None:
        families = self._families
        families.replicas.clear()
        for replica in self._switchboard.replicas:
            status = replica.status()
            families.replicas.set(ReplicaSource(status, replica), replica.model, replica.name)
            families.logs.set(status.log_dropped_lines, replica.name)

    def _read_fronts(self) -> None:
        families = self._families
        families.fronts.clear()
        for front in self._switchboard.fronts:
            # The number stays; the name of the process changes with each restart.
            status, name = front.status(), f"front-{front.number}"
            families.fronts.set(status, name)
            families.logs.set(status.log_dropped_lines, name)

    def _read_store(self) -> None:
        for database in self._databases:
            self._families.databases.set(database.state(), database.path.stem)
        self._families.audit.set(self._control.trail.state())
