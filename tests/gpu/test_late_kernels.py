"""Tests that an engine that is ready loads no more kernels for requests, because loading a kernel would delay
every running sequence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [[], ["--fp8"]], ids=["bf16", "FP8"])
def test_serving_launches_only_kernels_that_the_start_has_loaded(options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.gpu.late_kernels", "llama-3.1-8b", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["launched"] > 30
    assert result["late"] == []
