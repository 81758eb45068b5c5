"""Tests of building and profiling that need a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.shapes import write_config

pytestmark = pytest.mark.gpu

SHAPE = "llama-3.2-1b"


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("fp8", [[], ["--fp8", "--kv-fp8"]], ids=["bf16", "fp8"])
def test_after_a_build_no_kernel_is_compiled(tmp_path: Path, fp8: list[str]) -> None:
    cache = tmp_path / "cache"
    write_config(SHAPE, tmp_path)
    served = ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048", *fp8]
    run("kernels.build", "--config", str(tmp_path), "--cache", str(cache), *served)
    built = sorted(cache.rglob("*"))
    assert len(built) > 100
    workloads = ["b1_decode", "b64_decode", "--runs", "1"]
    run("engine.bench", "--shape", SHAPE, *served, *workloads, TRITON_CACHE_DIR=str(cache))
    assert sorted(cache.rglob("*")) == built


def test_a_profile_shows_every_gemm_with_its_limit() -> None:
    table = run("engine.profile", "--shape", SHAPE, "--workload", "b8_decode", "--max-num-seqs", "16")
    shares = {line.split(" (")[0]: line.split()[-1] for line in table.splitlines() if "%" in line}
    for product in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert 0.2 < float(shares[product].rstrip("%")) / 100 < 1.5, table
    assert "gaps:" in table


@pytest.mark.parametrize("workload", ["b1_decode", "ttft8k"])
def test_a_profile_of_a_single_mixed_step_has_only_its_kernels(workload: str) -> None:
    options = ["--kind", "mixed", "--max-num-seqs", "16"]
    table = run("engine.profile", "--shape", SHAPE, "--workload", workload, *options)
    assert "recorded 1 step instead of 8" in table
    tokens = {"b1_decode": "512", "ttft8k": "8,192"}[workload]
    assert f"{tokens} tokens a step, of which 0 decode" in table
    # GEMMs are labelled only if their number matches the step.
    for product in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert f"\n{product} (" in table, table
