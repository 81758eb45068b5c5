"""A console in a real terminal (tmux)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SANE = {"icanon", "echo", "isig", "icrnl", "opost"}
"""Terminal modes that are set again after a program has restored the terminal."""


class Tmux:
    """A separate tmux server with one terminal."""

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
            # With these variables set, Textual would not ask the terminal for its size.
            env={name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
        )
        return done.stdout

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait(self, condition: Callable[[], object], description: str) -> None:
        for _ in range(600):
            if condition():
                return
            time.sleep(0.2)
        raise AssertionError(f"timed out waiting for {description}:\n{self.screen()}")

    def keys(self, *keys: str) -> None:
        """Press keys, which are given by the names that tmux uses."""
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type the given text."""
        self.tmux("send-keys", "-l", text)

    def wait_for(self, text: str) -> None:
        """Wait until the screen shows the text."""
        self.wait(lambda: text in self.screen(), repr(text))

    def modes(self) -> set[str]:
        """Wait until the console has exited, and return the terminal's modes."""
        self.wait(self.marker.exists, "the console to end")
        path = self.folder / "stty"
        self.wait(lambda: path.exists() and path.read_text(), "stty")
        return {mode.rstrip(";") for mode in path.read_text().split()}

    def pid(self) -> int:
        """Return the process id of the console."""
        shell = self.tmux("list-panes", "-F", "#{pane_pid}").strip()
        found = subprocess.run(["pgrep", "-P", shell], capture_output=True, text=True, check=True).stdout
        return int(found.split()[0])


def perform(terminal: Tmux, command: str) -> None:
    """Enter an action on the console's command line and confirm its dialog."""
    terminal.keys(":")
    terminal.wait_for("type a command")
    terminal.type(command)
    terminal.wait_for(command)
    terminal.keys("Enter")
    confirm(terminal)


def confirm(terminal: Tmux) -> None:
    """Confirm an action's dialog. The focus is on Cancel at first, and there may be a forecast button between
    Cancel and the button that confirms."""
    terminal.wait_for("$ appliance")
    terminal.keys(*["Tab"] * (2 if "What if" in terminal.screen() else 1), "Enter")
    terminal.wait(lambda: "$ appliance" not in terminal.screen(), "the dialog to close")
