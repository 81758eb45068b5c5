"""Answers scrapes with counters and current gauge values. A scrape's cost depends only on the number of
series: it reads no individual requests and sends nothing to front processes or replicas. A busy replica's
values come from its latest report, which is at most 100 ms or one step old.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.models.on_demand import OnDemand
from appliance.models.replica_status import replica_status
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.exposition import render
from appliance.monitoring.metrics.families.models import GatewaySource
from appliance.monitoring.metrics.families.replicas import ReplicaSource
from appliance.monitoring.metrics.families.service import ServiceSource
from appliance.monitoring.metrics.tenants import OTHERS
from appliance.traffic.shadows import ShadowResults
from appliance.traffic.state import TrafficState
from appliance.traffic.stats import ModelStats
from engine.logs import log_state
from store.control import ControlStore
from store.policies import Policies
from store.writer import Writer

SHARED_S = 0.1
"""A request for metrics that arrives within this many seconds after a scrape gets the result of that scrape.
Gateways treat metrics older than 0.2 s as stale."""


class Scraper:
    """Returns the current values of all metrics."""

    def __init__(
        self,
        counted: CountedRows,
        service: Callable[[], ServiceSource],
        traffic: TrafficState,
        models: ModelManager,
        on_demand: OnDemand,
        fronts: FrontPool,
        control: ControlStore,
        writers: Sequence[Writer],
        names: Callable[[], Collection[str]],
        shadows: ShadowResults,
    ) -> None:
        """`service` returns the source of the service-wide metrics. `names` returns the names of all models,
        versions and aliases; series with other names are removed."""
        self._families = counted.families
        self._tenants = counted.tenants
        self._service = service
        self._traffic = traffic
        self._models = models
        self._names = names
        self._shadows = shadows
        self._on_demand = on_demand
        self._fronts = fronts
        self._control = control
        self._databases: list[ControlStore | Writer] = [control, *writers]
        self._policies: Policies | None = None
        self._model_names: set[str] = set()
        self._text, self._made_at = b"", -math.inf

    def __call__(self) -> bytes:
        """Return all metrics in Prometheus' text format. The result of a scrape is reused for `SHARED_S`
        seconds."""
        now = time.monotonic()
        if now >= self._made_at + SHARED_S:
            self._text, self._made_at = self.make(), now
        return self._text

    def make(self) -> bytes:
        """Read all metrics and return their exposition text."""
        self._forget()
        self._read_service()
        self._read_models(self._traffic.model_stats())
        self._read_shadows()
        self._read_tenants()
        self._read_replicas()
        self._read_fronts()
        self._read_store()
        return render(self._families)

    def _forget(self) -> None:
        """Remove the series of deleted tenants and models."""
        families, policies = self._families, self._control.policies
        if policies is not self._policies:
            self._policies = policies
            families.limits.clear()  # an operator may have removed a tenant's limit
            if self._tenants.forget_deleted():
                families.keep("tenant", (*self._tenants, OTHERS))
        models = {*self._models.models, *self._names()}
        if models != self._model_names:
            self._model_names = models
            families.keep("model", (*models, OTHERS))

    def _read_service(self) -> None:
        families, source = self._families, self._service()
        families.service.clear()
        families.service.set(source)
        families.process.set(source)
        families.logs.clear()
        families.logs.set(log_state().dropped_lines, "core")

    def _read_models(self, models: list[ModelStats]) -> None:
        families = self._families
        families.gateways.clear()
        for model in models:
            families.models.set(model, model.name)
            families.residency.set(self._on_demand.stats(model.name), model.name)
            ready = [
                replica_status(replica)
                for replica in self._models.of(model.name)
                if replica.account is not None
            ]
            families.gateways.set(GatewaySource(model, ready), model.name)

    def _read_shadows(self) -> None:
        families = self._families
        families.shadows.clear()
        for sums in self._shadows:
            families.shadows.set(sums, sums.name, sums.unit)

    def _read_tenants(self) -> None:
        families, traffic = self._families, self._traffic
        for name in self._tenants:
            families.tenants.set(traffic.tenants.of(name), name)
            for bucket in traffic.quotas.buckets(name):
                families.limits.set(bucket, name, bucket.limit)

    def _read_replicas(self) -> None:
        families = self._families
        families.replicas.clear()
        for replica in self._models.replicas:
            status = replica_status(replica)
            families.replicas.set(ReplicaSource(status, replica), replica.model, replica.name)
            families.logs.set(status.log_dropped_lines, replica.name)

    def _read_fronts(self) -> None:
        families = self._families
        families.fronts.clear()
        for front in self._fronts.fronts:
            # The label is the front process's number, because its name changes at each restart.
            status, name = front.status(), f"front-{front.number}"
            families.fronts.set(status, name)
            families.logs.set(status.log_dropped_lines, name)

    def _read_store(self) -> None:
        for database in self._databases:
            self._families.databases.set(database.state(), database.path.stem)
        self._families.audit.set(self._control.trail.state())
