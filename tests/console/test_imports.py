"""Tests that commands import only the packages they need. Importing Textual takes 0.2 s, so only the console
imports it."""

from __future__ import annotations

import subprocess
import sys


def loaded(code: str) -> list[str]:
    """Return the top-level packages that the given code imports in a new process."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout.split()


def test_the_cli_loads_neither_the_console_nor_textual() -> None:
    code = "import typer; from appliance.cli.app import app; dict(typer.main.get_command(app).commands)"
    assert not {"console", "textual", "torch"} & set(loaded(code))


def test_one_frame_is_printed_without_textual() -> None:
    assert "textual" not in loaded("import console.top, console.fake, console.live")


def test_the_console_loads_no_engine_and_no_torch() -> None:
    assert not {"torch", "triton", "kernels"} & set(loaded("import console.app, console.live"))


def test_the_readers_of_recorded_files_are_loaded_only_for_the_past() -> None:
    code = "import console.app, console.live, sys; print('appliance.history.sources' in sys.modules)"
    assert "False" in loaded(code)
