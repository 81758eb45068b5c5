"""Tests of the command that compares the two expert layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.bench import layouts


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the benchmark with a simulation in which whole experts are 1.5 times as fast. Return the list
    of commands that were run."""
    run: list[list[str]] = []

    def benchmark(command: list[str], check: bool) -> SimpleNamespace:
        run.append(command)
        whole = "--expert-parallel" in command
        workloads = {
            "b1_decode": {"result": 150.0 if whole else 100.0, "unit": "tok/s"},
            "ttft8k": {"result": 100.0 if whole else 150.0, "unit": "ms"},
        }
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"workloads": workloads}))
        return SimpleNamespace(returncode=3 if "fail" in command else 0)

    monkeypatch.setattr(subprocess, "run", benchmark)
    return run


def test_both_layouts_run_with_the_same_arguments_and_are_compared(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "mixtral-8x7b", "--tensor-parallel-size", "4", "b1_decode", "ttft8k"]
    monkeypatch.setattr(sys, "argv", ["layouts", *arguments])
    assert layouts.main() == 0
    assert [command[3:-2] for command in commands] == [arguments, [*arguments, "--expert-parallel"]]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert rows == [
        ["b1_decode", "100.0", "150.0", "tok/s", "1.50"],
        ["ttft8k", "150.0", "100.0", "ms", "1.50"],
    ]


def test_a_failed_run_ends_the_comparison(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["layouts", "fail"])
    assert layouts.main() == 1
    assert len(commands) == 1 and "exited with code 3" in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_arguments_that_the_command_sets_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["layouts", "--expert-parallel"])
    assert layouts.main() == 1
    assert capsys.readouterr().err == "--expert-parallel is set by this command; leave it out\n"
