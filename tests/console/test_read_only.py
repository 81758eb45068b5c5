"""Tests that a read-only console cannot change a service. The tests try every action, key, palette entry,
command line, menu entry, clickable text and route against a real core with its admin API. These are taken
from the registries, so that the tests also cover new entries."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Button, OptionList

from appliance import calls
from appliance.actions import ACTIONS, action_of
from appliance.actions.parameters import (
    MAX_SILENCE_S,
    CreateKey,
    CreateTenant,
    MapPeer,
    SilenceAlerts,
    SuspendTenant,
)
from appliance.calls import READ_ONLY_HEADER
from appliance.pages import AuditQuery
from appliance.snapshot import Alert
from console.action_dialog import ActionDialog
from console.app import ConsoleApp
from console.commands import WORDS
from console.dialogs import TextDialog
from console.keys import KEYS, offered
from console.live import LiveSource
from console.palette import ConsoleCommands
from console.parameters import build, equivalent
from console.screens.base import View
from console.source import SourceError
from console.widget import FrameWidget
from tests.console.frames import VIEWS
from tests.console.pilots import opened, press, processed, shown, until
from tests.core.conftest import Service, running_core, wait_until

pytestmark = pytest.mark.system


def offered_on(view: View) -> frozenset[str]:
    """Return the names of the actions that a screen offers for its rows."""
    return frozenset(action.name for action in offered() if view.accepts(action))


ACTING = list({offered_on(view): view for view in reversed(VIEWS)}.values())
"""For each distinct set of actions that screens offer for their rows, one screen that offers this set."""
RULE = "model-is-ready"
SETTINGS = f"""
[[alerts.rules]]
name = "{RULE}"
metric = "models[*].state"
texts = ["ready"]
description = "{{where}} is ready"
"""
"""A rule whose alert lasts as long as the model of the core is ready."""


class Target:
    """A core that contains, for each action, an object that the action could change."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.run_dir = service.run_dir
        for name in ("acme", "unused"):
            service.admin.act(CreateTenant(name=name))
        created: Any = service.admin.act(CreateKey(name="k", tenant="acme"))
        self.key = created.id
        service.admin.act(MapPeer(peer="uid:4242", tenant="acme"))
        self.clients: list[socket.socket] = [service.connect("m 1000000")]
        wait_until(lambda: bool(service.admin.in_flight()), description="a running request")
        self.request = service.admin.in_flight()[0].request_id
        silence: Any = service.admin.act(SilenceAlerts(rule="disk-*", for_s=MAX_SILENCE_S))
        self.silence = silence.id
        wait_until(lambda: bool(self.alerts()), description=f"an alert of the rule {RULE}")
        self.alert = self.alerts()[0].id

    def alerts(self) -> list[Alert]:
        """Return the alerts of the rule in the settings."""
        return [one for one in self.service.admin.call(calls.ALERTS) if one.rule == RULE]

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each action as text, as on the command line."""
        return {
            "tenants.create": {"name": "new"},
            "tenants.set": {"name": "acme", "weight": "3"},
            "tenants.suspend": {"name": "acme"},
            "tenants.resume": {"name": "acme"},
            "tenants.delete": {"name": "unused"},
            "keys.create": {"name": "new", "tenant": "acme"},
            "keys.rotate": {"id": self.key},
            "keys.set": {"id": self.key, "tokens_per_day": "5"},
            "keys.revoke": {"id": self.key},
            "peers.map": {"peer": "uid:4243", "tenant": "acme"},
            "peers.unmap": {"peer": "uid:4242"},
            "drain": {},
            "resume": {},
            "models.add": {"name": "new", "folder": str(self.service.folder / "m")},
            "models.load": {"model": "m"},
            "models.unload": {"model": "m"},
            "models.default": {"model": "m@1"},
            "models.rollback": {"name": "m"},
            "models.alias": {"name": "other", "target": "m"},
            "models.retry": {"model": "m"},
            "models.sleep": {"model": "m"},
            "models.wake": {"model": "m"},
            "models.split": {"name": "m", "weights": "m=1"},
            "models.shadow": {"name": "m", "target": "m"},
            "models.pin": {"model": "m"},
            "models.unpin": {"model": "m"},
            "models.remove": {"model": "m"},
            "models.prune": {},
            "config.reload": {},
            "requests.cancel": {"request_id": self.request},
            "requests.show": {"request_id": self.request},
            "alerts.ack": {"id": self.alert},
            "alerts.silence": {"rule": "*"},
            "alerts.unsilence": {"id": self.silence},
            "backup.begin": {"path": "/backup"},
            "backup.end": {"path": "/backup", "error": "x"},
        }

    def actions(self) -> list[msgspec.Struct]:
        """Return the parameters of every action in the registry."""
        values = self.values()
        assert set(values) == {action.name for action in ACTIONS}, "add the parameters of the new action"
        return [build(action, values[action.name]) for action in ACTIONS]

    def state(self) -> bytes:
        """Return everything that actions can change, and the audit rows of actions that were not refused."""
        client = self.service.admin
        tenants = [msgspec.structs.replace(one, usage=[]) for one in client.tenants()]
        keys = [msgspec.structs.replace(one, usage=[]) for one in client.call(calls.KEYS)]
        performed = [
            (one.seq, one.action, one.result)
            for one in client.call(calls.audit(AuditQuery(limit=1000))).rows
            if not (one.result or "").startswith("refused")
        ]
        parts = (
            *(tenants, keys, client.peers(), client.models(), client.configuration(), performed),
            *(client.call(calls.SILENCES), [one.request_id for one in client.in_flight()]),
            [(one.model, one.state) for one in client.status().drains],
            [(one.id, one.state) for one in self.alerts()],
        )
        return msgspec.json.encode(parts)


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the console write its exported files to a temporary directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_core(tmp_path_factory.mktemp("core"), SETTINGS) as service:
        yield Target(service)


def read_only(target: Target) -> ConsoleApp:
    return ConsoleApp(LiveSource(target.run_dir), write=False)


def run(app: ConsoleApp, steps: Any) -> None:
    """Run steps in a console that already shows measured values."""

    async def session() -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.session.context.snapshot and "Latency" in shown(app))
            await steps(pilot)

    asyncio.run(session())


def acting(app: ConsoleApp) -> bool:
    """Return whether the console has opened a dialog or is running a worker that performs an action."""
    return isinstance(app.screen, ActionDialog) or any(worker.group == "actions" for worker in app.workers)


def messages_of(app: ConsoleApp) -> list[str]:
    """Return a list that collects the messages of a console."""
    said: list[str] = []
    say = app.session.say

    def record(message: str, role: str = "text") -> None:
        said.append(message)
        say(message, role)

    app.session.say = record  # type: ignore[method-assign]
    return said


async def confirm_and_close(pilot: Pilot[int], app: ConsoleApp) -> None:
    """Wait until a dialog that reads from the service has opened, press enter in it, and close dialogs."""

    def opening() -> bool:
        reading = any(one.group == "past-dialog" and not one.is_finished for one in app.workers)
        return reading and len(app.screen_stack) == 1

    if opening():
        await until(pilot, lambda: not opening())
    if len(app.screen_stack) > 1 or app.prompt.display:
        await press(pilot, "enter")
    while True:
        assert not acting(app)
        await press(pilot, "escape")
        if len(app.screen_stack) == 1 and not app.prompt.display:
            break
    assert not acting(app)


def test_the_service_refuses_every_action_of_a_read_only_session(target: Target) -> None:
    before = target.state()
    source = LiveSource(target.run_dir)

    async def attempts() -> None:
        for parameters in target.actions():
            with pytest.raises(SourceError, match=r"read-only.*--write"):
                await source.act(parameters)

    asyncio.run(attempts())
    assert target.state() == before

    def audited() -> bool:
        rows = target.service.admin.call(calls.audit(AuditQuery(limit=1000))).rows
        return any("read-only" in (one.result or "") for one in rows)

    # The audit entries of refused actions are written in the background.
    wait_until(audited, description="a refused action in the audit trail")


def test_no_key_changes_anything(target: Target) -> None:
    before, app = target.state(), read_only(target)
    said = messages_of(app)

    async def steps(pilot: Pilot[int]) -> None:
        # The console maps keys to commands in the same way on every screen, and the test of the palette runs
        # the commands on each screen of `ACTING`. Keys of actions depend on the row under the cursor.
        screens = itertools.cycle(VIEWS)
        keys = [(one, key) for one in KEYS for key in one.keys if one.command != "quit"]
        for one, key in keys:
            for view in ACTING if one.command.startswith("act ") else [next(screens)]:
                app.action_run("live")
                app.action_run(f"screen {view.name}")
                await processed(pilot)
                said.clear()
                await press(pilot, key)
                assert not acting(app), one
                if one.command.startswith("act "):
                    assert any("read-only" in message for message in said), one
                await confirm_and_close(pilot, app)

    run(app, steps)
    assert target.state() == before


def test_no_palette_entry_changes_anything(target: Target) -> None:
    before, app = target.state(), read_only(target)

    async def steps(pilot: Pilot[int]) -> None:
        entries = ConsoleCommands(app.screen)._entries()
        assert len(entries) > 20
        for view in ACTING:
            for _, _, command in entries:
                # A command that opens a screen does not depend on the present one.
                if command == "quit" or (command.startswith("screen ") and view is not ACTING[0]):
                    continue
                app.action_run("live")
                app.action_run(f"screen {view.name}")
                app.action_run(command)
                await processed(pilot)
                assert not acting(app), command
                await confirm_and_close(pilot, app)

    run(app, steps)
    assert target.state() == before


def test_no_command_line_changes_anything(target: Target, tmp_path: Path) -> None:
    before, app, values = target.state(), read_only(target), target.values()

    async def steps(pilot: Pilot[int]) -> None:
        for action in ACTIONS:
            command = equivalent(action, values[action.name]).removeprefix("appliance ")
            app.run_line(command.removesuffix(" --yes"))
            await processed(pilot)
            assert not acting(app), command
            refusal = "--write" if action in offered() else "unknown command"
            assert refusal in shown(app), command
        for word in WORDS:
            if word != "quit":
                app.run_line(f"export csv {tmp_path}/x" if word == "export" else word)
                await processed(pilot)
                assert not acting(app), word

    run(app, steps)
    assert target.state() == before


def test_no_menu_entry_changes_anything(target: Target) -> None:
    before, app = target.state(), read_only(target)
    said = messages_of(app)
    tried: set[tuple[str, str]] = set()
    """The entries that have been chosen, by screen."""

    async def steps(pilot: Pilot[int]) -> None:
        for view in ACTING:
            app.action_run(f"screen {view.name}")
            if view.target != "service":
                await until(pilot, lambda: app.session.view.selected(app.session.context))
            while True:
                await press(pilot, "a")
                menu = app.screen.query_one(OptionList)
                # Actions on the service do not depend on the screen.
                of_screen = [str(one.id) for one in menu.options if one.id in offered_on(view)]
                left = [name for name in of_screen if (view.name, name) not in tried]
                left += [str(one.id) for one in menu.options if one.id not in {name for _, name in tried}]
                if not left:
                    break
                tried.add((view.name, left[0]))
                menu.highlighted = menu.get_option_index(left[0])
                said.clear()
                await press(pilot, "enter")
                assert not acting(app)
                assert any("read-only" in message for message in said)
            await press(pilot, "escape")

    run(app, steps)
    expected = {(view.name, name) for view in ACTING for name in offered_on(view)}
    assert tried >= expected >= {("alerts", "alerts.ack"), ("silences", "alerts.unsilence")}
    assert {name for _, name in tried} >= {action.name for action in offered() if action.applies_to_service}
    assert target.state() == before


def test_no_clickable_text_changes_anything(target: Target) -> None:
    before, app = target.state(), read_only(target)

    async def steps(pilot: Pilot[int]) -> None:
        commands = set()
        for view in VIEWS:
            app.action_run(f"screen {view.name}")
            commands |= {one.action for row in app.session.lines(200, 60) for one in row if one.action}
        assert len(commands) > 20
        for command in sorted(commands - {"quit"}):
            app.post_message(FrameWidget.Clicked(command, 0))
            await processed(pilot)
            assert not acting(app), command
            await confirm_and_close(pilot, app)

    run(app, steps)
    assert target.state() == before


def test_the_service_refuses_every_route_that_can_change_something(target: Target) -> None:
    before = target.state()
    transport = httpx.HTTPTransport(uds=str(target.run_dir / "admin.sock"), verify=False)
    with httpx.Client(transport=transport, base_url="http://appliance", timeout=600) as client:
        routes = [
            (method.upper(), path)
            for path, methods in client.get("/openapi.json").json()["paths"].items()
            for method in methods
            if method != "get" and not path.startswith("/what-if/")
        ]
        assert {path for _, path in routes} >= {f"/actions/{action.name}" for action in ACTIONS}
        for method, path in routes:
            response = client.request(method, path, json={}, headers={READ_ONLY_HEADER: "true"})
            assert response.status_code == 403 and "read-only" in response.json()["message"], path
    assert target.state() == before


def test_the_service_refuses_even_if_the_console_offers_the_action(target: Target) -> None:
    before, app = target.state(), read_only(target)

    async def steps(pilot: Pilot[int]) -> None:
        app.session.context.write = True
        app.run_line("tenants suspend acme")
        await until(pilot, lambda: opened(app))
        app.screen.query_one("#confirm", Button).press()
        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(pilot, lambda: any("--write" in str(one.render()) for one in app.screen.query("Static")))

    run(app, steps)
    assert target.state() == before


def test_a_console_with_write_changes_the_service(target: Target) -> None:
    """Prove that the tests above would detect a change."""
    before = target.state()
    source = LiveSource(target.run_dir, write=True)
    parameters = SuspendTenant(name="acme")
    assert action_of(parameters).name == "tenants.suspend"
    asyncio.run(source.act(parameters))
    assert target.state() != before


@pytest.mark.parametrize("value", ["false", "TRUE", ""])
def test_a_mistyped_header_does_not_permit_actions(target: Target, value: str) -> None:
    transport = httpx.HTTPTransport(uds=str(target.run_dir / "admin.sock"), verify=False)
    with httpx.Client(transport=transport, base_url="http://appliance", timeout=600) as client:
        response = client.post("/actions/drain", json={}, headers={READ_ONLY_HEADER: value})
    assert response.status_code == 400
    assert f"{READ_ONLY_HEADER} = {value!r} is not valid" in response.json()["message"]
