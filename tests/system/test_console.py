"""Tests of the console in a real terminal (tmux) on a real service: actions and their effects, lost
connections, and the state of the terminal after every exit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from appliance import calls
from appliance.client import AdminClient
from appliance.pages import AuditQuery
from tests.checkpoints import write_constant_checkpoint
from tests.console.tmux import SANE, Tmux, confirm, perform
from tests.system.service import APPLIANCE, CALL_TIMEOUT_S, Service, service

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]

SMALL = ("--set", "kv_blocks=100", "--set", "threads=1", "--set", "max_num_seqs=64")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a service whose registry contains a model that is not loaded."""
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text("[models]\n")
    checkpoint = write_constant_checkpoint(tmp_path_factory.mktemp("checkpoints") / "chat", 100)
    with service("--config", str(config)) as started:
        started.command("models", "add", f"chat={checkpoint}", *SMALL)
        yield started


@pytest.fixture
def terminal(running: Service, tmp_path: Path) -> Iterator[Tmux]:
    """Return a terminal in which a console has connected to the service."""
    opened = Tmux(tmp_path, f"{APPLIANCE} console --write --run-dir {running.run_dir}", (120, 40))
    try:
        opened.wait_for("Tokens per second")
        yield opened
    finally:
        opened.tmux("kill-server")


def audited(running: Service, action: str) -> list[str | None]:
    """Return the results that the audit trail records for an action, newest first."""
    with AdminClient(running.run_dir, CALL_TIMEOUT_S) as client:
        rows = client.call(calls.audit(AuditQuery(action=action))).rows
    return [row.result for row in rows]


def test_an_operator_loads_limits_drains_and_cancels_in_the_console(running: Service, terminal: Tmux) -> None:
    with AdminClient(running.run_dir, CALL_TIMEOUT_S) as client:
        perform(terminal, "models load chat")
        running.wait_until(lambda: client.status().models, 90, "the model in the status")
        running.wait_until(lambda: client.status().models[0].state == "ready", 90, "the model to be ready")
        terminal.wait_for("esc to close")
        terminal.keys("Escape")
        terminal.wait(lambda: "esc to close" not in terminal.screen(), "the result to close")

        perform(terminal, "tenants set default --tokens-per-minute 60000")

        def tokens_per_minute() -> float | None:
            [tenant] = [one for one in client.tenants() if one.name == "default"]
            return tenant.quota.tokens_per_minute

        # The dialog closes before the action has been performed.
        running.wait_until(lambda: tokens_per_minute() == 60000, 60, "the limit to be set")

        perform(terminal, "drain --grace 60s --queue")
        terminal.wait_for("SERVICE DRAIN")
        assert [(one.grace_s, one.queue) for one in client.status().drains] == [(60.0, True)]
        # While a drain is only announced, requests are still admitted.
        running.wait_until(lambda: client.status().drains[0].state != "announced", 60, "the drain to begin")

        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(running.complete("chat"))

        client_thread = threading.Thread(target=ask)
        client_thread.start()
        running.wait_until(client.in_flight, 60, "the held request")
        request_id = client.in_flight()[0].request_id
        terminal.keys("4")
        terminal.wait_for(request_id[:12])
        terminal.keys("X")
        terminal.wait_for(f"requests cancel {request_id}")
        confirm(terminal)
        client_thread.join(300)
        assert answers[0].status_code >= 400
        # The front reports the end of a request to the core only after the client has received the answer.
        running.wait_until(lambda: client.in_flight() == [], 60, "the request's end in the core")

        terminal.keys("R")
        confirm(terminal)
        running.wait_until(lambda: not client.status().drains, 60, "the end of the drain")
    for action in ("models.load", "tenants.set", "drain", "requests.cancel", "resume"):
        # The result of an action is recorded after its effect is visible.
        running.wait_until(lambda action=action: audited(running, action)[:1] == ["ok"], 60, action)
    assert running.command("audit", "verify")["ok"]
    terminal.keys("q")
    assert terminal.modes() >= SANE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_restored_after_a_signal(terminal: Tmux, number: signal.Signals) -> None:
    subprocess.run(["kill", f"-{number.value}", str(terminal.pid())], check=True)
    assert terminal.modes() >= SANE
    assert terminal.marker.read_text().strip() == str(128 + number)


def test_the_terminal_is_restored_if_the_console_is_continued_without_having_been_suspended(
    terminal: Tmux,
) -> None:
    psutil.Process(terminal.pid()).send_signal(signal.SIGCONT)
    time.sleep(0.5)
    terminal.keys("q")
    assert terminal.modes() >= SANE


def test_the_console_ends_when_its_terminal_is_lost(terminal: Tmux) -> None:
    console = psutil.Process(terminal.pid())
    terminal.tmux("respawn-pane", "-k", "sleep 600")
    assert psutil.wait_procs([console], timeout=600)[0] == [console]


def test_the_console_survives_restarts_of_the_service_and_restores_the_terminal(
    running: Service, terminal: Tmux
) -> None:
    for _ in range(2):
        running.process.kill()
        running.process.wait()
        terminal.wait_for("STALE")
        starting = threading.Thread(target=running.start)
        starting.start()
        terminal.wait(lambda: _has_reconnected(terminal.screen()), "the console to reconnect")
        starting.join()
        assert running.ready()
    running.process.kill()
    running.process.wait()
    terminal.wait_for("STALE")
    terminal.keys("q")
    assert terminal.modes() >= SANE


def _has_reconnected(screen: str) -> bool:
    return "RESTARTED" in screen and "STALE" not in screen
