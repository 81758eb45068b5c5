"""Tests of drain banners, and of the key that ends a drain."""

from __future__ import annotations

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, Static

from appliance.actions.parameters import ResumeService
from console.app import ConsoleApp
from console.dialogs import ChoiceDialog
from console.lines import plain
from console.session import ConsoleSession
from console.simulated import SimDrain
from tests.console.frames import source
from tests.console.pilots import console, opened, press, run, shown, until


def drained(app: ConsoleApp, *models: str | None) -> None:
    """Drain these models. None stands for the whole service."""
    simulation = app.source.simulation  # type: ignore[attr-defined]
    for model in models:
        simulation.drains[model] = SimDrain(since=simulation.now)


def banners(made: ConsoleSession, width: int) -> list[str]:
    assert made.context.snapshot is not None
    return [plain(row) for row in made.lines(width, 24)[2 : 2 + len(made.context.snapshot.drains)]]


def a_session(*models: str | None, write: bool) -> ConsoleSession:
    fake = source()
    made = ConsoleSession(fake, write=write)
    for model in models:
        fake.simulation.drains[model] = SimDrain(since=fake.simulation.now)
    made.accept(fake.step())
    return made


def test_the_banner_names_its_key_at_every_width() -> None:
    for width in (80, 120, 160):
        (banner,) = banners(a_session("qwen3-8b", write=True), width)
        assert banner.startswith(" MODEL qwen3-8b DRAIN") and banner.endswith("press R to resume")


@pytest.mark.parametrize("width", [59, 80, 120])
def test_the_whole_banner_is_shown(width: int) -> None:
    made = a_session("qwen3-8b", write=True)
    snapshot = made.context.snapshot
    assert snapshot is not None
    drain = msgspec.structs.replace(snapshot.drains[0], state="draining", running=12, queued=3, queue=True)
    made.accept(msgspec.structs.replace(snapshot, at=snapshot.at + 1, drains=[drain]))
    top = [plain(row) for row in made.lines(width, 24)[1:5]]
    text = " ".join(" ".join(top).replace("press R to resume", "").split())
    for part in ("MODEL qwen3-8b DRAINING: 12 running, 3 queued, ETA ", "grace left 1m59s", " held", "wait"):
        assert part in text
    assert sum("press R to resume" in row for row in top) == 1


def test_no_key_is_offered_while_the_service_stops() -> None:
    made = a_session(None, "qwen3-8b", write=True)
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, second = snapshot.drains
    drains = [msgspec.structs.replace(first, stopping=True), second]
    made.accept(msgspec.structs.replace(snapshot, at=snapshot.at + 1, drains=drains))
    stopping, other = banners(made, 160)
    assert stopping.startswith(" SERVICE STOPPING: ") and other.startswith(" MODEL qwen3-8b DRAIN")
    assert "press" not in stopping + other


def test_a_read_only_console_offers_no_key_for_a_drain() -> None:
    (banner,) = banners(a_session("qwen3-8b", write=False), 160)
    assert "refused" in banner and "press" not in banner and "R " not in banner


def test_the_key_ends_the_drain_in_the_banner_whatever_row_is_selected() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        drained(app, "qwen3-8b")
        await until(pilot, lambda: "press R to resume" in shown(app))
        for screen in ("6", "1", "7"):
            await press(pilot, screen)
            assert app.session.view.selected(app.session.context) != ["qwen3-8b"]
            await press(pilot, "R")
            await until(pilot, lambda: opened(app))
            assert "Resume model qwen3-8b?" in str(app.screen.query_one("#title", Static).render())
            await press(pilot, "escape")
            await until(pilot, lambda: len(app.screen_stack) == 1 and app.action_runner.confirming is None)
        await press(pilot, "R")
        await until(pilot, lambda: opened(app))
        await press(pilot, "tab", "enter")
        await until(pilot, lambda: "qwen3-8b DRAIN" not in shown(app))
        assert app.source.performed == [ResumeService(model="qwen3-8b")]  # type: ignore[attr-defined]

    run(steps, console(write=True))


def test_with_several_drains_the_key_asks_which_one_to_end() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        drained(app, "qwen3-8b", None)
        await until(pilot, lambda: shown(app).count("press R to resume one") == 2)
        await press(pilot, "R")
        await until(pilot, lambda: isinstance(app.screen, ChoiceDialog) and app.screen.focused)
        choices = app.screen.query_one(OptionList)
        assert [str(one.prompt) for one in choices.options] == ["model qwen3-8b", "the service"]
        await press(pilot, "down", "enter")
        await until(pilot, lambda: opened(app))
        assert "Resume the service?" in str(app.screen.query_one("#title", Static).render())
        await press(pilot, "tab", "enter")
        await until(pilot, lambda: "SERVICE DRAIN" not in shown(app))
        assert "MODEL qwen3-8b DRAIN" in shown(app) and "resume one" not in shown(app)

    run(steps, console(write=True))


def test_the_key_says_that_nothing_is_drained() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "R")
        await until(pilot, lambda: "nothing to resume" in shown(app))

    run(steps, console(write=True))
