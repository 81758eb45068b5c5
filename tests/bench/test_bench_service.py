"""Tests of the benchmark on the shipped model, against the real service and against the engine alone."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.text.tokenizer import Tokenizer
from tests.system.service import service

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_service"


def test_a_small_run_against_the_service(tmp_path: Path) -> None:
    with service("--fronts", "1") as running:
        words = ["--concurrency", "4", "--requests", "12", "--prompt-tokens", "48", "--output-tokens", "24"]
        done = running.run("bench", *words, "--json", str(tmp_path / "out.json"))
        assert done.returncode == 0, done.stdout + done.stderr
        made = json.loads((tmp_path / "out.json").read_text())
        (run,) = made["results"][0]["runs"]
        assert made["model"] == "demo" and 4000 < made["vocab_size"] <= 5120
        assert (run["succeeded"], run["failures"], run["short_answers"]) == (12, {}, 0)
        assert (run["output_tokens"], run["prompt_tokens"]) == (12 * 24, 12 * 48)
        assert run["ttft_ms"]["p50"] > 0 and run["itl_ms"]["p50"] > 0

        # The service logged the same requests that the client counted, and none of them hit the prefix cache.
        def whole() -> list[dict[str, Any]]:
            return [row for row in running.rows() if row["generated_tokens"] == 24]

        # Four of the requests are the warm-up. The counts arrive with a delay: a replica reports them only
        # after the client has received the last token.
        running.wait_until(lambda: len(whole()) >= 12 + 4, 60, "the rows of all requests")
        rows = whole()
        assert len(rows) == 12 + 4
        assert all(row["prompt_tokens"] == 48 and not row["cached_tokens"] for row in rows)


TINY = "--shape tiny --max-num-seqs 16 --max-num-batched-tokens 256 --fronts 1 --set threads=1"


def measure(folder: Path, options: str) -> tuple[Any, str]:
    """Run the benchmark with a tiny model. Return its measurements and its output."""
    out = folder / "out.json"
    command = [sys.executable, str(SCRIPT), *TINY.split(), *options.split(), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_the_service_is_compared_with_its_engine(tmp_path: Path) -> None:
    loads = "--requests 3 --one-output-tokens 4 --streams 5 --prompt-tokens 40 --output-tokens 12"
    made, output = measure(tmp_path, f"--set max_mixed_tokens=64 {loads}")
    for measured in (made["engine"], made["service"]):
        assert all(run["output_tok_s"] > 0 and run["ttft_ms"]["p50"] > 0 for run in measured["runs"])
        assert [run["output_tokens"] for run in measured["runs"]] == [3 * 4, 5 * 12]
        assert measured["start_s"] > 0
    longest_ms = made["engine"]["longest_step_ms"][1]
    assert longest_ms > 0 and f"{longest_ms:.1f} ms" in output
    five, cpu_s = made["service"]["runs"][1], made["service"]["cpu_s"][1]
    assert five["failures"] == {} and cpu_s["fronts"] > 0
    lines = output.splitlines()
    assert [line.split()[:3] for line in lines if " streams " in line] == [
        ["5", "streams", "engine"],
        ["5", "streams", "service"],
        ["5", "streams", f"{100 * cpu_s['core'] / five['seconds']:.0f}%"],
    ]


def test_a_first_burst_is_answered_by_a_new_service(tmp_path: Path) -> None:
    loads = "--first-burst --no-engine --streams 24 --prompt-tokens 40 --output-tokens 12"
    made, output = measure(tmp_path, loads)
    (burst,) = made["first_bursts"]
    for run in (burst["burst"], burst["again"]):
        assert (run["succeeded"], run["failures"]) == (24, {})
    assert "first burst of 24: 24 answered, failed: none" in output


def test_every_token_of_the_measured_model_has_its_own_text(tmp_path: Path) -> None:
    vocabulary = runpy.run_path(str(SCRIPT))["write_checkpoint"]("tiny", tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    stream = tokenizer.stream()
    texts = [stream.push([token]).text for token in range(vocabulary)]
    assert vocabulary == 4096 == tokenizer.vocabulary_size
    assert texts == [f" t{token}" for token in range(vocabulary)]
