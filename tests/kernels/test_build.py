"""A build compiles what serving launches, no less; proved without a GPU, by what Triton would compile."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.shapes import SHAPES
from engine.config import UnsupportedError
from engine.families import read_config
from engine.kernel_build import KernelBuild, check_kernels, dimensions
from engine.messages import ReplicaSpec
from kernels import build, compiling
from kernels.dimensions import Dimensions, DimensionsError, read_dimensions

SMALL: dict[str, Any] = SHAPES["llama-3.2-1b"] | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 128},
    "mistral": {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": 70},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_scaling": None,
        "use_sliding_window": True,
        "sliding_window": 100,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": None, "head_dim": 128},
}


def folder_of(tmp_path: Path, family: str, **changes: Any) -> Path:
    config = SMALL | {"model_type": family} | FAMILIES[family] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def compiled(module: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which Triton compiles: here it interprets."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize(
    ("family", "fp8", "kv_fp8", "ranks"),
    [("llama", 0, 0, 1), ("llama", 1, 1, 1), ("qwen2", 0, 1, 1), ("qwen3", 1, 0, 1), ("llama", 0, 1, 2)],
)
def test_a_build_foresees_and_a_start_loads_every_kernel_that_a_replica_launches(
    tmp_path: Path, family: str, fp8: int, kv_fp8: int, ranks: int
) -> None:
    done = compiled("tests.kernels.launches_of_serving", folder_of(tmp_path, family), fp8, kv_fp8, ranks)
    assert done.returncode == 0, done.stderr
    assert "UNFORESEEN" not in done.stdout
    assert "LATE" not in done.stdout
    foreseen, loaded, served, long = (int(word) for word in done.stdout.split() if word.isdecimal())
    assert foreseen >= loaded >= served > 30
    assert long == (FAMILIES[family].get("head_dim") == 128)  # of that Hopper's own kernel is


def test_kernels_are_built_and_tuned_without_dependent_launch_before_hopper(tmp_path: Path) -> None:
    """Older instruction sets lack it: nothing would compile."""
    done = compiled("tests.kernels.launches_before_hopper", folder_of(tmp_path, "llama"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    for run in ("", " tuning"):
        assert found[f"80{run}"]["kernels"] > 30 and found[f"80{run}"]["overlapping"] == 0
        assert found[f"90{run}"]["overlapping"] > 20


def test_a_build_fills_the_cache_once(tmp_path: Path) -> None:
    script = "tests.kernels.one_kernel_built"
    first = compiled(script, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == ["_norm", "compiled", "no", "failures"]
    kernels = sorted((tmp_path / "cache").rglob("*.cubin"))
    again = compiled(script, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert again.returncode == 0, again.stderr
    assert len(kernels) == 1
    assert sorted((tmp_path / "cache").rglob("*.cubin")) == kernels


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_kernels_read_a_checkpoint_as_the_engine_does(tmp_path: Path, family: str) -> None:
    folder = folder_of(tmp_path, family)
    spec = ReplicaSpec(replica="r", model_path=str(folder), max_num_seqs=64, max_num_batched_tokens=512)
    theirs = dimensions(read_config(folder), spec, dtype="bfloat16", weights="fp8", kv_cache_dtype="bfloat16")
    assert read_dimensions(folder, fp8=True, max_num_seqs=64, max_num_batched_tokens=512) == theirs


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_the_kernels_read_public_shapes_as_the_engine_does(tmp_path: Path, shape: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    spec = ReplicaSpec(replica="r", model_path=str(tmp_path), tensor_parallel_size=2)
    theirs = dimensions(
        read_config(tmp_path), spec, dtype="bfloat16", weights="bfloat16", kv_cache_dtype="fp8"
    )
    served = {
        "tensor_parallel": 2,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
    }
    assert read_dimensions(tmp_path, kv_fp8=True, **served) == theirs


def test_a_checkpoint_that_kernels_cannot_serve_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(DimensionsError, match="hidden_size is 'x'; a positive integer"):
        read_dimensions(folder_of(tmp_path, "llama", hidden_size="x"))
    with pytest.raises(DimensionsError, match="dtype is 'float32'; kernels serve bfloat16, float16"):
        read_dimensions(folder_of(tmp_path, "llama", torch_dtype="float32"))
    with pytest.raises(DimensionsError, match="4 heads do not divide among 3 ranks"):
        read_dimensions(folder_of(tmp_path, "llama"), tensor_parallel=3)
    with pytest.raises(DimensionsError, match="cannot be read"):
        read_dimensions(tmp_path / "nothing")
    for wrong in ("[]", "3", "null"):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(DimensionsError, match=r"config.json: is no object but "):
            read_dimensions(tmp_path)


ELSEWHERE = "on the CPU, or in float32, which a GPU computes without these kernels$"
SERVE = f": serve this model {ELSEWHERE}"
SERVE_UNQUANTISED = f": serve this model with weights that are not FP8, {ELSEWHERE}"

UNSERVED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"head_dim": 96}, {}, f"head_dim is 96; a GPU's kernels serve 16, 32, 64, 128, 256{SERVE}"),
    ({"head_dim": 8}, {"fp8": True}, f"head_dim is 8; .*256{SERVE}"),
    ({"head_dim": 512}, {}, "head_dim is 512;"),
    (
        {"num_attention_heads": 256, "num_key_value_heads": 1, "head_dim": 64},
        {},
        f"num_attention_heads is 256 and num_key_value_heads 1; .* at most 128 .*, not 256{SERVE}",
    ),
    ({"hidden_size": 65600, "head_dim": 64}, {}, f"hidden_size is 65600; .* serve at most 65536{SERVE}"),
    (
        {"hidden_size": 200, "head_dim": 64},
        {"fp8": True},
        f"hidden_size is 200; FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        {"intermediate_size": 528},
        {"fp8": True, "tensor_parallel": 2},
        rf"intermediate_size is 528 \(264 on each of 2 ranks\); FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        {"intermediate_size": 65552},
        {"fp8": True},
        f"intermediate_size is 65552; FP8 .* at most 65536{SERVE_UNQUANTISED}",
    ),
]


@pytest.mark.parametrize(("changes", "served", "words"), UNSERVED, ids=lambda value: str(value)[:40])
def test_a_model_that_no_kernel_serves_is_refused_before_anything_is_compiled_or_loaded(
    tmp_path: Path, changes: dict[str, Any], served: dict[str, Any], words: str
) -> None:
    folder = folder_of(tmp_path, "llama", **changes)
    with pytest.raises(DimensionsError, match=f"config.json: {words}"):
        read_dimensions(folder, **served)
    spec = ReplicaSpec(
        replica="r", model_path=str(folder), tensor_parallel_size=served.get("tensor_parallel", 1)
    )
    weights = "fp8" if served.get("fp8") else "bfloat16"
    held = {"weights": weights, "kv_cache_dtype": "bfloat16"}
    config, gpu = read_config(folder), torch.device("cuda")
    with pytest.raises(UnsupportedError, match=f"^{words}.*"):
        check_kernels(config, spec, dtype="bfloat16", **held, device=gpu)
    check_kernels(config, spec, dtype="float32", **held, device=gpu)
    check_kernels(config, spec, dtype="bfloat16", **held, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("gpu", "held", "words"),
    [
        (
            ("Tesla T4", 75),
            {},
            f"Tesla T4 has compute capability 7.5; .* 8.0 at least: .* on another GPU, {ELSEWHERE}",
        ),
        (
            ("NVIDIA A100-SXM4-80GB", 80),
            {"weights": "fp8", "kv_cache_dtype": "fp8"},
            "weights are fp8, but NVIDIA A100-SXM4-80GB has compute capability 8.0; FP8 needs 8.9 at least: "
            "serve this model with weights that are not FP8, or on another GPU$",
        ),
        (
            ("NVIDIA A10", 86),
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype is fp8, but NVIDIA A10 .*: "
            'serve this model with kv_cache_dtype "auto", or on another GPU$',
        ),
        (
            ("NVIDIA L4", 89),
            {"head_dim": 256},
            f"head_dim is 256, but NVIDIA L4 .* 8.9 and 99 KiB of .* needs 113: .* another GPU, {ELSEWHERE}",
        ),
        (("NVIDIA A100-SXM4-80GB", 80), {"head_dim": 256}, ""),
        (("NVIDIA A10", 86), {}, ""),
        (("NVIDIA L4", 89), {"weights": "fp8", "kv_cache_dtype": "fp8"}, ""),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_run_a_models_kernels_is_named_before_anything_is_compiled_or_loaded(
    tmp_path: Path,
    gpu: tuple[str, int],
    held: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = {"weights": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 64, **held}
    folder = folder_of(tmp_path, "llama", head_dim=held.pop("head_dim"))
    config, spec = read_config(folder), ReplicaSpec(replica="r", model_path=str(folder))
    monkeypatch.setattr(compiling, "current_gpu", lambda device: compiling.Gpu.of(*gpu))
    with pytest.raises(UnsupportedError, match=f"^{words}") if words else nullcontext():
        check_kernels(config, spec, dtype="bfloat16", **held, device=torch.device("cuda"))
    check_kernels(config, spec, dtype="float32", **held, device=torch.device("cuda"))
    if not words:
        return
    options = [*["--fp8"] * (held["weights"] == "fp8"), *["--kv-fp8"] * (held["kv_cache_dtype"] == "fp8")]
    monkeypatch.setattr(sys, "argv", ["kernels.build", "--config", str(folder), *options])
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.Gpu.of(*gpu))
    assert build.main() == 1
    assert re.search(f"^{words}", capsys.readouterr().err.strip())


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16},
        {"head_dim": 256},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 193, "head_dim": 64},
        {"num_attention_heads": 128, "num_key_value_heads": 1, "head_dim": 64},
        {"intermediate_size": 37, "vocab_size": 3},
    ],
    ids=str,
)
def test_other_odd_numbers_are_served(tmp_path: Path, changes: dict[str, Any]) -> None:
    read_dimensions(folder_of(tmp_path, "llama", **changes))


def test_where_there_is_no_gpu_the_message_says_so_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "_send_gpu", lambda sender: None)
    monkeypatch.setattr(sys, "argv", ["kernels.build", "--config", str(folder_of(tmp_path, "llama"))])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert "no NVIDIA GPU can be used here: see nvidia-smi" in said
    assert "--gpu and --capability" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--tensor-parallel", "0"], 1, "tensor_parallel is 0; at least 1 is needed"),
        (["--tensor-parallel", "-1"], 1, "tensor_parallel is -1; at least 1 is needed"),
        (["--max-num-seqs", "0"], 1, "max_num_seqs is 0; at least 1 is needed"),
        (["--max-num-batched-tokens", "0"], 1, "max_num_batched_tokens is 0; at least 1 is needed"),
        (["--processes", "0"], 2, "--processes is 0; at least 1 is needed"),
        (
            ["--capability", "9"],
            2,
            "--capability is 9; the compute capability times ten is needed, at least 80",
        ),
        (
            ["--cache", "FILE"],
            1,
            "the cache is FILE, which cannot be written (File exists): name another folder",
        ),
    ],
)
def test_what_cannot_be_built_is_said_before_anything_is_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    said: str,
) -> None:
    config = folder_of(tmp_path, "llama")
    options, file = [*options], str(tmp_path / "config.json")
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build", lambda *arguments: pytest.fail("the build began"))
    known = ["--config", str(config), "--gpu", "NVIDIA H200", "--capability", "90"]
    given = [file if option == "FILE" else option for option in options]
    monkeypatch.setattr(sys, "argv", ["kernels.build", *known, *given])
    try:
        ended = build.main()
    except SystemExit as error:
        ended = error.code
    assert ended == code
    *usage, line = capsys.readouterr().err.splitlines()
    assert said.replace("FILE", file) in line
    assert bool(usage) == (code == 2)


def test_a_gpu_that_the_compiler_does_not_know_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*arguments: object) -> None:
        os._exit(3)

    known = ["--config", str(folder_of(tmp_path, "llama")), "--gpu", "NVIDIA Z9", "--capability", "990"]
    monkeypatch.setattr(sys, "argv", ["kernels.build", *known, "--processes", "1"])
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "record", lambda target, run: [compiling.Job("_norm", None, "")])
    monkeypatch.setattr(compiling, "_work", dies)
    assert build.main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("compilers ended (exit codes 3) with 1 kernels to do, for capability 990, which")


def test_the_documented_way_to_a_public_shapes_folder_makes_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    [command] = re.findall(
        r"^    (python -c .*write_config.*)$", (root / "docs/kernels.md").read_text(), re.M
    )
    _python, *arguments = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert read_dimensions(tmp_path / "models" / "llama-8b").hidden == 4096


@pytest.fixture
def small(tmp_path: Path) -> Dimensions:
    return read_dimensions(folder_of(tmp_path, "qwen2"), kv_fp8=True)


@pytest.mark.parametrize("failures", [[], [compiling.Failure("_norm", "no")]])
def test_what_was_built_is_known_for_the_same_model_and_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Dimensions, failures: list[compiling.Failure]
) -> None:
    h200, other = compiling.Gpu.of("NVIDIA H200", 90), compiling.Gpu.of("NVIDIA L4", 89)
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "record", lambda target, run: [])
    monkeypatch.setattr(compiling, "compile_jobs", lambda target, jobs, processes: failures)
    assert not build.is_built(small, h200)
    assert build.build(small, h200, 1).failures == failures
    assert build.is_built(small, h200) == (not failures)
    assert not build.is_built(small, other)
    assert not build.is_built(replace(small, max_num_seqs=7), h200)


def test_dimensions_reach_the_process_that_builds(small: Dimensions) -> None:
    assert small.windows == (None, 100)
    assert build._dimensions(json.dumps(asdict(small))) == small


def test_a_build_that_fails_is_said_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    failing = KernelBuild(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    failing.wait()
    assert "could not be compiled ahead (exit code 3)" in caplog.text
    assert not failing.running
