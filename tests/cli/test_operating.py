"""What docs/operating.md tells people to type must exist as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from appliance.actions import ACTIONS
from tests.cli.conftest import Run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operating.md").read_text()


def commands() -> list[str]:
    """Every use of the command in blocks and in code spans, with its options."""
    found = re.findall(r"^(?:\$ |[A-Z_]+=\S+ )?(appliance [a-z].*)$", PAGE, re.MULTILINE)
    found += re.findall(r"`(appliance [a-z][^`]*)`", PAGE)
    return sorted({line.partition("  #")[0].partition(" | ")[0].strip() for line in found})


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_page_exists_with_its_options(cli: Run, line: str) -> None:
    # With --help nothing is run, but an unknown command or option is still refused.
    outcome = cli(*shlex.split(line)[1:], "--help")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    "action", [a.name for a in ACTIONS if a.name.split(".")[0] in ("tenants", "keys", "peers")]
)
def test_every_decision_about_tenants_keys_and_peers_is_on_the_page(action: str) -> None:
    assert any(line.startswith(f"appliance {action.replace('.', ' ')} ") for line in commands())


def test_every_link_of_the_page_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).resolve().parents[2] / "docs" / link).exists(), link
