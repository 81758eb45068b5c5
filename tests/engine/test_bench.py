"""Tests of the benchmark: its measurements, its limits and its command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.bench import __main__ as bench
from engine.bench import start
from engine.bench.limits import limit
from engine.bench.routing import count_experts
from engine.bench.shapes import SHAPES, write_config
from engine.bench.table import HEADING, line, median_run, plans_line
from engine.bench.workloads import WORKLOADS, EngineWorkload, StepStats, WorkloadResult
from engine.ceilings import CEILINGS, MinTimes, ceilings, layer_parameters, min_times
from engine.families import read_config
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec
from engine.model.decoder import Decoder
from engine.profile import __main__ as profile
from engine.sizing import parameters
from kernels.writable import check_writable
from tests.engine.tiny import TINY

ROOT = Path(__file__).parents[2]
H200 = CEILINGS["NVIDIA H200"]


@pytest.mark.parametrize(
    ("shape", "ranks", "workload", "bf16", "fp8"),
    [
        # The weights are read 50 times: 13.96 GB for the layers in bf16, or half of that in FP8, and 1.05 GB
        # for the output matrix.
        ("llama-3.1-8b", 1, "b1_50tok", 180, 92),
        ("llama-3.1-8b", 1, "b1_decode", 290, 542),
        ("llama-3.1-8b", 1, "b64_decode", 8_620, 16_600),
        ("llama-3.1-8b", 1, "n1024", 12_170, 22_900),
        # The linears need 13.96 GFLOP per token, at 700 TFLOP/s in bf16 or 1,320 TFLOP/s in FP8. Attention
        # needs 1.07 GFLOP at 700 TFLOP/s in both cases.
        ("llama-3.1-8b", 1, "prefill", 46_600, 82_600),
        ("llama-3.1-8b", 1, "ttft8k", 192, 112),
        ("llama-3.1-70b", 4, "b1_decode", 123, 245),
        ("llama-3.1-70b", 4, "prefill", 20_000, 37_000),
        # The linears need 68.5 G parameters × 2 × 8192 tokens / 4 GPUs, at 700 or 1,320 TFLOP/s. Attention
        # needs another 22 TFLOP, at 700 TFLOP/s.
        ("llama-3.1-70b", 4, "ttft8k", 432, 244),
        # A GPU reads 43.5 GB of the layers in bf16, or half of that in FP8, 0.15 GB of the output matrix, and
        # 0.38 or 0.19 GB of cache.
        ("llama-175b", 8, "b1_decode", 99, 197),
        # Computing the 32,768 prompt tokens takes 2.0 or 1.1 s. In a decode step, a GPU also reads 24 or
        # 12 GB of cache.
        ("llama-175b", 8, "b64_decode", 2_720, 5_300),
        # The linears need 43.5 GFLOP per token and GPU, at 700 or 1,320 TFLOP/s. Attention needs another 1.24
        # TFLOP, at 700 TFLOP/s.
        ("llama-175b", 8, "ttft2k", 129, 69),
        # A step reads 2.73 G parameters of the layers, 0.31 G of the output matrix, and 49 MB of cache.
        ("qwen3-30b-a3b", 1, "b1_decode", 685, 1_250),
        # On average, 8 tokens together choose 51.6 of the 128 experts. Each expert has 4.72 M parameters in
        # each of 48 layers.
        ("qwen3-30b-a3b", 1, "b8_decode", 1_300, 2_530),
        # On average, 64 tokens together choose 126 different experts.
        ("qwen3-30b-a3b", 1, "b64_decode", 4_110, 8_080),
        # The linears need 5.46 GFLOP per token, at 700 TFLOP/s in bf16 or 1,320 TFLOP/s in FP8. Attention
        # needs 1.6 GFLOP at 700 TFLOP/s in both cases.
        ("qwen3-30b-a3b", 1, "prefill", 99_000, 155_000),
    ],
)
def test_limits_are_close_to_hand_computed_values(
    tmp_path: Path, shape: str, ranks: int, workload: str, bf16: float, fp8: float
) -> None:
    config = read_config(write_config(shape, tmp_path))
    tolerance = 0.05 if config.experts is None else 0.02
    for dtype, expected in (("bfloat16", bf16), ("fp8", fp8)):
        found = limit(config, WORKLOADS[workload], H200, dtype, dtype, ranks)
        assert found == pytest.approx(expected, rel=tolerance), dtype


def test_fp8_weights_do_not_change_the_limits_of_cache_and_attention(tmp_path: Path) -> None:
    config = read_config(write_config("llama-3.1-8b", tmp_path))
    at_one, at_many = WORKLOADS["b1_decode"], WORKLOADS["n1024"]
    wide, half = (limit(config, at_many, H200, "bfloat16", kv) for kv in ("bfloat16", "fp8"))
    # With 1,024 sequences of 640 tokens, reading a bfloat16 cache takes 19.7 ms of a 41.7 ms step, and
    # reading an FP8 cache takes 10.2 ms of 32.1 ms.
    assert half / wide == pytest.approx(1.13, abs=0.02)
    alone = limit(config, at_one, H200, "bfloat16", "fp8")
    assert alone == pytest.approx(limit(config, at_one, H200, "bfloat16", "bfloat16"), rel=0.01)
    # A prompt that is computed in a single pass does not read the cache, so the cache's dtype does not affect
    # its attention.
    prompts = [limit(config, WORKLOADS["prefill"], H200, "fp8", kv) for kv in ("bfloat16", "fp8")]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("cuda:0 NVIDIA H200", True),
        ("cuda:7 NVIDIA H200", True),
        ("cuda:1 NVIDIA H100 80GB HBM3", True),
        ("cuda:0 NVIDIA H200 NVL", False),
        ("cuda:0 NVIDIA H100 PCIe", False),
        ("cpu", False),
    ],
)
def test_only_known_devices_have_limits(device: str, known: bool) -> None:
    assert (ceilings(device) is not None) == known


def test_no_measured_result_on_an_h100_exceeds_its_limit(tmp_path: Path) -> None:
    """The measurements are from docs/performance.md, 2026-11-22."""
    config = read_config(write_config("llama-3.1-8b", tmp_path))
    measured = {
        "bfloat16": {"b1_decode": 185, "b8_decode": 1_299, "b64_decode": 5_989, "prefill": 43_360},
        "fp8": {"b1_decode": 305, "b8_decode": 2_028, "b64_decode": 9_513, "prefill": 71_088},
    }
    for dtype, results in measured.items():
        for workload, result in results.items():
            upper = limit(config, WORKLOADS[workload], CEILINGS["NVIDIA H100 80GB HBM3"], dtype, dtype)
            assert 0.5 * upper < result < upper, (dtype, workload)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        # Published parameter counts in billions (total and active), including embeddings: 30.5 and 3.3; 235
        # and 22; 46.7 and 12.9.
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("qwen3-235b-a22b", 235.1e9, 22.2e9),
        ("mixtral-8x7b", 46.70e9, 12.88e9),
    ],
)
def test_shapes_with_experts_have_their_published_sizes(
    tmp_path: Path, shape: str, total: float, active: float
) -> None:
    config = read_config(write_config(shape, tmp_path))
    assert parameters(config) == pytest.approx(total, rel=1e-3)
    vocabulary = 2 * config.vocab_size * config.hidden_size
    assert layer_parameters(config) + vocabulary == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("fp8", [False, True])
def test_random_weights_route_nearly_uniformly(tmp_path: Path, fp8: bool) -> None:
    shape = SHAPES["qwen3-30b-a3b"] | {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
    shape |= {"num_attention_heads": 4, "head_dim": 32, "moe_intermediate_size": 16, "num_experts": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"bos_token_id": 1, "eos_token_id": 2}))
    spec = ReplicaSpec(
        replica="bench-0",
        model_path=str(tmp_path),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_blocks=40,
        quantization="fp8" if fp8 else "auto",
    )
    engine = LocalEngine(spec)
    try:
        found = count_experts(engine, replace(WORKLOADS["b8_decode"], prompt_tokens=20))
        alone = count_experts(engine, WORKLOADS["b1_50tok"])
        assert count_experts(engine, WORKLOADS["prefill"]) is None
        assert engine.runner.decoder.forward.__func__ is Decoder.forward
    finally:
        engine.close()
    assert alone is not None and alone.counted == alone.expected == 8
    assert found is not None and found.experts == 64
    assert found.expected == pytest.approx(64 * (1 - (56 / 64) ** 8))
    assert found.counted == pytest.approx(found.expected, rel=0.06)
    assert "of 64, 42.0 expected for a uniform choice" in found.line()


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_the_lower_bounds_of_step_times_agree_with_the_limits(tmp_path: Path, weights: str) -> None:
    config = read_config(write_config("llama-3.1-70b", tmp_path))
    least = min_times(config, "cuda:0 NVIDIA H200", weights, 4)
    one = limit(config, EngineWorkload(1, 1, 1000, "output_tok_s"), H200, weights, weights, 4)
    assert 0.97 / one < least.step_s < 1 / one
    prompts = limit(config, WORKLOADS["prefill"], H200, weights, weights, 4)
    assert 0.9 / prompts < least.prompt_token_s < 1 / prompts
    assert min_times(config, "cpu", "float32", 4) == MinTimes()
    blocks, fp8 = (min_times(config, "cuda:0 NVIDIA H200", each, 4) for each in ("fp8-block", "fp8"))
    assert blocks == fp8


def test_ranks_that_share_a_kv_head_each_read_its_whole_cache(tmp_path: Path) -> None:
    config = read_config(write_config("llama-3.1-8b", tmp_path))  # 8 KV heads
    reading = EngineWorkload(1024, 8192, 1024, "output_tok_s")
    eight, sixteen = (limit(config, reading, H200, "fp8", "bfloat16", ranks) for ranks in (8, 16))
    assert eight == pytest.approx(8 * limit(config, reading, H200, "fp8", "bfloat16"))
    assert sixteen < 1.5 * eight


def measured(value: float, idle: float) -> WorkloadResult:
    return WorkloadResult(
        value, 1.0, None, StepStats(255, value, 1.0, idle), StepStats(1, 7.0, 0.0, idle / 2)
    )


@pytest.mark.parametrize(
    ("name", "values", "median_value"),
    [
        ("b8_decode", [1834.8, 1700.0, 1850.0], 1834.8),
        ("b8_decode", [1834.8, 1700.0], 1700.0),
        ("ttft8k", [203.4, 210.5, 201.4], 203.4),
        ("ttft8k", [203.4, 210.5], 210.5),
        ("ttft8k", [203.4], 203.4),
    ],
)
def test_the_table_shows_the_steps_of_the_median_run(
    name: str, values: list[float], median_value: float
) -> None:
    workload = WORKLOADS[name]
    idle = {value: place / 100 for place, value in enumerate(values)}
    runs = [measured(value, idle[value]) for value in values]
    assert median_run(workload, runs).result == median_value
    text = line(name, workload, runs, 200.0)
    assert len(text) == len(HEADING)
    said = text.split()
    decode, mixed = said[-8:-4], said[-4:]
    most = max(idle.values())
    assert said[1] == f"{median_value:,.1f}"
    assert decode == ["255", f"{median_value:.2f}", f"{idle[median_value]:.1%}", f"{most:.1%}"]
    assert mixed == ["1", "7.00", f"{idle[median_value] / 2:.1%}", f"{most / 2:.1%}"]


def test_several_ranks_show_what_a_step_spends_on_plans() -> None:
    run = WorkloadResult(
        10.0, 1.0, None, StepStats(255, 10.0, 1.0, 0.0, 31.6), StepStats(1, 7.0, 0.0, 0.0, 104.0)
    )
    said = plans_line(WORKLOADS["b8_decode"], [run]).strip()
    assert said == "sending plans to the other ranks: 32 µs per decode step, 104 µs per mixed step"
    run.decode = StepStats(0, 0.0, 0.0, 0.0)
    assert plans_line(WORKLOADS["prefill"], [run]).endswith("ranks: 104 µs per mixed step")


def test_a_device_without_limits_has_an_empty_column() -> None:
    workload = WORKLOADS["ttft8k"]
    run = [measured(200.0, 0.0)]
    assert line("ttft8k", workload, run, 100.0).split()[3:5] == ["100", "50%"]
    without = line("ttft8k", workload, run, None)
    assert len(without) == len(HEADING)
    assert without.split()[3] == "255"


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_engine_can_read_every_shape(tmp_path: Path, shape: str) -> None:
    config = read_config(write_config(shape, tmp_path))
    bf16, fp8 = (limit(config, WORKLOADS["b1_decode"], H200, dtype, dtype) for dtype in ("bfloat16", "fp8"))
    assert fp8 > bf16


WITHOUT = """
import runpy, sys
needed, others = {"torch", "numpy", "msgspec"}, sys.argv.pop(1).split()
sys.modules.update((name, None) for name in others if name not in needed)
sys.argv[0] = "engine.bench"
runpy.run_module("engine.bench", run_name="__main__")
"""
"""Runs the benchmark in a process in which importing a package that the benchmark does not need raises an
error."""


def test_a_run_needs_few_packages_and_writes_its_results(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    small = SHAPES["llama-3.2-1b"] | {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    (model / "config.json").write_text(json.dumps(small | {"bos_token_id": 1, "eos_token_id": 2}))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=,\[]", each)[0].replace("-", "_") for each in project["dependencies"]]
    assert {"torch", "safetensors", "tokenizers"} <= set(names)
    command = [sys.executable, "-c", WITHOUT, " ".join([*names, "triton", "transformers"])]
    command += ["--model", str(model), "--runs", "2", "b1_decode"]
    options = ["--device", "cpu", "--load-format", "dummy"]
    options += ["--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--kv-blocks", "128"]
    out = tmp_path / "out" / "raw.json"
    done = subprocess.run(
        [*command, *options, "--json", str(out)], capture_output=True, text=True, timeout=600, check=True
    )
    raw = json.loads(out.read_text())
    runs = raw["workloads"]["b1_decode"]["runs"]
    assert len(runs) == 2
    for one in runs:
        assert one["result"] == pytest.approx(256 / one["seconds"])
        assert one["decode"]["count"] >= 255 and one["mixed"]["count"] >= 1
        assert one["decode"]["ms"] > 0 and 0 <= one["decode"]["idle_fraction"] <= 1
    assert "b1_decode" in done.stdout


MAINS = {"engine.bench": bench.main, "engine.profile": profile.main}


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return the only line that a program prints when it cannot start. Fails if the program starts an
    engine."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def not_started(spec: object, progress: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(start, "LocalEngine", not_started)

    def run(module: str, *options: str) -> str:
        dummy = ["--model", str(tmp_path), "--load-format", "dummy", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [module, *dummy, *options])
        assert MAINS[module]() == 1
        said = capsys.readouterr()
        assert said.out == ""
        [line] = said.err.splitlines()
        return line

    return run


@pytest.mark.parametrize(
    ("module", "workload"), [("engine.bench", ["b8_decode"]), ("engine.profile", ["--workload", "b8_decode"])]
)
def test_a_workload_that_does_not_fit_is_reported_with_its_length(
    refused: Callable[..., str], tmp_path: Path, module: str, workload: list[str]
) -> None:
    its = "b8_decode has sequences of 768 tokens (512 in, 256 out); "
    said = refused(module, *workload, "--max-model-len", "100")
    assert said.startswith(f"--max-model-len is 100 tokens, but {its}raise it, leave it out,")
    assert refused(module, *workload) == (
        f"{tmp_path} allows sequences of up to 512 tokens, but {its}choose other workloads or another model"
    )


def test_the_longest_of_several_workloads_is_reported_if_it_does_not_fit(refused: Callable[..., str]) -> None:
    assert "but long has sequences of 8320 tokens (8192 in, 128 out)" in refused("engine.bench")


@pytest.mark.parametrize(("module", "option"), [("engine.bench", "--json"), ("engine.profile", "--trace")])
def test_an_unwritable_file_is_reported_before_anything_runs(
    refused: Callable[..., str], tmp_path: Path, module: str, option: str
) -> None:
    folder, below = tmp_path / "folder", tmp_path / "config.json" / "out.json"
    folder.mkdir()
    for path, reason in ((folder, "Is a directory"), (below, "File exists")):
        assert refused(module, option, str(path)) == (
            f"{option} is {path}, which cannot be written ({reason}); name a writable file"
        )


def test_the_gpu_tests_report_an_unwritable_file_before_they_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.json"
    done = subprocess.run(
        [sys.executable, "scripts/test_gpu", "--json", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode > 0
    assert f"--json is {out}, which cannot be written (File exists)" in done.stderr


def test_the_check_for_a_writable_file_changes_nothing(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "made" / "new.json"
    kept.write_text("{}")
    to_kept, to_none, none = tmp_path / "to_kept.json", tmp_path / "to_none.json", tmp_path / "none.json"
    to_kept.symlink_to(kept)
    to_none.symlink_to(none)
    for path in (kept, new, to_kept, to_none, None):
        check_writable("--json", path)
    assert kept.read_text() == to_kept.read_text() == "{}"
    assert new.parent.is_dir() and not new.exists()
    assert to_kept.is_symlink() and to_none.is_symlink() and not none.exists()


@pytest.mark.parametrize("module", ["engine.bench", "engine.profile"])
def test_a_failed_start_is_reported_in_one_line(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, "--model", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    [said] = done.stderr.splitlines()
    assert str(tmp_path / "config.json") in said
