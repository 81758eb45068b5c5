"""Tests in a real terminal (tmux): the console restores the terminal however it exits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.tmux import SANE, Tmux
from tests.system.service import APPLIANCE

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path, f"{APPLIANCE} console --demo")
    try:
        terminal.wait(lambda: "Tokens per second" in terminal.screen(), "the first frame")
        yield terminal
    finally:
        terminal.tmux("kill-server")


@pytest.mark.parametrize(("option", "captured"), [("", "1"), ("--no-mouse", "0")])
def test_the_console_captures_the_mouse_unless_told_not_to(
    tmp_path: Path, option: str, captured: str
) -> None:
    terminal = Tmux(tmp_path, f"{APPLIANCE} console --demo {option}")
    try:
        terminal.wait_for("Tokens per second")
        assert terminal.tmux("display-message", "-p", "#{mouse_any_flag}").strip() == captured
    finally:
        terminal.tmux("kill-server")


@pytest.mark.parametrize("end", ["q", "TERM", "HUP"])
def test_the_terminal_is_clean_after_every_exit(demo: Tmux, end: str) -> None:
    if end == "q":
        demo.keys("q")
    else:
        subprocess.run(["kill", f"-{end}", str(demo.pid())], check=True)
    assert demo.modes() >= SANE
    assert demo.marker.read_text().strip() == {"q": "0", "TERM": "143", "HUP": "129"}[end]
    assert "Tokens per second" not in demo.screen()
