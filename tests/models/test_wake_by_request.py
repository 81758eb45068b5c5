"""Tests of requests that wait in a front process while the version that they name is asleep. The front's
catalog and the core's operations are real; the test passes the messages between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.channel.identity import Identity
from appliance.channel.served_models import ServedModel
from appliance.front.errors import ApiError
from appliance.front.models import Catalog, LoadedModel
from appliance.models.routing import Routing
from appliance.settings import Settings
from tests.models.on_demand_site import Site, play, served
from tests.models.test_operations import SimulatedFronts

IDENTITY = Identity(tenant="acme")


class OneFront(SimulatedFronts):
    """A stand-in for a service with one front. The front receives new routes immediately, but confirms the
    routes to a model only while `confirms` is set."""

    def __init__(self, routing: Callable[[], Routing]) -> None:
        super().__init__(routing)
        self.catalog = Catalog()
        self.catalog.max_held, self.catalog.hold_timeout_s = 10, 60.0
        self.confirms = asyncio.Event()
        self.confirms.set()

    def publish_configuration(self) -> None:
        super().publish_configuration()
        self.catalog.route(self._routing().routes())

    async def routed(self) -> None:
        await super().routed()
        if self._routing().unit_of("chat"):
            await self.confirms.wait()


class WaitingSite(Site):
    """A site with one front."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Settings(), OneFront)

    def request(self, disconnected: bool = False) -> asyncio.Task[LoadedModel]:
        """Send a request to the front."""
        found = self.fronts.catalog.find("chat", IDENTITY, lambda: disconnected)
        return asyncio.get_running_loop().create_task(found)

    def report(self) -> None:
        """Pass one report of the front to the core."""
        for name in self.fronts.catalog.wanted:
            self.on_demand.wanted(name)

    async def start(self) -> None:
        """Load version 1."""
        await self.fronts.catalog.replace([served("chat@1")])
        await self.operations.load(self.version(1))

    async def begin_sleep(self) -> asyncio.Task[None]:
        """Start putting version 1 to sleep, and wait until no route leads to it."""
        sleeping = asyncio.ensure_future(self.operations.sleep(self.version(1), 60.0))
        await self.until(lambda: not self.routing.unit_of("chat"), "the new routes")
        return sleeping


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WaitingSite:
    async def load_model(model: ServedModel) -> LoadedModel:
        nothing: Any = None
        return LoadedModel(model, nothing, nothing)

    monkeypatch.setattr("appliance.front.models.load_model", load_model)
    return WaitingSite(tmp_path)


def test_a_request_wakes_a_version_that_sleeps(site: WaitingSite) -> None:
    async def scenario() -> None:
        await site.start()
        await (await site.begin_sleep())
        waiting = site.request()
        await site.until(lambda: site.fronts.catalog.wanted == ("chat",), "the request")
        site.report()
        assert (await waiting).unit == "chat@1"
        assert site.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1"]
        assert site.fronts.catalog.wanted == ()

    play(site, scenario)


def test_a_request_that_arrives_before_the_version_sleeps_wakes_it_afterwards(site: WaitingSite) -> None:
    async def scenario() -> None:
        await site.start()
        site.manager.busy.add("chat@1")
        sleeping = await site.begin_sleep()
        waiting = site.request()
        await site.until(lambda: site.fronts.catalog.wanted == ("chat",), "the request")
        site.report()
        await asyncio.sleep(0.05)
        assert site.manager.history == ["load chat@1"] and not waiting.done()
        site.manager.busy.clear()
        await sleeping
        assert (await waiting).unit == "chat@1"
        assert site.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1"]

    play(site, scenario)


def test_a_request_that_the_core_ignores_is_reported_again_and_wakes_the_version(site: WaitingSite) -> None:
    """The version goes to sleep a second time while its first wake is incomplete, because the front has not
    confirmed the routes yet. The core therefore ignores the first report of the second request."""

    async def scenario() -> None:
        await site.start()
        await (await site.begin_sleep())
        first = site.request()
        await site.until(lambda: site.fronts.catalog.wanted == ("chat",), "the first request")
        site.fronts.confirms.clear()
        site.report()
        assert (await first).unit == "chat@1"
        sleeping = await site.begin_sleep()
        second = site.request()
        await site.until(lambda: site.fronts.catalog.wanted == ("chat",), "the second request")
        site.report()
        site.fronts.confirms.set()
        await sleeping
        await asyncio.sleep(0.05)
        twice = ["load chat@1", "sleep chat@1", "wake chat@1", "sleep chat@1"]
        assert site.manager.history == twice and not second.done()  # the core ignored the report
        site.report()
        assert (await second).unit == "chat@1"
        assert site.manager.history == [*twice, "wake chat@1"]

    play(site, scenario)


def test_a_request_whose_client_has_disconnected_wakes_nothing(site: WaitingSite) -> None:
    async def scenario() -> None:
        await site.start()
        await (await site.begin_sleep())
        with pytest.raises(ApiError):
            await site.request(disconnected=True)
        assert site.fronts.catalog.wanted == ()

    play(site, scenario)
