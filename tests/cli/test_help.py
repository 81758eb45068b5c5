"""Tests of `--help`: which modules it loads, and which commands and options it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from appliance.actions import ACTIONS, Action
from tests.cli.conftest import EVERY, Run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "starlette",
    "httptools",
    "sqlite_utils",
    "httpx",
    "textual",
    "numpy",
    "rich",
    "jinja2",
)


def loaded_by(*words: str) -> set[str]:
    """Return the names of the modules that the command loads."""
    source = (
        "import sys, json; from appliance.cli import main; main();"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_loads_few_modules_and_no_large_ones() -> None:
    """Counts loaded modules instead of measuring the startup time, because the count does not depend on the
    machine."""
    modules = loaded_by("--help")
    packages = {name.partition(".")[0] for name in modules}
    assert packages.isdisjoint(HEAVY)
    assert packages >= {"typer", "appliance"}
    assert len(modules) < 220  # The number is currently 206, including 138 modules of typer.


def test_a_command_loads_only_the_module_that_declares_it() -> None:
    modules = loaded_by("status", "--run-dir", "/nonexistent")
    declaring = {name for name in modules if name.startswith("appliance.cli.") and name.endswith("_commands")}
    assert declaring == {"appliance.cli.service_commands"}
    assert "pydantic" not in modules  # Typer loads pydantic from release 0.29 on.


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_explains_itself(cli: Run, command: tuple[str, ...]) -> None:
    outcome = cli(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith("Usage:") and "--help" in outcome.out
    assert outcome.err == ""
    if command != ("config", "check"):
        assert "--run-dir" in outcome.out


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_every_action_of_the_registry_is_a_command_with_its_parameters(action: Action) -> None:
    words = tuple(action.name.split("."))
    # A single `backup` command performs both actions.
    command = EVERY[words[:1] if words[0] == "backup" else words]
    offered = {part for parameter in command.params for part in (parameter.name or "").split("_")}
    for field in msgspec.structs.fields(action.parameters):
        if action.name == "backup.end" and field.name != "path":
            continue  # The command determines this value itself.
        assert set(field.name.removesuffix("_at").split("_")) <= offered, field.name
    if action.danger != "none":
        assert "yes" in offered


def test_the_version_option_prints_the_version_of_the_product(cli: Run) -> None:
    outcome = cli("--version")
    assert outcome.code == 0 and outcome.out.startswith("appliance ")


@pytest.mark.parametrize(
    "words", [("bogus",), ("status", "--bogus"), ("requests", "--limit", "0"), ("serve", "--device", "tpu")]
)
def test_an_invalid_command_line_exits_with_2_and_prints_the_error_on_stderr(
    cli: Run, words: tuple[str, ...]
) -> None:
    outcome = cli(*words)
    assert outcome.code == 2
    assert outcome.out == "" and "Error" in outcome.err and "Traceback" not in outcome.err
