"""Tests of `scripts/measure_fit.py` with a small model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_fit.py"


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "code", "result"),
    [
        (("--kv-blocks", "100", "--limit", "1000"), 0, "fits"),
        (("--kv-blocks", "100", "--limit", "0.001"), 1, "fits"),
        (("--kv-blocks", "1000000000", "--limit", "1000"), 0, "refused"),
    ],
)
def test_predictions_are_compared_with_loads_and_refused_loads_are_forced(
    tmp_path: Path, options: tuple[str, ...], code: int, result: str
) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "tiny", "--json", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    cases = {case["case"]: case for case in json.loads(out.read_text())}
    assert set(cases) == {"tiny bf16", "tiny fp8"}
    for case in cases.values():
        assert case["refused"] == (result == "refused") == ("kv_blocks is" in case["error"])
        assert (case["used_bytes"] > 0) != case["refused"]
