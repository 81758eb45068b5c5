"""The components of a core that handle requests, and the core's metrics, without processes or sockets.
`scripts/bench_metrics` also uses them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.channel.front_messages import Admit
from appliance.channel.identity import Identity
from appliance.core.serving import ServingParts
from appliance.front_pool.identities import IdentityRegistry
from appliance.models.registry import describe_models
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.families.service import ServiceSource
from appliance.monitoring.metrics.scrape import Scraper
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.settings import Flags, read_settings
from appliance.settings.fields import QueueSettings
from appliance.traffic.quotas import Quotas
from store.control import ControlStore
from store.policies import Policies, TenantRecord
from store.registry import ModelRegistry
from store.requests import RequestRow


class NoRows:
    """A request log that stores nothing."""

    def open(self, row: RequestRow) -> bool:
        return True

    def end(self, row: RequestRow) -> bool:
        return True


class Parts:
    """A service for the demo model. Its replica never starts, so all requests wait."""

    def __init__(self, folder: Path, *tenants: TenantRecord, most_waiting: int = 100) -> None:
        loaded = read_settings(Flags(run_dir=str(folder / "run"), state_dir=str(folder)), {})
        loaded.settings.queue = QueueSettings(limit=most_waiting, tokens=1 << 40)
        policies = Policies(tenants)
        self.control = ControlStore(folder / "control.db")
        self.control.start()
        self.counted = CountedRows(NoRows(), ShownTenants(200, lambda: policies.tenants))
        records: Any = SimpleNamespace(
            counted=self.counted,
            quotas=Quotas(time.monotonic),
            identities=IdentityRegistry(lambda: policies, loaded.settings.unix),
            contents=SimpleNamespace(keep=lambda message, descriptor: None),
        )
        self.serving = ServingParts(
            lambda: loaded.settings,
            describe_models(loaded),
            registry=ModelRegistry(self.control),
            model_flags={},
            records=records,
            salt=str,
            note=lambda where, description: None,
            on_availability=lambda: None,
        )
        self.serving.requests.set_policies(policies)
        source = ServiceSource(
            ready=False,
            draining=False,
            problems=0,
            held=0,
            connections={},
            version="0",
            started_at=time.time(),
        )
        self.scrape = Scraper(
            self.counted,
            lambda: source,
            self.serving.requests.state,
            self.serving.models,
            self.serving.on_demand,
            self.serving.fronts,
            self.control,
            [],
            self.serving.routing.names,
            self.serving.requests.shadows,
        )

    def ask(self, number: int, tenant: str, asked_class: str = "") -> None:
        """Send an `Admit` message, as a front does."""
        admit = Admit(
            request_id=f"w{number}",
            identity=Identity(tenant=tenant, highest_class=0),
            peer="uid 0",
            endpoint="/v1/completions",
            model="demo",
            stream=True,
            submissions=1,
            num_seqs=1,
            prompt_tokens=512,
            max_tokens=256,
            arrived_at=time.time(),
            asked_class=asked_class,
        )
        self.serving.requests.admit("front-0", admit)

    def close(self) -> None:
        self.control.close()
