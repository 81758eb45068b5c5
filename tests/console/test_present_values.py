"""Tests of the current values and defaults shown in dialog fields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from appliance.actions import action_named
from appliance.protocol import Key, Tenant
from appliance.protocol.registry import RegisteredModel, ShadowStatus
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.context import Context
from console.impact import Impact
from console.keys import offered
from console.parameters import entered
from console.present import absent_text, present_values
from console.source import ListName, Row
from tests.console.frames import session
from tests.console.pilots import console, opened, press, run, until


def absent(dialog: ActionDialog, name: str) -> str:
    """Return the text of an empty field."""
    return dialog.query_one(f"#field-{name}", Input).placeholder


def beside(dialog: ActionDialog, name: str) -> str:
    """Return the text beside a field, or an empty string if it is hidden."""
    found = dialog.query_one(f"#now-{name}", Static)
    return str(found.render()) if found.display else ""


def test_the_dialog_of_a_tenant_shows_the_present_value_of_every_field() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app))
        dialog = app.screen
        assert isinstance(dialog, ActionDialog)
        await until(pilot, lambda: beside(dialog, "weight") == "now: 0.5")
        known = {
            "highest_class": "now: P3",
            "log_policy": "now: metadata",
            "requests_per_minute": "now: no limit",
            "tokens_per_minute": "now: 240,000 tokens/min",
            "burst_s": "now: 1m",
        }
        await until(pilot, lambda: {name: absent(dialog, name) for name in known} == known)
        fields = [one.name for one in entered(action_named("tenants.set")) if one.name != "name"]
        assert all(absent(dialog, name).startswith("now: ") for name in fields)
        # The current value stays visible while the operator types a new value, and the explanation contains
        # it.
        field = dialog.query_one("#field-tokens_per_minute", Input)
        assert beside(dialog, "tokens_per_minute") == ""
        field.focus()
        await press(pilot, *"500")
        await until(pilot, lambda: beside(dialog, "tokens_per_minute") == "now: 240,000 tokens/min")
        await until(pilot, lambda: ". Now: 240,000 tokens/min" in str(dialog.query_one("#hint").render()))
        # Another operator changes the value.
        app.source.simulation.tenants["mobile"].limits[0].capacity = 123_456.0  # type: ignore[attr-defined]
        await until(pilot, lambda: beside(dialog, "tokens_per_minute") == "now: 123,456 tokens/min")

    run(steps, console(write=True))


def test_a_dialog_notices_a_change_of_a_field_that_snapshots_do_not_contain() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        rows, policy = app.source.rows, "metadata"

        async def changed(name: ListName) -> Sequence[Row]:
            found = await rows(name)
            return [
                msgspec.structs.replace(one, log_policy=policy) if isinstance(one, Tenant) else one
                for one in found
            ]

        app.source.rows = changed  # type: ignore[method-assign]
        app.call_later(app.run_line, "tenants set mobile --weight 3")
        await until(pilot, lambda: opened(app) and absent(app.screen, "log_policy") == "now: metadata")  # type: ignore[arg-type]
        policy = "full"
        dialog = app.screen
        await until(pilot, lambda: absent(dialog, "log_policy") == "now: full")  # type: ignore[arg-type]
        dialog.query_one("#confirm").press()  # type: ignore[attr-defined]
        message = "log policy changed from metadata to full: review"
        await until(pilot, lambda: message in str(dialog.query_one("#error").render()))

    run(steps, console(write=True))


def made() -> Context:
    return session(steps=3, write=True).context


def test_the_dialog_of_a_key_shows_its_present_values() -> None:
    context = made()
    key = context.rows_of("callers", Key)[0]
    for name in ("keys.set", "keys.rotate"):
        assert present_values(action_named(name), key.id, context)["expires_at"] == key.expires_at
    present = present_values(action_named("keys.set"), key.id, context)
    assert present["tokens_per_day"] == key.quota.tokens_per_day and present["scopes"] == key.scopes


def test_dialogs_show_where_requests_and_users_are_routed() -> None:
    context = made()
    [model, *_] = context.rows_of("models", RegisteredModel)
    shadow = ShadowStatus(name=model.name, target="other", share=0.05)
    changed = msgspec.structs.replace(model, aliases=["chat"], split={"1": 90.0, "2": 10.0}, shadows=[shadow])
    context.rows["models"] = [changed]
    texts = []
    for name, target in (
        ("models.alias", "chat"),
        ("models.split", model.name),
        ("models.shadow", model.name),
        ("peers.map", "uid:1004"),
    ):
        action = action_named(name)
        present = present_values(action, target, context)
        texts += [absent_text(action, one, present) for one in entered(action) if one.name in present]
    assert texts == [f"now: {model.name}", "now: 1=90,2=10", "now: other", "now: 5%", "now: analytics"]


@pytest.mark.parametrize("name", ["tenants.create", "keys.create"])
def test_a_dialog_that_creates_something_shows_the_defaults(name: str) -> None:
    action = action_named(name)
    texts = {one.name: absent_text(action, one, {}) for one in entered(action)}
    assert texts["name"] == "required"
    assert texts["burst_s"] == "default: 1m" and texts["tokens_per_day"] == "default: no limit"
    assert set(texts.values()).isdisjoint({"unchanged", "none", ""})


def test_no_field_says_unchanged_once_the_present_values_are_known() -> None:
    context = made()
    targets = {"tenant": "mobile", "key": context.rows_of("callers", Key)[0].id}
    for action in offered():
        target = targets.get(action.target, "x")
        present = Impact(action, lambda: context).present(target)
        for one in entered(action):
            if one.name != action.named_by:
                assert absent_text(action, one, present) not in ("unchanged", ""), (action.name, one.name)
