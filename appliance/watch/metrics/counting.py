"""Counts requests as their rows end, so that the counters and the request log cannot disagree."""

from __future__ import annotations

from appliance.traffic.requests import RowSink
from appliance.watch.metrics.families import Families
from appliance.watch.metrics.tenants import OTHERS, ShownTenants
from store.requests import RequestRow

_MS = 1e-3


class CountedRows:
    """Hands rows on to the request log, and counts those that end."""

    def __init__(self, rows: RowSink, tenants: ShownTenants) -> None:
        self.families = Families()
        self.tenants = tenants
        self._rows = rows

    def open(self, row: RequestRow) -> bool:
        """A request was admitted."""
        return self._rows.open(row)

    def end(self, row: RequestRow) -> bool:
        """A request has ended."""
        self._count(row)
        return self._rows.end(row)

    def _count(self, row: RequestRow) -> None:
        families, ended = self.families, outcome(row)
        # A row without a version is of a name that is no model: a client may have made it up.
        model = row.model if row.model and row.version else OTHERS
        by_class = (model, row.request_class)
        families.requests.add(1, *by_class, ended)
        families.prompt_tokens.add(row.prompt_tokens, *by_class)
        families.cached_tokens.add(row.cached_tokens, *by_class)
        families.generated_tokens.add(row.generated_tokens, *by_class)
        families.billed_tokens.add(row.billed_tokens, *by_class)
        families.request_preemptions.add(row.preemptions, *by_class)

        tenant = self.tenants.label(row.tenant or "")
        families.tenant_requests.add(1, tenant, ended)
        families.tenant_prompt_tokens.add(row.prompt_tokens, tenant)
        families.tenant_cached_tokens.add(row.cached_tokens, tenant)
        families.tenant_generated_tokens.add(row.generated_tokens, tenant)
        families.tenant_billed_tokens.add(row.billed_tokens, tenant)

        if row.retry is not None:
            families.retries.add(1, model, row.retry)
        if row.retry in ("joined", "repeated"):
            # Answered from another one's run: its times are no measure of the box.
            return
        if row.queue_ms is not None:
            families.queue_seconds.observe(row.queue_ms * _MS, *by_class)
        if row.ttft_ms is not None:
            families.first_token_seconds.observe(row.ttft_ms * _MS, *by_class)
        if row.itl_ms is not None:
            families.next_token_seconds.observe(row.itl_ms * _MS, *by_class)
        if row.e2e_ms is not None and ended == "ok":
            families.request_seconds.observe(row.e2e_ms * _MS, *by_class)


def outcome(row: RequestRow) -> str:
    """How a request ended: "ok", "cancelled", "refused", "rejected" or "failed"."""
    status = row.status or 500
    if status < 400:
        # A stream's status was said before it failed.
        return "failed" if row.error else "ok"
    if status == 499:
        return "cancelled"
    if status in (429, 503):
        return "refused"
    return "rejected" if status < 500 else "failed"
