"""Tests in a real terminal (tmux): the console leaves the terminal clean on every exit path."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.service import APPLIANCE

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Tmux:
    """A tmux server of its own, with one terminal."""

    def __init__(self, folder: Path, command: str, size: tuple[int, int] = (100, 30)) -> None:
        self._socket = str(folder / "tmux")
        self.marker = folder / "ended"
        script = folder / "run.sh"
        script.write_text(f"{command}\necho $? > {self.marker}\nstty -a > {folder}/stty\nsleep 600\n")
        self.folder = folder
        width, height = size
        self.tmux("new-session", "-d", "-x", str(width), "-y", str(height), f"sh {script}")

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", self._socket, *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait(self, condition: Callable[[], object], what: str) -> None:
        for _ in range(600):
            if condition():
                return
            time.sleep(0.2)
        raise AssertionError(f"timed out waiting for {what}:\n{self.screen()}")

    def pid(self) -> int:
        """Return the process id of the console."""
        shell = self.tmux("list-panes", "-F", "#{pane_pid}").strip()
        found = subprocess.run(["pgrep", "-P", shell], capture_output=True, text=True, check=True).stdout
        return int(found.split()[0])


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path, f"{APPLIANCE} console --demo")
    try:
        terminal.wait(lambda: "Tokens per second" in terminal.screen(), "the first frame")
        yield terminal
    finally:
        terminal.tmux("kill-server")


@pytest.mark.parametrize("end", ["q", "TERM", "HUP"])
def test_the_terminal_is_clean_after_every_exit(demo: Tmux, end: str) -> None:
    if end == "q":
        demo.tmux("send-keys", "q")
    else:
        subprocess.run(["kill", f"-{end}", str(demo.pid())], check=True)
    demo.wait(demo.marker.exists, "the console to end")
    code = {"q": "0", "TERM": "143", "HUP": "129"}[end]
    demo.wait(lambda: (demo.folder / "stty").exists() and (demo.folder / "stty").read_text(), "stty")
    assert demo.marker.read_text().strip() == code
    modes = (demo.folder / "stty").read_text().split()
    assert {"icanon", "echo", "isig", "icrnl", "opost"} <= {mode.rstrip(";") for mode in modes}
    assert "Tokens per second" not in demo.screen()
