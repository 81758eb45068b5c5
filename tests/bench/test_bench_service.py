"""The benchmark against the real service with the shipped model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.system.service import APPLIANCE, service

pytestmark = pytest.mark.system


def test_a_small_run_against_the_service(tmp_path: Path) -> None:
    with service("--fronts", "1") as running:
        words = ["--concurrency", "4", "--requests", "12", "--prompt-tokens", "48", "--output-tokens", "24"]
        done = subprocess.run(
            [
                APPLIANCE,
                "bench",
                "--run-dir",
                str(running.run_dir),
                *words,
                "--json",
                str(tmp_path / "out.json"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        made = json.loads((tmp_path / "out.json").read_text())
        (run,) = made["results"][0]["runs"]
        assert made["model"] == "demo" and 4000 < made["prompt_ids_below"] <= 5120
        assert (run["succeeded"], run["failures"], run["short_answers"]) == (12, {}, 0)
        assert (run["output_tokens"], run["prompt_tokens"]) == (12 * 24, 12 * 48)
        assert run["ttft_ms"]["p50"] > 0 and run["itl_ms"]["p50"] > 0
        # The service's own log agrees: it saw what we counted, and nothing of it came from its cache.
        rows = [row for row in running.rows() if row["generated_tokens"] == 24]
        assert len(rows) == 12 + 4  # with the warm-up
        assert all(row["prompt_tokens"] == 48 and not row["cached_tokens"] for row in rows)
