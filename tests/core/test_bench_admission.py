"""Tests that the admission benchmark runs and that every request gets a decision. Its timings are not
tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_request_of_the_admission_benchmark_gets_a_decision(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    sizes = ["--tenants", "20", "--queued", "400", "--requests", "200", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench_admission"), *sizes],
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert out.exists(), done.stderr
    measurements = json.loads(out.read_text())
    assert sum(measurements["decisions"].values()) == measurements["requests"] == 200
    assert measurements["queued"] >= 400
    assert measurements["decisions"]["waits"] > 100
    # On average, half of the requests have a deadline, and the service can promise to meet all of them. With
    # 400 waiting requests, the standard deviation of the share of requests with a deadline is 2.5%.
    assert 0.4 * measurements["queued"] < measurements["promises"] < 0.6 * measurements["queued"]
