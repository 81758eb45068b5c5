"""Tests `scripts/bench_isolation` with a short run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_isolation"


def test_a_short_run_measures_every_phase(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = "--device cpu --shape tiny --max-num-seqs 16 --max-num-batched-tokens 256 --max-model-len 2048"
    options += " --long-tokens 1500 --long-prompts 2 --samples 8 --wide-tokens 32 --wide-output 16"
    options += " --rate 10 --alone-s 1 --head-start-s 0.2 --fronts 1"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split(), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert out.exists(), done.stdout + done.stderr
    measured = json.loads(out.read_text())
    within = measured["stream_beside_ms"]["p99"] <= measured["bound_ms"]
    assert done.returncode == (0 if within else 1), done.stdout + done.stderr
    assert measured["requests"][0] == 10 and measured["requests"][1] >= 1
    assert measured["stream_alone_ms"]["p99"] > 0 and measured["stream_beside_ms"]["p99"] > 0
    assert measured["long_alone_tok_s"] > 0 and measured["long_beside_tok_s"] > 0 and measured["wide_s"] > 0
    assert "alone + two full steps" in done.stdout
