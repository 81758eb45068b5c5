"""Tests of the objects that actions apply to on each screen."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from appliance.actions import action_named
from appliance.protocol import Key, PeerMapping
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.screens.table import TableView
from tests.console.pilots import console, opened, press, run, shown, text_of, until


async def show_keys(pilot: Pilot[int], app: ConsoleApp) -> TableView[object]:
    """Show the list of keys and local users."""
    await press(pilot, "colon", *"keys", "enter")
    await until(pilot, lambda: "key_" in shown(app))
    view = app.session.view
    assert isinstance(view, TableView)
    return view


@pytest.mark.parametrize("kind", [Key, PeerMapping])
def test_actions_on_tenants_concern_the_tenant_of_the_selected_key_or_mapping(kind: type) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        view = await show_keys(pilot, app)
        row = next(row for row in view.rows(app.session.context) if isinstance(row.caller, kind))  # type: ignore[attr-defined]
        view.cursor = view.id_of(row)
        app.redraw()
        await press(pilot, "Q")
        await until(pilot, lambda: opened(app))
        assert text_of(app.screen, "#title") == f"Change tenant {row.caller.tenant}?"  # type: ignore[attr-defined]
        await press(pilot, "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        app.call_later(app.run_line, "tenants suspend")
        await until(pilot, lambda: opened(app))
        assert text_of(app.screen, "#title") == f"Suspend tenant {row.caller.tenant}?"  # type: ignore[attr-defined]

    run(steps, console(write=True))


def test_two_marked_keys_of_one_tenant_are_one_target() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        view = await show_keys(pilot, app)
        keys = [row.caller for row in view.rows(app.session.context) if isinstance(row.caller, Key)]  # type: ignore[attr-defined]
        tenant = keys[0].tenant
        view.marks = {one.id for one in keys if one.tenant == tenant}
        assert len(view.marks) > 1
        await press(pilot, "Q")
        await until(pilot, lambda: opened(app))
        assert text_of(app.screen, "#title") == f"Change tenant {tenant}?"

    run(steps, console(write=True))


def test_the_menu_of_a_key_offers_the_actions_on_keys_first() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await show_keys(pilot, app)
        await press(pilot, "a")
        await until(pilot, lambda: any(one.option_count for one in app.screen.query(OptionList)))
        names = [one.id or "" for one in app.screen.query_one(OptionList).options]
        assert {name.partition(".")[0] for name in names[:3]} == {"keys"}
        assert {"peers.unmap", "tenants.set", "keys.create"} < set(names)

    run(steps, console(write=True))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("tenants.set", "select a tenant first (:tenants lists them), or type :tenants set NAME"),
        ("keys.revoke", "select a key first (:keys lists them), or type :keys revoke ID"),
        ("requests.show", "select a request first (:requests lists them), or type :requests show REQUEST_ID"),
    ],
)
def test_an_action_without_a_target_says_where_to_select_one(action: str, message: str) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "1")
        app.action_run(f"act {action}")
        text = f"{action_named(action).title}: {message}"
        await until(pilot, lambda: text in " ".join(shown(app).split()))

    run(steps, console(write=True))


def test_a_key_is_created_for_the_selected_tenant() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7")
        [tenant] = app.session.view.selected(app.session.context)
        app.action_run("act keys.create")
        await until(pilot, lambda: opened(app))
        assert text_of(app.screen, "#title") == f"Create key for tenant {tenant}?"
        assert text_of(app.screen, "#command") == f"$ appliance keys create --tenant {tenant}"
        await press(pilot, "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        # On the other screens, the dialog has a field for the tenant.
        await press(pilot, "1")
        app.action_run("act keys.create")
        await until(pilot, lambda: opened(app))
        assert text_of(app.screen, "#title") == "Create key?"
        assert app.screen.query_one("#field-tenant", Input).value == "default"

    run(steps, console(write=True))


def test_the_version_to_make_the_default_is_asked_for() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "6")
        view = app.session.view
        assert isinstance(view, TableView)
        view.cursor = "qwen3-8b"
        app.redraw()
        app.action_run("act models.default")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog) and dialog.focused is dialog.query_one("#field-model")
        assert "default version: 2 → --" in text_of(app.screen, "#impact")
        await press(pilot, "1")
        await until(pilot, lambda: "default version: 2 → 1" in text_of(app.screen, "#impact"))
        await until(pilot, lambda: text_of(app.screen, "#command") == "$ appliance models default qwen3-8b@1")
        await until(pilot, lambda: text_of(app.screen, "#now-model") == "now: qwen3-8b@2")

    run(steps, console(write=True))
