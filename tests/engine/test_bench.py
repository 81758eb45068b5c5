"""The benchmark measures what it says, and its limits are those of the ceilings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.limits import CEILINGS, limit
from engine.bench.shapes import SHAPES, write_config
from engine.bench.workloads import WORKLOADS
from engine.families import read_config

H200 = CEILINGS["NVIDIA H200"]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("b1_50tok", 180),
        ("b1_decode", 290),
        ("b64_decode", 8_620),
        ("n1024", 12_170),
        ("prefill", 46_600),
        ("ttft8k", 192),
    ],
)
def test_limits_of_the_8b_shape_are_near_those_worked_out_by_hand(
    tmp_path: Path, workload: str, expected: float
) -> None:
    config = read_config(write_config("llama-3.1-8b", tmp_path))
    assert limit(config, WORKLOADS[workload], H200, "bfloat16", "bfloat16") == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_is_one_that_the_engine_reads(tmp_path: Path, shape: str) -> None:
    config = read_config(write_config(shape, tmp_path))
    bf16, fp8 = (limit(config, WORKLOADS["b1_decode"], H200, dtype, dtype) for dtype in ("bfloat16", "fp8"))
    assert fp8 > bf16


def test_a_run_writes_its_raw_figures(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    small = SHAPES["llama-3.2-1b"] | {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    (model / "config.json").write_text(json.dumps(small | {"bos_token_id": 1, "eos_token_id": 2}))
    command = [sys.executable, "-m", "engine.bench", "--model", str(model), "--runs", "2", "b8_decode"]
    options = ["--load-format", "dummy", "--max-rows", "8", "--step-tokens", "1024", "--kv-blocks", "128"]
    out = tmp_path / "out" / "raw.json"
    done = subprocess.run(
        [*command, *options, "--json", str(out)], capture_output=True, text=True, timeout=120, check=True
    )
    raw = json.loads(out.read_text())
    runs = raw["workloads"]["b8_decode"]["runs"]
    assert len(runs) == 2
    for one in runs:
        assert one["figure"] == pytest.approx(8 * 256 / one["seconds"])
        assert one["decode"]["count"] >= 255 and one["mixed"]["count"] >= 1
        assert one["decode"]["ms"] > 0 and 0 <= one["decode"]["idle_fraction"] <= 1
    assert "b8_decode" in done.stdout


@pytest.mark.parametrize("module", ["engine.bench", "engine.profile"])
def test_an_engine_that_cannot_start_is_said_in_a_line(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "--model", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert str(tmp_path / "config.json") in said
