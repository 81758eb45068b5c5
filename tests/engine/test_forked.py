"""Tests that a forked process behaves like one that was started by `subprocess.Popen`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedPopen

SHOW = """
import json, os, sys
os.write(int(sys.argv[1]), b"to the pipe")
leads = os.getsid(0) == os.getpid()
words = open("/proc/self/cmdline").read().split("\\0")[:5]
print(json.dumps([os.getppid(), leads, os.environ.get("GIVEN"), os.getcwd(), words, "torch" in sys.modules]))
print(sys.stdin.read().upper(), file=sys.stderr)
sys.exit(7)
"""
SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Write the modules `show` and `rest`, and return the environment that finds them."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "rest.py").write_text(SLEEP)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "GIVEN": "value"}


@pytest.mark.parametrize("start", [subprocess.Popen, ForkedPopen])
@pytest.mark.parametrize("session", [False, True])
def test_output_exit_code_descriptors_and_environment_are_those_of_popen(
    start: Any, session: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    words = [sys.executable, "-P", "-m", "show", str(writing)]
    with start(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writing],
        env=environment,
        cwd=tmp_path,
        text=True,
        start_new_session=session,
    ) as process:
        os.close(writing)
        out, err = process.communicate("input", timeout=600)
    expected = [os.getpid(), session, "value", str(tmp_path), words, start is ForkedPopen]
    assert (json.loads(out), err, process.returncode) == (expected, "INPUT\n", 7)
    assert (os.read(reading, 64), os.read(reading, 64)) == (b"to the pipe", b"")
    os.close(reading)


@pytest.mark.parametrize("start", [subprocess.Popen, ForkedPopen])
def test_a_killed_process_reports_the_signal(start: Any, environment: dict[str, str]) -> None:
    process = start([sys.executable, "-m", "rest"], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"\n"
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout.read() == b""
    process.stdout.close()
