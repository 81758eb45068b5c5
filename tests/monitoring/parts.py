"""A core's parts around its metrics, without processes and sockets; `scripts/bench_metrics` has them too."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.core.controller import Switchboard
from appliance.front_pool.identities import IdentityTable
from appliance.messages import Admit, Identity
from appliance.models.registry import describe_models
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.scrape import Scraper
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.settings import Flags, read_settings
from appliance.settings.fields import QueueSettings
from appliance.traffic.quotas import Quotas
from store.control import ControlStore
from store.policies import Policies, TenantRecord
from store.requests import RequestRow


class NoRows:
    """A request log that keeps nothing."""

    def open(self, row: RequestRow) -> bool:
        return True

    def end(self, row: RequestRow) -> bool:
        return True


class Parts:
    """Of a service for the demo model, whose replica never comes: what is asked waits."""

    def __init__(self, folder: Path, *tenants: TenantRecord, most_waiting: int = 100) -> None:
        loaded = read_settings(Flags(run_dir=str(folder / "run"), state_dir=str(folder)), {})
        loaded.settings.queue = QueueSettings(limit=most_waiting, tokens=1 << 40)
        policies = Policies(tenants)
        self.control = ControlStore(folder / "control.db")
        self.control.start()
        self.counted = CountedRows(NoRows(), ShownTenants(200, lambda: policies.tenants))
        self.switchboard = Switchboard(
            loaded.settings,
            describe_models(loaded),
            rows=self.counted,
            keep=lambda message, descriptor: None,
            salt=str,
            quotas=Quotas(time.monotonic),
            identities=IdentityTable(lambda: policies, loaded.settings.unix),
        )
        self.switchboard.tell_identities()
        doors: Any = SimpleNamespace(listeners=[])
        self.scrape = Scraper(
            self.counted, self.switchboard, self.control, [], doors, version="0", started_at=time.time()
        )

    def ask(self, number: int, tenant: str, asked_class: str = "") -> None:
        """A front asks for a turn."""
        admit = Admit(
            request_id=f"w{number}",
            identity=Identity(tenant=tenant, highest_class=0),
            peer="uid 0",
            endpoint="/v1/completions",
            model="demo",
            stream=True,
            submissions=1,
            rows=1,
            prompt_tokens=512,
            max_tokens=256,
            arrived_at=time.time(),
            asked_class=asked_class,
        )
        self.switchboard.requests.admit("front-0", admit)

    def close(self) -> None:
        self.control.close()
