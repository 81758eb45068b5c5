"""Tests of what health checks and operators see of a model that accepts requests before it is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.admin.status import StatusReader
from appliance.core.readiness import Readiness
from appliance.models.replica_status import replica_status
from appliance.settings import Settings
from tests.models.on_demand_site import Site as OnDemandSite
from tests.models.on_demand_site import optional, play, quick  # noqa: F401
from tests.models.test_park_asleep import Site, run, site  # noqa: F401


def readiness_of(made: Site) -> Readiness:
    drains: Any = SimpleNamespace(of=lambda model: None, of_service=None)
    fronts: Any = SimpleNamespace(fronts=[])
    routing: Any = SimpleNamespace(problems={})
    traffic: Any = None
    return Readiness(lambda: made.settings, traffic, made.manager, routing, fronts, drains)


def state_of(made: Site, drains: Any = None) -> tuple[str, str]:
    """Return the state of the model, and its explanation, as operators see them."""
    readiness = readiness_of(made)
    others = dict.fromkeys(("traffic", "fronts", "problems", "trail", "databases", "sockets", "clock"))
    reader = StatusReader(
        settings=lambda: made.settings,
        models=made.manager,
        drains=drains or readiness.drains,
        readiness=readiness,
        started_at=0.0,
        **others,  # type: ignore[arg-type]
    )
    return reader._model_state("m", [replica_status(one) for one in made.manager.of("m")])


def test_a_parked_model_is_available_and_stays_so_while_its_request_loads_it(site: Site) -> None:  # noqa: F811
    async def scenario() -> None:
        readiness = readiness_of(site)
        assert state_of(site)[0] == "ready" and readiness.silence("m") == ""
        site.manager.park("m")
        assert state_of(site)[0] == "available"
        await site.until(lambda: not site.manager.of("m"))
        assert state_of(site) == ("available", "not in memory: the next request loads it")
        assert readiness.silence("m") == ""

        site.manager.unpark("m")
        seen = []
        while not site.manager.loaded("m"):
            seen.append(state_of(site)[0])
            assert readiness.silence("m") == "", "requests are accepted, and wait until the model is loaded"
            await asyncio.sleep(0.001)
        assert "loading" in seen
        site.manager.returned("m")
        assert state_of(site)[0] == "ready" and readiness.silence("m") == ""
        # A replica that fails later makes the model unavailable.
        site.be_silent()
        assert "unavailable" in readiness.silence("m")

    run(site, scenario)


def test_a_parked_model_that_sleeps_is_shown_as_sleeping(site: Site) -> None:  # noqa: F811
    async def scenario() -> None:
        await site.park()
        assert state_of(site)[0] == "sleeping" and readiness_of(site).silence("m") == ""

    run(site, scenario)


def test_a_model_is_drained_with_the_whole_service(site: Site) -> None:  # noqa: F811
    async def scenario() -> None:
        drains: Any = readiness_of(site).drains
        drains.of_service = SimpleNamespace(public_state="drained", reason="the service is draining")
        assert state_of(site, drains) == ("drained", "the service is draining")

    run(site, scenario)


@pytest.mark.parametrize("broken", [False, True])
def test_a_load_on_demand_ends_whether_it_succeeds_or_fails(tmp_path: Path, broken: bool) -> None:
    made = OnDemandSite(tmp_path, Settings(models={"a": optional()}))
    if broken:
        made.manager.broken.add("a")

    async def scenario() -> None:
        made.ask("a")
        await made.until(lambda: "load a" in made.manager.history, "the load")
        await made.until(lambda: not made.manager.returning, "the end of the load")
        assert made.manager.loaded("a") is not broken

    play(made, scenario)
