"""Counts requests when their request log rows are closed, so that the counters agree with the log."""

from __future__ import annotations

from appliance.monitoring.metrics.families import Families
from appliance.monitoring.metrics.tenants import OTHERS, ShownTenants
from appliance.traffic.request_manager import RowSink
from store.requests import RequestRow


class CountedRows:
    """Counts finished requests and passes their rows on to the request log."""

    def __init__(self, rows: RowSink, tenants: ShownTenants) -> None:
        self.families = Families()
        self.tenants = tenants
        self._rows = rows

    def open(self, row: RequestRow) -> bool:
        """Pass an admitted request's row on to the request log."""
        return self._rows.open(row)

    def end(self, row: RequestRow) -> bool:
        """Count a finished request and pass its row on to the request log."""
        self._count(row)
        return self._rows.end(row)

    def _count(self, row: RequestRow) -> None:
        families = self.families
        # If the row has no version, the requested model is unknown. Clients can invent any number of model
        # names, so unknown names are not used as labels.
        model = row.model if row.model and row.version else OTHERS
        families.rows.count(row, model, row.request_class)
        families.retries.count(row, model)
        if row.fallback_of:
            families.fallbacks.count(row, row.fallback_of)
        families.tenant_rows.count(row, self.tenants.label(row.tenant or ""))
        # A retry that joined a running request or got a stored answer was not run separately, so its times
        # are not counted.
        if row.retry not in ("joined", "repeated"):
            families.times.count(row, model, row.request_class)
            if row.unit and row.unit != row.model:
                families.arms.count(row, model, row.unit)
