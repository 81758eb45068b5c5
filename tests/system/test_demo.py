"""Tests of `scripts/demo`, with and without a terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.console.tmux import SANE, Tmux

pytestmark = pytest.mark.system

COMMAND = [sys.executable, str(Path(__file__).resolve().parents[2] / "scripts" / "demo_session.py")]
PURPOSE = "Remove any common leading whitespace from every line in `text`."


def test_without_a_terminal_the_demo_shows_answer_and_row_and_stops_the_service() -> None:
    done = subprocess.run(
        COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert PURPOSE in done.stdout
    assert "finish_reason        stop" in done.stdout
    assert "The service stopped cleanly." in done.stdout


class Terminal:
    """A program that runs in a separate terminal."""

    def __init__(self, command: list[str]) -> None:
        self.text = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)

    def expect(self, words: str, timeout_s: float = 180) -> None:
        """Read until `words` have appeared after the text found by the previous call."""
        assert self._comes(words, timeout_s), f"{words!r} did not appear within {timeout_s} s: {self.text}"
        self.text = self.text.partition(words)[2]

    def press(self, keys: str, words: str) -> None:
        """Send the key repeatedly until `words` appear in the output. One attempt is not enough, because a
        signal that arrives just before the program reads does not interrupt the read."""
        for _ in range(10):
            self.type(keys)
            if self._comes(words, 6):
                break
        self.expect(words)

    def _comes(self, words: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while words not in self.text:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            self.text += os.read(self._descriptor, 4096).decode(errors="replace")
        return True

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_a_terminal_the_console_shows_the_questions_that_are_asked(tmp_path: Path) -> None:
    terminal = Tmux(tmp_path, " ".join(COMMAND), (120, 40))
    try:
        terminal.wait_for("Tokens per second")
        # Several questions have been answered: their requests are on the screen of finished requests.
        terminal.keys("4", "v")
        terminal.wait(lambda: terminal.screen().count(" stop ") >= 3, "three finished requests")
        terminal.keys("q")
        terminal.wait_for("The service stopped cleanly.")
        assert terminal.modes() >= SANE
        assert terminal.marker.read_text().strip() == "0"
    finally:
        terminal.tmux("kill-server")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_demo_that_is_terminated_restores_the_terminal_and_stops_the_service(tmp_path: Path) -> None:
    terminal = Tmux(tmp_path, " ".join(COMMAND), (120, 40))
    try:
        terminal.wait_for("Tokens per second")
        processes = psutil.Process(terminal.pid()).children(recursive=True)
        psutil.Process(terminal.pid()).terminate()
        assert terminal.modes() >= SANE
        assert psutil.wait_procs(processes, timeout=600)[1] == []
    finally:
        terminal.tmux("kill-server")


def test_in_a_terminal_ctrl_c_cancels_the_answer_and_ctrl_d_ends_the_demo() -> None:
    demo = Terminal([*COMMAND, "--chat"])
    demo.expect(PURPOSE)
    demo.expect("Ctrl-D exits.")
    demo.expect("> ")
    demo.press("\x03", "> ")
    demo.type("What does textwrap.dedent do?\n")
    demo.expect(PURPOSE)
    demo.expect("> ")
    demo.type("\x04")
    demo.expect("The service stopped cleanly.")
    assert demo.exit_code() == 0


def test_an_installation_shows_its_progress(tmp_path: Path) -> None:
    """A stand-in for pip installs the packages until the progress has been printed."""
    told = tmp_path / "told"
    wait = f"timeout 300 sh -c \"until grep -q 'still installing: .* in .venv' '{told}'; do sleep 0.1; done\""
    pip = f"#!/bin/sh\ncase $* in *install*) {wait} && exit $CODE;; esac\n"
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(pip)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    environment = Path(__file__).resolve().parents[2] / "scripts" / "environment"
    script = f'. "{environment}"; sleep() {{ command sleep 1; }}; make_environment demo'

    def install(code: int) -> int:
        with told.open("w") as file:
            return subprocess.run(
                ["bash", "-euc", script],
                cwd=tmp_path,
                env={**os.environ, "CODE": str(code)},
                stderr=file,
                timeout=600,
                check=False,
            ).returncode

    assert install(1) == 1 and "pip could not install the packages" in told.read_text()
    assert install(0) == 0
    assert install(0) == 0 and told.read_text() == "", "nothing is left to install"
