"""Tests that no option or argument value causes a traceback. Invalid and out-of-range numbers and times must
be reported as command-line errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.actions import ACTIONS, Action
from appliance.settings import Flags, SettingsError, load_settings
from tests.cli.conftest import EVERY, Run
from tests.cli.servers import AdminService, ApiService

NOT_UTF_8 = os.fsdecode(b"caf\xe9")
NOT_NUMBERS = ("", "nan", "1e999", "0x10", "\u0663\u0664", "9" * 5000, NOT_UTF_8)
OUT_OF_RANGE = ("-1", "99999999999999999999", "99999999999d", "-5d", "9" * 400 + "d", "9999999-01-01")
TEXTS = ("", "\n", "x" * 5000, "../" * 400, NOT_UTF_8, "-", "a=b", "\U0001f642")
NUMBERS = {"N", "T", "P", "R", "S", "MS", "SPAN", "TIME", "P0…P3"}
"""Metavars of options that take a number, a duration or a time."""


def required(command: Any, but: Any = None) -> list[str]:
    """Return the required options and arguments of a command, except those for the parameter `but`."""
    words = []
    for parameter in command.params:
        if parameter.required and parameter is not but:
            value = "uid:7" if parameter.name == "peer" else "x"
            words += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    if any(parameter.name == "yes" for parameter in command.params):
        words.append("--yes")
    return words


@pytest.fixture(autouse=True)
def _nothing_lasting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in a temporary folder with standard input closed, and make `serve` exit after reading its
    settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("appliance.core.process.run", _read_settings)
    monkeypatch.setattr(sys, "stdin", None)


def _read_settings(flags: Flags) -> int:
    try:
        load_settings(flags)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 78
    return 0


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_no_value_causes_a_traceback(
    cli: Run, admin: AdminService, api: ApiService, run_dir: Path, databases: Path, words: tuple[str, ...]
) -> None:
    command = EVERY[words]
    places = [
        word
        for name, word in (("run_dir", f"--run-dir={run_dir}"), ("state_dir", f"--state-dir={databases}"))
        if any(parameter.name == name for parameter in command.params)
    ]
    for parameter in command.params:
        if getattr(parameter, "is_flag", False) or parameter.name == "help":
            continue
        is_number = parameter.metavar in NUMBERS
        if words == ("bench",) and not is_number:
            continue  # An accepted value would start a run; tests/bench covers these options.
        for value in (*NOT_NUMBERS, *OUT_OF_RANGE) if is_number else TEXTS:
            if parameter.param_type_name == "argument":
                given = ["--", value]
            else:
                given = [f"{parameter.opts[-1]}={value}"]
            others = [word for word in places if not word.startswith(f"{parameter.opts[-1]}=")]
            outcome = cli(*words, *others, *required(command, parameter), *given)
            said = f"{words} {parameter.name} {value[:40]!r}: {outcome}"
            assert "Traceback" not in outcome.err, said
            if value == "-5d" and parameter.name in ("since", "until", "at"):
                continue  # It means 5 days ago.
            assert outcome.code in ((2,) if is_number else (0, 1, 2, 78)), said
            assert outcome.code == 0 or (outcome.err + outcome.out).strip(), said


DANGEROUS = [action for action in ACTIONS if action.danger != "none"]


def test_only_actions_that_cannot_be_undone_need_the_typed_name_of_their_target() -> None:
    by_danger = {action.name: action.danger for action in DANGEROUS}
    typed = {name for name, danger in by_danger.items() if danger == "typed"}
    assert typed == {"tenants.delete", "keys.revoke", "models.remove", "models.prune"}
    # These actions can refuse or end requests.
    assert set(by_danger) - typed == {
        *("tenants.suspend", "keys.rotate", "peers.unmap", "drain", "models.unload", "requests.cancel"),
    }


@pytest.mark.parametrize("action", DANGEROUS, ids=lambda action: action.name)
def test_without_a_terminal_a_dangerous_action_needs_the_yes_option(
    cli: Run, admin: AdminService, run_dir: Path, action: Action
) -> None:
    words = tuple(action.name.split("."))
    asked = [word for word in required(EVERY[words]) if word != "--yes"]
    outcome = cli(*words, *asked, "--run-dir", run_dir)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"'{action.title} " in outcome.err and "add --yes" in outcome.err
    assert admin.actions == []
    if words != ("drain",):  # `drain` would wait until the drain is complete
        cli(*words, *asked, "--yes", "--run-dir", run_dir)
        assert [name for name, _ in admin.actions] == [action.name]
