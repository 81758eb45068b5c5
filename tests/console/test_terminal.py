"""Tests in a real terminal (tmux): the console restores the terminal however it exits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.console.tmux import SANE, Tmux
from tests.system.service import APPLIANCE

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


@pytest.mark.parametrize(
    ("end", "option", "captures_mouse"), [("q", "", "1"), ("TERM", "--no-mouse", "0"), ("HUP", "", "1")]
)
def test_the_terminal_is_clean_after_every_exit_and_the_mouse_is_captured_unless_told_not_to(
    tmp_path: Path, end: str, option: str, captures_mouse: str
) -> None:
    demo = Tmux(tmp_path, f"{APPLIANCE} console --demo {option}")
    try:
        demo.wait_for("Tokens per second")
        assert demo.tmux("display-message", "-p", "#{mouse_any_flag}").strip() == captures_mouse
        if end == "q":
            demo.keys("q")
        else:
            subprocess.run(["kill", f"-{end}", str(demo.pid())], check=True)
        assert demo.modes() >= SANE
        assert demo.marker.read_text().strip() == {"q": "0", "TERM": "143", "HUP": "129"}[end]
        demo.wait(lambda: "Tokens per second" not in demo.screen(), "the terminal's earlier contents")
    finally:
        demo.tmux("kill-server")
