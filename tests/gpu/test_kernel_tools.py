"""Tests of building and profiling on a real GPU, for properties that cannot be tested without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.bench.shapes import write_config
from kernels.triton.linear_table import read_table

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
def test_after_a_build_nothing_is_compiled_any_more(tmp_path: Path, fp8: list[str]) -> None:
    cache = tmp_path / "cache"
    write_config(SHAPE, tmp_path)
    sizes = ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
    run("engine.build", "--config", str(tmp_path), "--cache", str(cache), *sizes, *fp8)
    built = sorted(cache.rglob("*"))
    assert len(built) > 100
    workloads = ["b1_decode", "b64_decode", "--runs", "1"]
    served = ["--max-num-seqs", "64", "--max-num-batched-tokens", "2048", *fp8]
    run("engine.bench", "--shape", SHAPE, *served, *workloads, TRITON_CACHE_DIR=str(cache))
    assert sorted(cache.rglob("*")) == built


@pytest.mark.parametrize("options", [[], ["--fp8"], ["--whole-layer"]], ids=str)
def test_the_tuner_measures_every_linear_of_a_shape(tmp_path: Path, options: list[str]) -> None:
    write_config(SHAPE, tmp_path)
    out = tmp_path / "table.json"
    printed = run("engine.tune", "--config", str(tmp_path), "--rows", "8", "--out", str(out), *options)
    assert ", 0 failed" in printed
    dtype = "float8_e4m3fn" if options == ["--fp8"] else "bfloat16"
    shapes = {"3072x2048", "2048x2048", "16384x2048", "2048x8192"}
    shapes |= {"128256x2048"} if not options else set()
    found = {str(product): rows for product, rows in read_table(out).products.items()}
    assert set(found) >= {f"{dtype} {shape}" for shape in shapes}
    for shape in shapes:
        entry = found[f"{dtype} {shape}"][8]
        assert entry.us > 0 and entry.library_us > 0
        assert (entry.layer_us is not None) == ("--whole-layer" in options)


def test_a_profile_shows_every_gemm_with_its_limit() -> None:
    table = run("engine.profile", "--shape", SHAPE, "--workload", "b8_decode", "--max-num-seqs", "16")
    shares = {line.split(" (")[0]: line.split()[-1] for line in table.splitlines() if "%" in line}
    for product in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert 0.2 < float(shares[product].rstrip("%")) / 100 < 1.5, table
    assert "gaps:" in table


@pytest.mark.parametrize("workload", ["b1_decode", "ttft8k"])
def test_a_profile_of_the_only_mixed_step_has_its_kernels_and_no_others(workload: str) -> None:
    options = ["--kind", "mixed", "--max-num-seqs", "16"]
    table = run("engine.profile", "--shape", SHAPE, "--workload", workload, *options)
    assert "recorded 1 step instead of 8" in table
    tokens = {"b1_decode": "512", "ttft8k": "8,192"}[workload]
    assert f"{tokens} tokens per step, 0 of them decodes" in table
    # GEMMs can be assigned to linears only if the recording contains exactly the GEMMs of a step.
    for product in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert f"\n{product} (" in table, table
