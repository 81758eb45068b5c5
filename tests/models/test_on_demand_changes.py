"""Tests of commands and requests that arrive while models are being unloaded or parked, with simulated
replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.settings import ModelSettings
from tests.models.on_demand_site import Site, optional, play, sleepy


def test_a_sleeping_model_with_waiting_requests_is_not_unloaded_so_that_an_idle_one_can_sleep(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, sleepy(1, a=optional(), b=optional()))

    async def scenario() -> None:
        await site.exchange("a", "b")
        async with site.on_demand._changing:
            site.ask("a")
            await site.on_demand._evict(("b",), "idle", "its time to live has expired")
            assert site.manager.history == ["load a", "sleep a", "load b", "park b"]

    play(site, scenario)


@pytest.mark.parametrize("command", ["unload", "require"])
def test_a_model_does_not_leave_the_memory_if_a_command_changes_it_while_another_is_unloaded(
    tmp_path: Path, command: str
) -> None:
    site = Site(tmp_path, sleepy(1, a=optional(), b=optional()))
    manager = site.manager

    async def scenario() -> None:
        await site.exchange("a", "b")
        park = manager.park

        def park_slowly(unit: str, *, asleep: bool = False) -> None:
            """Park a unit slowly, so that a command changes `b` in the meantime."""
            park(unit, asleep=asleep)
            if command == "unload":
                del manager.models["b"], manager.settings["b"]
            else:
                manager.settings["b"] = ModelSettings(folder="/")

        async with site.on_demand._changing:
            manager.park = park_slowly  # type: ignore[method-assign]
            await site.on_demand._evict(("b",), "idle", "its time to live has expired")
            assert manager.history == ["load a", "sleep a", "load b", "park a"]

    play(site, scenario)


def test_a_sleeping_model_that_a_command_unloads_is_not_unloaded_again_at_the_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(2, **{name: optional() for name in "abc"}))
    manager = site.manager

    async def scenario() -> None:
        for name in "abc":
            await site.serve(name)
            await site.until(lambda end=site.now + 20.0: site.now > end, "the minimum residence")
        assert manager.asleep == {"a", "b"}
        park = manager.park

        def park_slowly(unit: str, *, asleep: bool = False) -> None:
            """Park a unit slowly, so that a command unloads `b` in the meantime."""
            park(unit, asleep=asleep)
            manager.asleep.discard("b")
            del manager.models["b"], manager.settings["b"]

        async with site.on_demand._changing:
            manager.park = park_slowly  # type: ignore[method-assign]
            await site.on_demand._sleep_limit.unload_down_to(0)
            assert manager.history[-1] == "park a" and "park b" not in manager.history

    play(site, scenario)
