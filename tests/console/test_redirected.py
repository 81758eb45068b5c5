"""Tests that the console refuses to start if one of its streams is not a terminal."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.system.service import APPLIANCE

STREAMS = ("stdin", "stdout", "stderr")


def console(folder: Path, *redirected: str) -> tuple[int, str]:
    """Run the console on a pseudo-terminal, with the given streams redirected to a file. Return the exit code
    and all output."""
    terminal, inside = os.openpty()
    file = folder / "file"
    with file.open("w+") as other:
        streams = {name: other if name in redirected else inside for name in STREAMS}
        code = subprocess.run([str(APPLIANCE), "console", "--demo"], timeout=600, **streams).returncode  # type: ignore[call-overload]
    os.close(inside)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # All output has been read.
        pass
    os.close(terminal)
    return code, " ".join((shown.decode() + file.read_text()).split())


@pytest.mark.parametrize(
    ("redirected", "named"),
    [
        (("stdin",), "standard input is redirected"),
        (("stdout", "stderr"), "standard output and standard error are redirected"),
    ],
)
def test_the_console_names_the_stream_that_is_not_a_terminal(
    tmp_path: Path, redirected: tuple[str, ...], named: str
) -> None:
    code, written = console(tmp_path, *redirected)
    assert code == 2
    assert f"the console needs a terminal, but {named}" in written
    assert "without redirections" in written and "appliance top" in written
    assert "\x1b[?1049h" not in written, "the screen must not be changed"
