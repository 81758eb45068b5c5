"""Tests that the commands and code in the README work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from appliance.settings import Flags, load_settings
from tests.cli.conftest import Run

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return every command line, with its options, from shell blocks and code spans."""
    lines = [line.partition("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    found = [line for line in lines if line.startswith("appliance ")]
    found += re.findall(r"`(appliance [a-z][^`]*)`", README)
    return sorted(set(found))


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 8


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_readme_exists_with_its_options(cli: Run, line: str) -> None:
    # With --help, the command does nothing, but unknown commands and options are still errors.
    outcome = cli(*shlex.split(line)[1:], "--help")
    assert outcome.code == 0, outcome.err


def test_the_example_of_a_settings_file_is_valid(tmp_path: Path) -> None:
    (example,) = blocks("toml")
    for name in ("chat", "small"):
        (tmp_path / name).mkdir()
        example = example.replace(f"/srv/models/{name}", str(tmp_path / name))
    (tmp_path / "appliance.toml").write_text(example)
    settings = load_settings(Flags(config=str(tmp_path / "appliance.toml")))
    assert settings.fronts == 2 and settings.models["chat"].max_model_len == 8192
    assert settings.unix.uids == [1000, 1001]


def test_the_python_examples_are_valid_python() -> None:
    for example in blocks("python"):
        compile(example, "README.md", "exec")


def test_every_file_that_the_readme_links_to_exists() -> None:
    root = Path(__file__).resolve().parents[2]
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (root / link).exists(), link
