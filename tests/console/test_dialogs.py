"""Tests of the action dialogs in the running application."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Button, Checkbox, Input, Static

from appliance.actions import action_named
from appliance.actions.parameters import DeleteTenant, PruneModels
from appliance.history.forecasts import QuotaForecast
from appliance.protocol import Key
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.dialogs import ScrollArea
from console.screens.table import TableView
from console.source import ListName, Row
from tests.console.pilots import StillSource, console, opened, press, run, shown, until


def test_a_dialog_shows_impact_and_cli_command_and_its_default_is_cancel() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "X")
        await until(pilot, lambda: opened(app))
        text = "\n".join(str(one.render()) for one in app.screen.query("Static"))
        assert "$ appliance requests cancel req-" in text
        assert "output tokens" in text
        assert app.screen.focused is app.screen.query_one("#cancel", Button)
        await press(pilot, "enter")
        await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        assert not hasattr(app.source, "performed")
        await until(pilot, lambda: "nothing was changed" in shown(app))

    run(steps, console(write=True))


def test_a_command_line_without_a_target_concerns_the_row_under_the_cursor() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4")
        await until(pilot, lambda: app._fed > StillSource.steps)
        [name] = app.session.view.selected(app.session.context)
        app.call_later(app.run_line, "requests cancel")
        await until(pilot, lambda: opened(app))
        assert name in str(app.screen.query_one("#title", Static).render())
        await press(pilot, "escape")
        await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        # A `drain` without a model applies to the whole service, even if a model is under the cursor.
        await press(pilot, "6")
        app.call_later(app.run_line, "drain")
        await until(pilot, lambda: opened(app))
        assert "Drain the service?" in str(app.screen.query_one("#title", Static).render())

    run(steps, console(write=True))


def test_a_drain_is_a_form_with_a_banner() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "colon", *"drain --grace 45s", "enter")
        await until(pilot, lambda: opened(app))
        await press(pilot, "tab", "enter")
        await until(pilot, lambda: "SERVICE DRAINING" in shown(app))
        assert app.source.performed[0].grace_s == 45.0  # type: ignore[attr-defined]

    run(steps, console(write=True))


def test_a_form_shows_durations_with_their_unit() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        for name, field, duration in (("drain", "grace_s", "2m"), ("alerts.silence", "for_s", "1h")):
            values = {"rule": "kv-full"} if name == "alerts.silence" else {}
            app.call_later(app.action_runner.begin, action_named(name), values, given=True)
            await until(pilot, lambda: opened(app))
            dialog = app.screen
            assert isinstance(dialog, ActionDialog)
            assert dialog.query_one(f"#field-{field}", Input).value == duration
            # The default value is not sent, and the CLI command does not contain this value.
            assert dialog._collected() == values
            await press(pilot, "escape")
            await until(pilot, lambda: not isinstance(app.screen, ActionDialog))

    run(steps, console(write=True))


def test_the_key_and_the_mapping_under_the_cursor_are_filled_in() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7", "v", "v")
        await until(pilot, lambda: "key_" in shown(app))
        [name] = app.session.view.selected(app.session.context)
        for action, target in (("keys.revoke", name), ("peers.unmap", "uid:1004")):
            view = app.session.view
            assert isinstance(view, TableView)
            view.cursor = target
            app.redraw()
            app.action_run(f"act {action}")
            await until(pilot, lambda: opened(app))
            command = str(app.screen.query_one("#command", Static).render())
            assert command.startswith(f"$ appliance {action.replace('.', ' ')} {target}")
            await press(pilot, "escape")
            await until(pilot, lambda: not isinstance(app.screen, ActionDialog))
        view.cursor = name
        app.redraw()
        app.action_run("act peers.unmap")
        await until(pilot, lambda: "select a peer first" in shown(app))

    run(steps, console(write=True))


def test_a_typed_action_needs_the_name_of_its_target() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7")
        app.call_later(
            app.action_runner.begin, action_named("tenants.delete"), {"name": "mobile"}, given=True
        )
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "type mobile to confirm" in str(dialog.query_one("#error").render()))
        dialog.query_one("#typed", Input).value = "mobile"
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []) == [DeleteTenant(name="mobile")])

    run(steps, console(write=True))


def test_a_dialog_says_that_a_tenant_with_keys_cannot_be_deleted() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7")
        app.call_later(
            app.action_runner.begin, action_named("tenants.delete"), {"name": "mobile"}, given=True
        )
        await until(pilot, lambda: opened(app))
        assert "3 valid keys" in str(app.screen.query_one("#impact").render())

    run(steps, console(write=True))


def test_the_button_that_keeps_a_request_is_not_called_cancel() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "X")
        await until(pilot, lambda: opened(app))
        labels = [str(button.label) for button in app.screen.query(Button)]
        assert labels == ["Back", "Cancel request"]

    run(steps, console(write=True))


def test_a_form_that_scrolls_shows_the_field_given_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Textual sends no `Resize` event if a widget's region is read between a change of styles and the layout.
    # Textual itself reads a region when the focus moves.
    monkeypatch.setattr(
        ScrollArea,
        "post_message",
        lambda area, message: isinstance(message, events.Resize) or Widget.post_message(area, message),
    )

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.resize_terminal(80, 24)
        app.call_later(app.run_line, "tenants set mobile --concurrent-requests 7")
        await until(pilot, lambda: opened(app))
        field, form = app.screen.query_one("#field-concurrent_requests"), app.screen.query_one("#form")
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: not form.max_scroll_y)
        # Textual lays out the smaller form after the dialog has limited its height.
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))

    run(steps, console(write=True))


def test_a_form_stays_where_the_operator_has_scrolled_it() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await pilot.resize_terminal(80, 24)
        app.call_later(app.run_line, "tenants set mobile --concurrent-requests 7")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog)
        field, form = dialog.query_one("#field-concurrent_requests"), dialog.query_one("#form")
        await until(pilot, lambda: form.max_scroll_y and form.region.contains_region(field.region))
        while form.scroll_y:
            form.post_message(events.MouseScrollUp(form, 1, 1, 0, -1, 0, False, False, False))
            await pilot.pause()
        height = form.size.height
        dialog.show_error("a message that takes a line")
        await until(pilot, lambda: form.size.height < height)
        await pilot.pause()
        assert form.scroll_y == 0 and not form.region.contains_region(field.region)

    run(steps, console(write=True))


def test_the_buttons_stay_visible_while_a_replay_runs() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        async def endless(parameters: msgspec.Struct) -> QuotaForecast:
            await asyncio.Event().wait()
            raise AssertionError

        app.source.what_if = endless  # type: ignore[method-assign]
        await pilot.resize_terminal(80, 24)
        app.call_later(app.run_line, "tenants set mobile --tokens-per-minute 500")
        await until(pilot, lambda: opened(app))
        dialog, buttons = app.screen.query_one("#dialog"), app.screen.query(Button)
        app.screen.query_one("#what-if", Button).press()
        await until(pilot, lambda: app.screen.query_one("#forecast").display)
        await until(pilot, lambda: all(dialog.region.contains_region(one.region) for one in buttons))

    run(steps, console(write=True))


def test_a_dialog_refuses_if_the_state_has_changed() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "X")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        snapshot = app.session.context.snapshot
        assert snapshot is not None
        app.source.simulation.cancel(snapshot.requests[0].request_id)  # type: ignore[attr-defined]
        before = app.session.context.snapshot
        await until(pilot, lambda: app.session.context.snapshot is not before)
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "state changed" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def impact_of(app: ConsoleApp) -> str:
    """Return the impact shown in the open dialog."""
    return str(app.screen.query_one("#impact").render())


@pytest.mark.parametrize(
    ("action", "target"),
    [("models.unload", "qwen3-8b"), ("tenants.suspend", "search")],
    ids=["model", "tenant"],
)
def test_the_impact_in_an_open_dialog_follows_the_service_also_while_updates_are_paused(
    action: str, target: str
) -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "p")
        await until(pilot, lambda: "PAUSED" in shown(app))
        chosen = action_named(action)
        app.call_later(app.action_runner.begin, chosen, {chosen.named_by: target}, given=True)
        await until(pilot, lambda: opened(app))
        await until(pilot, lambda: "running and" in impact_of(app))
        dialog, before = app.screen, impact_of(app)
        sim = app.source.simulation  # type: ignore[attr-defined]
        running = (request for one in sim.replicas for request in one.running)
        sim.cancel(next(one.id for one in running if target in (one.model, one.tenant)))
        await until(pilot, lambda: impact_of(app) != before)
        # The action is performed, because a changed number of requests does not invalidate the confirmation.
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []))

    run(steps, console(write=True))


def test_the_dialog_of_a_request_reads_its_blocks_from_every_screen() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await until(pilot, lambda: not app.source.reads_blocks)
        snapshot = app.session.context.snapshot
        assert snapshot is not None
        app.call_later(app.run_line, f"requests cancel {snapshot.requests[0].request_id}")
        await until(pilot, lambda: opened(app) and app.source.reads_blocks)
        await until(pilot, lambda: "KV blocks" in impact_of(app))
        await press(pilot, "escape")
        await until(pilot, lambda: not app.source.reads_blocks)

    run(steps, console(write=True))


def test_the_impact_follows_the_target_in_the_form() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.action_runner.begin, action_named("drain"), {}, given=True)
        await until(pilot, lambda: opened(app) and bool(impact_of(app)))
        before = impact_of(app)
        app.screen.query_one("#field-model", Input).value = "qwen3-8b"
        await until(pilot, lambda: impact_of(app) != before)

    run(steps, console(write=True))


def test_a_dialog_notices_another_operators_change_of_a_limit() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        app.source.simulation.tenants["mobile"].limits[0].capacity = 123_456.0  # type: ignore[attr-defined]
        before = app.session.context.snapshot
        await until(pilot, lambda: app.session.context.snapshot is not before)
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "to 123,456: review" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []))

    run(steps, console(write=True))


def test_a_dialog_reads_the_keys_again_while_it_is_open() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        rows, removed = app.source.rows, list[str]()

        async def fewer(name: ListName) -> Sequence[Row]:
            return [one for one in await rows(name) if getattr(one, "id", "") not in removed]

        app.source.rows = fewer  # type: ignore[method-assign]
        key = next(one.id for one in await rows("callers") if isinstance(one, Key))
        app.call_later(app.run_line, f"keys revoke {key}")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        removed.append(key)
        left = len(await fewer("callers"))
        await until(pilot, lambda: len(app.session.context.rows["callers"]) == left)
        dialog.query_one("#confirm", Button).press()
        await until(
            pilot, lambda: "key changed from valid to absent" in str(dialog.query_one("#error").render())
        )
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def test_a_wrong_value_in_a_form_is_named_and_nothing_is_performed() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.action_runner.begin, action_named("drain"), {"grace_s": "soon"}, given=True)
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "--grace 'soon' is not valid" in str(dialog.query_one("#error").render()))
        assert not hasattr(app.source, "performed")

    run(steps, console(write=True))


def test_a_layout_that_was_scheduled_before_a_dialog_closed_does_nothing() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "D")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog)
        dialog._fit()
        dialog.dismiss(None)
        # The widgets of the dialog are removed before the dialog stops processing its callbacks.
        await until(pilot, lambda: not dialog.query("#form"))
        dialog._fit()

    run(steps, console(write=True))


def test_pruning_needs_a_typed_word_unless_it_is_a_dry_run() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "models prune")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert "--yes" in str(dialog.query_one("#command", Static).render())
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: "type prune to confirm" in str(dialog.query_one("#error").render()))
        dialog.query_one("#field-dry_run", Checkbox).value = True
        command = "$ appliance models prune --dry-run"
        await until(pilot, lambda: str(dialog.query_one("#command", Static).render()) == command)
        dialog.query_one("#confirm", Button).press()
        await until(pilot, lambda: getattr(app.source, "performed", []) == [PruneModels(dry_run=True)])

    run(steps, console(write=True))
