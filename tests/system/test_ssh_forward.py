"""Tests of an operator on another machine, who reaches `admin.sock` through `ssh -L`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from appliance import calls
from appliance.actions import ACTIONS
from appliance.cli.app import app
from appliance.client import AdminClient
from appliance.pages import AuditAction, AuditQuery
from tests.console.tmux import Tmux, perform
from tests.system.commands import run_appliance
from tests.system.service import APPLIANCE, CALL_TIMEOUT_S, Service, service
from tests.system.ssh_forward import SshServer

pytestmark = pytest.mark.system

_ROOT = os.geteuid() == 0
_UID = 64320 if _ROOT else os.geteuid()
"""The user id of the account with which the operator logs in to the service's machine. Only root can start a
server that runs as another user."""
_OPERATORS = 64321 if _ROOT else os.getegid()
_GIDS = [64320, _OPERATORS] if _ROOT else [_OPERATORS]

_LOCAL = {
    "serve": "starts a service",
    "bench": "loads the service, so that its results differ from run to run",
    "backup": "copies the databases of the state directory",
    "audit export": "copies the rows of the chain from the state directory",
    "config check": "checks the settings files of this machine",
    "models fit": "reads the memory of this machine and the files of a model",
    "models pull": "downloads files to this machine",
    "alerts test": "reads a file with rules; `tests/cli/test_alerts.py` covers the service's history",
    "history export": "writes a file on this machine; it reads the history through the socket (see below)",
    "doctor": "shows free memory and load averages, which change between two calls (see below)",
}
"""The commands whose output the test does not compare, each with the reason."""
_ARGUMENTS = {"tenants show": "default", "models show": "demo"}


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all commands that print JSON and perform no action."""
    own = getattr(command, "commands", {})
    for word, one in own.items():
        yield from commands(one, (*words, word))
    options = {option for parameter in command.params for option in parameter.opts}
    if "--json" in options:
        yield " ".join(words)


_ACTIONS = {action.name.replace(".", " ") for action in ACTIONS}
_COMMANDS = [
    f"{name} {_ARGUMENTS.get(name, '')}".strip()
    for name in commands(get_command(app))
    if name not in _ACTIONS and name not in _LOCAL
]
"""The commands that show data of the service, with their arguments."""
_CHANGING = {
    *(
        "uptime_s",
        "cpu_seconds",
        "cpu_us_per_token",
        "last_report_s",
        "lag_rows",
        "lag_ms",
        "committed_rows",
        "accepted",
        "at",
        # The local command also reads the journal. The remote command has only the service's answers.
        "journal_missing",
        "notes",
    ),
}
"""Fields that differ between two calls even if the service is idle."""
_STEADY_IN_TOP = ("requests", "models", "tenants", "alerts")
"""Parts of `appliance top` that stay the same while the service is idle."""


class Remote(NamedTuple):
    """A service, the SSH server on its machine, and the operator's directory with the forwarded socket."""

    service: Service
    server: SshServer
    run_dir: Path


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text(f"[admin]\ngroups = [{_OPERATORS}]\n")
    run_dir = Path(tempfile.mkdtemp(prefix="ssh-"))
    with service("--config", str(config)) as running:
        for folder in (running.folder, running.run_dir):
            folder.chmod(0o711)
        server = SshServer(run_dir, _UID, _GIDS)
        try:
            with server.forward(run_dir / "admin.sock", running.run_dir / "admin.sock"):
                yield Remote(running, server, run_dir)
        finally:
            server.close()
            shutil.rmtree(run_dir)


def run(run_dir: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_appliance(*words, "--run-dir", run_dir, "--json", **environ)


def read(run_dir: Path, command: str, **environ: str) -> Any:
    """Return the JSON that a command prints, without the values that change while the service is idle."""
    done = run(run_dir, *command.split(), **environ)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    return _steady({name: value[name] for name in _STEADY_IN_TOP} if command == "top" else value)


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steady(field) for name, field in value.items() if name not in _CHANGING}
    return [_steady(entry) for entry in value] if isinstance(value, list) else value


def actions(remote: Remote, action: str) -> list[AuditAction]:
    """Wait until all of an action's entries in the audit trail have a result, and return them, newest
    first."""

    def ended() -> list[AuditAction] | None:
        with AdminClient(remote.service.run_dir, CALL_TIMEOUT_S) as client:
            rows = client.call(calls.audit(AuditQuery(action=action))).rows
        return rows if rows and all(row.result for row in rows) else None

    found: list[AuditAction] = remote.service.wait_until(ended, 60, f"{action} in the audit trail")
    return found


def ask(remote: Remote, answers: list[int]) -> None:
    answers.append(remote.service.complete().status_code)


@pytest.mark.parametrize("caller", ["operator", "read-key"])
def test_every_command_prints_the_same_through_ssh(remote: Remote, caller: str) -> None:
    assert {"status", "top", "requests", "usage", "logs", "audit list", "alerts list"} <= set(_COMMANDS)
    assert "audit verify" in _COMMANDS
    answers: list[int] = []
    ask(remote, answers)
    assert answers == [200]
    remote.service.wait_until(
        lambda: remote.service.rows(state="ended", status=200), 60, "the request in the log"
    )
    secret = remote.service.key(caller, scopes=["read"])
    environ = {"APPLIANCE_ADMIN_KEY": secret} if caller == "read-key" else {}
    for command in ("requests", "usage", "audit list", "keys list", "logs"):
        assert read(remote.run_dir, command, **environ), command
    for command in _COMMANDS:
        before = len(remote.server.forwarded())

        def same(command: str = command) -> bool:
            here = read(remote.service.run_dir, command)
            return bool(here == read(remote.run_dir, command, **environ))

        # A line of the log or a row of a table may be written between the two calls.
        remote.service.wait_until(same, 300, f"the same output of 'appliance {command}' through SSH")
        assert len(remote.server.forwarded()) > before, command


