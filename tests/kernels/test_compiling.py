"""Tests that kernels are compiled only once, into Triton's cache, and that compilation does not need the
target GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import compiling
from tests.forked import ForkedPopen


def compiled(module: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a separate process. Triton compiles kernels in that process, but interprets them in
    this one."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    pipe = subprocess.PIPE
    with ForkedPopen(command, env=inherited | environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=550)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_a_kernel_is_compiled_into_the_cache_once(tmp_path: Path) -> None:
    done = compiled("tests.kernels.one_kernel_built", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, again = done.stdout.splitlines()
    assert again == first
    assert re.fullmatch(r"_norm 0 failures _norm\.cubin written at \d+", first)


def test_a_missing_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_send_gpu", lambda sender: None)
    with pytest.raises(compiling.GpuError, match="no usable NVIDIA GPU found: check nvidia-smi"):
        compiling.this_gpu()
