"""Tests of `scripts/measure_fit.py` with a small model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.settings import ModelSettings
from scripts.measure_fit import Case, MeasuredFit, is_expected

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_fit.py"


@pytest.mark.system
@pytest.mark.parametrize(
    ("kv_blocks", "result"),
    [("100", "fits"), ("1000000000", "refused")],
)
def test_predictions_are_compared_with_loads_and_refused_loads_are_forced(
    tmp_path: Path, kv_blocks: str, result: str
) -> None:
    out = tmp_path / "out.json"
    options = ("--kv-blocks", kv_blocks, "--limit", "1000")
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--shapes", "tiny", "--json", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {case["case"]: case for case in json.loads(out.read_text())}
    assert set(cases) == {"tiny bf16", "tiny fp8"}
    for case in cases.values():
        assert case["refused"] == (result == "refused") == ("kv_blocks is" in case["error"])
        assert (case["used_bytes"] > 0) != case["refused"]


def test_a_prediction_is_wrong_if_its_error_exceeds_the_limit() -> None:
    predicted: Any = SimpleNamespace(needed_bytes=103, usable_bytes=1000)
    case, found = Case("m", ModelSettings(folder="/m"), predicted), MeasuredFit(used_bytes=100)
    assert is_expected(case, found, limit_percent=4.0)
    assert not is_expected(case, found, limit_percent=2.0)
    assert not is_expected(case, MeasuredFit(used_bytes=100, error="out of memory"), limit_percent=4.0)