def test_doctor_and_exports_of_the_history_read_the_service_through_ssh(
    remote: Remote, tmp_path: Path
) -> None:
    def examined(run_dir: Path) -> Any:
        done = run(run_dir, "doctor")
        assert done.returncode in (0, 1), done.stderr
        found = json.loads(done.stdout)
        rows = [(one["area"], one["subject"], one["level"]) for one in found["findings"]]
        # The local command is not given the settings file with which the service was started.
        return found["host"], found["state_dir"], [row for row in rows if row[1] != "settings"]

    # A finding's level may change between the two calls, and the service caches its findings for 30 s.
    remote.service.wait_until(
        lambda: examined(remote.run_dir) == examined(remote.service.run_dir), 300, "the same findings"
    )
    exported = run(remote.run_dir, "history", "export", str(tmp_path / "incident"), "--since", "1m")
    assert exported.returncode == 0 and json.loads(exported.stdout)["samples"] > 0


def test_commands_that_need_files_say_that_the_files_are_on_another_machine(remote: Remote) -> None:
    exported = run(remote.run_dir, "audit", "export")
    assert exported.returncode == 1 and "files are on another machine" in exported.stderr
    verified = run(remote.run_dir, "audit", "verify", "--head", f"1:{'0' * 64}")
    assert verified.returncode == 2 and "work only on the service's machine" in verified.stderr


def test_a_read_key_changes_nothing_through_ssh(remote: Remote) -> None:
    key = remote.service.key("reader", scopes=["read"])
    before = read(remote.run_dir, "tenants list")
    for words in (("tenants", "set", "default", "--weight", "3"), ("drain", "--yes")):
        refused = run(remote.run_dir, *words, APPLIANCE_ADMIN_KEY=key)
        assert refused.returncode != 0
        assert "scope 'admin'" in refused.stderr
    assert read(remote.run_dir, "tenants list") == before
    assert remote.service.status()["drains"] == []


def test_an_operator_acts_through_ssh_as_the_account_of_the_login(remote: Remote) -> None:
    assert run(remote.run_dir, "drain", "--queue", "--yes").returncode == 0
    [drain] = remote.service.status()["drains"]
    assert drain["queue"]
    answers: list[int] = []
    client = threading.Thread(target=ask, args=(remote, answers))
    client.start()

    def held() -> Any:
        return json.loads(run(remote.run_dir, "requests", "--running").stdout)

    [request] = remote.service.wait_until(held, 60, "the held request")
    assert run(remote.run_dir, "requests", "cancel", request["request_id"], "--yes").returncode == 0
    client.join(120)
    assert [status >= 400 for status in answers] == [True]
    assert run(remote.run_dir, "resume").returncode == 0
    assert remote.service.status()["drains"] == []
    for action in ("drain", "requests.cancel", "resume"):
        newest = actions(remote, action)[0]
        assert (newest.actor, newest.result) == (f"uid:{_UID}", "ok")


def test_a_lost_forward_can_be_established_again(remote: Remote) -> None:
    local, target = remote.run_dir / "again" / "admin.sock", remote.service.run_dir / "admin.sock"
    local.parent.mkdir(mode=0o700)
    for _ in range(2):
        with remote.server.forward(local, target):
            assert read(local.parent, "status")["state"] == "ready"
        assert run(local.parent, "status").returncode != 0


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_console_verifies_the_chain_and_shows_findings_through_ssh(
    remote: Remote, tmp_path: Path
) -> None:
    terminal = Tmux(tmp_path, f"{APPLIANCE} console --run-dir {remote.run_dir}", (120, 40))
    try:
        terminal.wait_for("Tokens per second")
        terminal.keys("V")
        terminal.wait_for("chain ok at")
        terminal.keys("0")
        terminal.keys("v", "v")
        terminal.wait_for("the audit chain is complete and unchanged")
    finally:
        terminal.tmux("kill-server")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_console_acts_through_ssh_only_with_write(remote: Remote, tmp_path: Path) -> None:
    def tokens_per_minute() -> float | None:
        with AdminClient(remote.service.run_dir, CALL_TIMEOUT_S) as client:
            [tenant] = [one for one in client.tenants() if one.name == "default"]
        return tenant.quota.tokens_per_minute

    command = "tenants set default --tokens-per-minute 60000"
    before = tokens_per_minute()
    for options in ("", " --write"):
        folder = tmp_path / f"console{options.strip()}"
        folder.mkdir()
        terminal = Tmux(folder, f"{APPLIANCE} console{options} --run-dir {remote.run_dir}", (120, 40))
        try:
            terminal.wait_for("Tokens per second")
            terminal.keys("7")
            terminal.wait_for("default")
            if options:
                perform(terminal, command)
            else:
                terminal.keys(":")
                terminal.wait_for("type a command")
                terminal.type(command)
                terminal.wait_for(command)
                terminal.keys("Enter")
                terminal.wait_for("start it with --write")
                assert tokens_per_minute() == before != 60000
                continue
            # The dialog closes before the action has been performed.
            remote.service.wait_until(lambda: tokens_per_minute() == 60000, 60, "the limit to be set")
            newest = actions(remote, "tenants.set")[0]
            assert (newest.actor, newest.result) == (f"uid:{_UID}", "ok")
            perform(terminal, "drain --queue")
            terminal.wait_for("SERVICE DRAIN")
            assert len(remote.service.status()["drains"]) == 1
            perform(terminal, "resume")
            remote.service.wait_until(
                lambda: not remote.service.status()["drains"], 60, "the end of the drain"
            )
        finally:
            terminal.tmux("kill-server")
