"""Compares the dialogs of a live console with the pictures in `docs/console/`, at two sizes. After an
intended change, regenerate the pictures with UPDATE_SNAPSHOTS=1 and check each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from textual.command import CommandList, CommandPalette
from textual.widgets import Button, Static

from appliance.actions import action_named
from appliance.history.forecasts import Outcome, QuotaForecast, TenantForecast
from appliance.protocol import NewKey
from appliance.snapshot import Snapshot
from console.app import ConsoleApp
from console.dialogs import ChoiceDialog, TextDialog
from console.fake import FIXED_TIME, FakeSource
from console.impact import result_lines
from console.palette import ConsoleCommands
from tests.console.frames import SIZES, source
from tests.console.pilots import opened, press, until
from tests.console.test_svg import compare, settled, utc  # noqa: F401

STEPS = 20


def _outcome(over_quota: int, ttft_ms: float, e2e_ms: float) -> Outcome:
    return Outcome(
        admitted=900 - over_quota, over_quota=over_quota, refused=0, ttft_p99_ms=ttft_ms, e2e_p99_ms=e2e_ms
    )


class FrozenSource(FakeSource):
    """A simulated service that delivers its first few snapshots and then repeats the last one."""

    taken: list[Snapshot]

    async def next(self) -> Snapshot:
        self.taken = getattr(self, "taken", [])
        if len(self.taken) < STEPS:
            self.taken.append(self.step())
        else:
            await asyncio.sleep(0.2)
        return self.taken[-1]

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        before, after = _outcome(214, 412.0, 5230.0), _outcome(31, 655.0, 5710.0)
        other = (_outcome(0, 398.0, 5012.0), _outcome(0, 571.0, 5402.0))
        return QuotaForecast(
            since=FIXED_TIME - 900,
            until=FIXED_TIME,
            requests=1800,
            left_out=0,
            tenants=[
                TenantForecast(tenant="mobile", recorded=before, simulated=before, predicted=after),
                TenantForecast(tenant="search", recorded=other[0], simulated=other[0], predicted=other[1]),
            ],
        )


def listed(app: ConsoleApp) -> bool:
    """Return whether the palette shows all its entries."""
    return app.screen.query_one(CommandList).option_count == len(ConsoleCommands(app.screen)._entries())


KEYMAP_PROBLEMS = (
    "/home/ada/.config/appliance/keys.toml, line 2: unknown command 'time bakc': did you mean 'time back'?",
    "/home/ada/.config/appliance/keys.toml, line 5: \"theme\" = 'ctrl+i': terminals send the same code for "
    "this key as for tab: write 'tab'",
)

NEW_KEY = NewKey(
    id="key_3f1a", key="ak-…", name="search-batch", tenant="search", expires_at=FIXED_TIME + 30 * 86_400
)

DIALOGS: dict[str, tuple[str, Callable[[ConsoleApp], object], Callable[[ConsoleApp], object]]] = {
    "cancel": ("4", lambda app: app.action_run("act requests.cancel"), opened),
    "drain": ("6", lambda app: app.run_line("drain --grace 60s"), opened),
    "unload": ("6", lambda app: app.run_line("models unload qwen3-8b"), opened),
    "delete": (
        "7",
        lambda app: app.action_runner.begin(action_named("tenants.delete"), {"name": "mobile"}, given=True),
        opened,
    ),
    "limits": (
        "7",
        lambda app: app.run_line("tenants set mobile --tokens-per-minute 240000"),
        opened,
    ),
    "actions": (
        "4",
        lambda app: app.action_runner.choose(),
        lambda app: isinstance(app.screen, ChoiceDialog),
    ),
    "result": (
        "7",
        lambda app: app.push_screen(TextDialog("Create key", result_lines(NEW_KEY))),
        lambda app: isinstance(app.screen, TextDialog),
    ),
    "palette": (
        "4",
        lambda app: app.action_run("palette"),
        lambda app: isinstance(app.screen, CommandPalette) and listed(app),
    ),
    "keymap": (
        "1",
        lambda app: app.push_screen(TextDialog("Keymap not loaded: using the default keys", KEYMAP_PROBLEMS)),
        lambda app: isinstance(app.screen, TextDialog),
    ),
    "command": ("1", lambda app: app.action_run("command"), lambda app: app.prompt.display),
}
"""For each dialog: the key of the screen behind it, how to open it, and a check that it is open."""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", DIALOGS)
def test_a_dialog_looks_like_its_picture(utc: None, name: str, size: tuple[int, int]) -> None:  # noqa: F811
    fake = source()
    fake.__class__ = FrozenSource
    app = ConsoleApp(fake, write=True)
    key, open_dialog, is_open = DIALOGS[name]
    file = f"dialog-{name}-{size[0]}x{size[1]}.svg"

    async def drawn() -> str:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app._fed > STEPS)
            await press(pilot, key)
            open_dialog(app)
            await until(pilot, lambda: is_open(app))
            if name == "limits":
                app.screen.query_one("#what-if").press()  # type: ignore[attr-defined]
                await until(pilot, lambda: "fewer" in str(app.screen.query_one("#forecast", Static).render()))
            # A pressed button briefly looks different.
            await until(pilot, lambda: not app.screen.query("Button.-active"))
            await pilot.pause()
            await pilot.pause()
            for button in app.screen.query(Button):
                assert button.region.bottom <= size[1] - 1 and button.region.height, button
            return await settled(file, lambda: app.export_screenshot(title="appliance console"))

    compare(file, asyncio.run(drawn()))
