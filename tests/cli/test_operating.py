"""Tests that the commands in the operator documentation exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from appliance.actions import ACTIONS
from tests.cli.conftest import Run

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "operating.md").read_text()
PAGES = "\n".join([PAGE, *((DOCS / name).read_text() for name in ("models.md", "alerts.md"))])


def commands() -> list[str]:
    """Return every command line, with its options, from code blocks and code spans of all pages."""
    found = re.findall(r"^(?:\$ |[A-Z_]+=\S+ )?(appliance [a-z].*)$", PAGES, re.MULTILINE)
    found += re.findall(r"`(appliance [a-z][^`]*)`", PAGES)
    return sorted({line.partition("  #")[0].partition(" | ")[0].strip() for line in found})


@pytest.mark.parametrize("line", commands())
def test_every_command_on_the_pages_exists_with_its_options(cli: Run, line: str) -> None:
    # With --help, the command does nothing, but unknown commands and options are still errors.
    outcome = cli(*shlex.split(line)[1:], "--help")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("action", [a.name for a in ACTIONS])
def test_every_operator_action_is_documented_on_a_page(action: str) -> None:
    words = action.split(".")
    command = " ".join(["appliance", *(words[:1] if words[0] == "backup" else words)])
    assert any(line == command or line.startswith(f"{command} ") for line in commands())


def test_the_table_of_contents_names_every_section() -> None:
    sections = re.findall(
        r"^## (.+)$", re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL), re.M
    )
    assert re.findall(r"^\| \[(.+)\]\(#", PAGE, re.MULTILINE) == sections


def test_every_link_on_the_page_has_an_existing_target() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DOCS / link).exists(), link
