"""The table of all metrics: name, meaning, unit, labels and the function that reads the value.
`docs/metrics.md` is generated from this table. Metrics that are read from the same kind of object form a
group, whose labels identify the object. If a metric has additional labels, its function returns a mapping
from label values to numbers. Each module of this package declares one component's groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from appliance.models.residency import Residency
from appliance.monitoring.metrics.exposition import MetricFamily
from appliance.monitoring.metrics.families.fronts import FRONTS
from appliance.monitoring.metrics.families.models import GATEWAYS, MODELS, RESIDENCY, SHADOWS, GatewaySource
from appliance.monitoring.metrics.families.replicas import REPLICAS, ReplicaSource
from appliance.monitoring.metrics.families.requests import ARMS, FALLBACKS, RETRIES, ROWS, TIMES
from appliance.monitoring.metrics.families.service import LOGS, PROCESS, SERVICE, ServiceSource
from appliance.monitoring.metrics.families.store import AUDIT, DATABASES
from appliance.monitoring.metrics.families.tenants import LIMITS, TENANT_ROWS, TENANTS
from appliance.monitoring.metrics.metric import Group
from appliance.protocol.status import FrontStatus
from appliance.traffic.buckets import Bucket
from appliance.traffic.shadows import ShadowSums
from appliance.traffic.stats import ModelStats
from appliance.traffic.tenants import TenantTraffic
from store.requests import RequestRow
from store.structs import WriterState
from store.trail import TrailState


class Families:
    """All metrics, in display order."""

    def __init__(self) -> None:
        self.service: Group[ServiceSource] = Group((), *SERVICE)
        self.rows: Group[RequestRow] = Group(("model", "class"), *ROWS)
        self.retries: Group[RequestRow] = Group(("model",), *RETRIES)
        self.times: Group[RequestRow] = Group(("model", "class"), *TIMES)
        self.arms: Group[RequestRow] = Group(("model", "unit"), *ARMS)
        self.fallbacks: Group[RequestRow] = Group(("model",), *FALLBACKS)
        self.shadows: Group[ShadowSums] = Group(("model", "unit"), *SHADOWS)
        self.models: Group[ModelStats] = Group(("model",), *MODELS)
        self.residency: Group[Residency] = Group(("model",), *RESIDENCY)
        self.tenant_rows: Group[RequestRow] = Group(("tenant",), *TENANT_ROWS)
        self.tenants: Group[TenantTraffic] = Group(("tenant",), *TENANTS)
        self.limits: Group[Bucket] = Group(("tenant", "limit"), *LIMITS)
        self.replicas: Group[ReplicaSource] = Group(("model", "replica"), *REPLICAS)
        self.fronts: Group[FrontStatus] = Group(("front",), *FRONTS)
        self.databases: Group[WriterState] = Group(("database",), *DATABASES)
        self.audit: Group[TrailState] = Group((), *AUDIT)
        self.logs: Group[int] = Group(("process",), *LOGS)
        self.process: Group[ServiceSource] = Group((), *PROCESS)
        self.gateways: Group[GatewaySource] = Group(("model_name",), *GATEWAYS)

    def groups(self) -> list[Group[Any]]:
        """Return all groups of metrics."""
        return list(vars(self).values())

    def __iter__(self) -> Iterator[MetricFamily[Any]]:
        return (family for group in self.groups() for family in group.families)

    def keep(self, label: str, values: Collection[str]) -> None:
        """Remove all series with a value of `label` that is not in `values`. Series without this label are
        kept."""
        for group in self.groups():
            group.keep(label, values)
