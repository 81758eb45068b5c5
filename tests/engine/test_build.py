"""Tests that a build compiles every kernel that serving launches. No GPU is needed, because Triton records
what it would compile."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import build, kernel_build
from engine.bench.shapes import SHAPES
from engine.build import read_served
from engine.config import CheckpointError, ModelConfig, UnsupportedError
from engine.families import read_config
from engine.kernel_build import KernelBuild, check_kernels
from engine.replica_model import ReplicaModel
from kernels import compiling
from tests.kernels.test_compiling import compiled
from tests.waiting import wait_until

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
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "rope_scaling": None,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 384,
        "mlp_only_layers": [0],
    },
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "rope_scaling": None, "num_experts": 16},
}


def folder_of(tmp_path: Path, family: str, **changes: Any) -> Path:
    config = SMALL | {"model_type": family} | (FAMILIES | MIXTURES)[family] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "fp8", "kv_fp8", "ranks", "whole"),
    [
        ("llama", 1, 1, 1, 0),
        ("qwen2", 0, 1, 1, 0),
        ("qwen3", 1, 0, 1, 0),
        ("llama", 0, 1, 2, 0),
        ("qwen2_moe", 1, 0, 1, 0),
        ("olmoe", 0, 0, 2, 0),
        ("olmoe", 1, 0, 2, 1),
        ("qwen3", "blocks", 1, 1, 0),
        ("qwen2_moe", "blocks", 0, 2, 0),
    ],
)
def test_warm_up_launches_and_a_build_compiles_every_kernel_that_serving_launches(
    tmp_path: Path, family: str, fp8: int | str, kv_fp8: int, ranks: int, whole: int
) -> None:
    """If `whole` is 1, each rank holds a subset of the experts, and each of these experts is complete."""
    folder = folder_of(tmp_path, family)
    done = compiled("tests.engine.launches_of_serving", folder, fp8, kv_fp8, ranks, whole)
    assert done.returncode == 0, done.stderr
    assert "NOT BUILT" not in done.stdout
    assert "NOT LOADED" not in done.stdout
    built, loaded, served, long = (int(word) for word in done.stdout.split() if word.isdecimal())
    assert built >= loaded >= served > 30
    assert long == (
        (FAMILIES | MIXTURES)[family].get("head_dim") == 128
    )  # one kernel exists only for Hopper GPUs


def test_the_collectives_of_every_rank_are_enumerated(tmp_path: Path) -> None:
    """Checks the kernels that only replicas with several ranks use: sums with and without a norm, gathers of
    two sizes, and the choice of the best token. Passes that are computed in halves also launch a barrier
    kernel, and a sum kernel that is the same on all ranks."""
    folder = folder_of(tmp_path, "llama")
    done = compiled("tests.engine.launches_of_halves", folder, 2)
    assert done.returncode == 0, done.stderr
    whole, halves = ([int(count) for count in line.split()] for line in done.stdout.splitlines())
    assert whole[3] == 0 and all(count > 0 and count % 2 == 0 for count in whole[:3])
    assert halves == [whole[0], whole[1] + 2, whole[2], 1]


def test_kernels_are_built_and_tuned_without_dependent_launch_before_hopper(tmp_path: Path) -> None:
    """On GPUs before Hopper, kernels that use programmatic dependent launch would not compile."""
    done = compiled("tests.engine.launches_before_hopper", folder_of(tmp_path, "llama"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    for run in ("", " tuning"):
        assert found[f"80{run}"]["kernels"] > 30 and found[f"80{run}"]["overlapping"] == 0
        assert found[f"90{run}"]["overlapping"] > 20


def test_a_checkpoint_that_kernels_cannot_serve_is_named_with_its_field(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: hidden_size is 'x'; it must be an integer"):
        read_served(folder_of(tmp_path, "llama", hidden_size="x"))
    with pytest.raises(
        UnsupportedError, match=r"config.json: dtype is float32; GPU kernels support bfloat16, fl.*"
    ):
        read_served(folder_of(tmp_path, "llama", torch_dtype="float32"))
    with pytest.raises(
        UnsupportedError, match=r"config.json: tensor_parallel_size is 3, which does not divide 4"
    ):
        read_served(folder_of(tmp_path, "llama"), tensor_parallel_size=3)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_served(tmp_path / "nothing")


ELSEWHERE = "on the CPU, or in float32, which does not use the GPU kernels$"
SERVE = f"; serve this model {ELSEWHERE}"
SERVE_UNQUANTISED = f"; serve this model with weights that are not FP8, {ELSEWHERE}"

GPU = torch.device("cuda")


def replica_model(config: ModelConfig, **served: Any) -> ReplicaModel:
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return ReplicaModel(**{"config": config, "dtype": "bfloat16", **sizes, **served})


UNSERVED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"head_dim": 96}, {}, f"head_dim is 96; the GPU kernels support 16, 32, 64, 128, 256{SERVE}"),
    ({"head_dim": 8}, {"fp8": True}, f"head_dim is 8; .*256{SERVE}"),
    ({"head_dim": 512}, {}, "head_dim is 512;"),
    (
        {"num_attention_heads": 256, "num_key_value_heads": 1, "head_dim": 64},
        {},
        f"num_attention_heads is 256 and num_key_value_heads is 1; .* at most 128 .*, not 256{SERVE}",
    ),
    ({"hidden_size": 65600, "head_dim": 64}, {}, f"hidden_size is 65600; .* support at most 65536{SERVE}"),
    (
        {"hidden_size": 200, "head_dim": 64},
        {"fp8": True},
        f"hidden_size is 200; FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        {"intermediate_size": 528},
        {"fp8": True, "tensor_parallel_size": 2},
        rf"intermediate_size is 528 \(264 on each of 2 ranks\); FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        {"intermediate_size": 65552},
        {"fp8": True},
        f"intermediate_size is 65552; FP8 .* at most 65536{SERVE_UNQUANTISED}",
    ),
    (
        MIXTURES["olmoe"] | {"model_type": "olmoe", "intermediate_size": 520},
        {"fp8": True},
        f"intermediate_size is 520; FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        MIXTURES["qwen2_moe"] | {"model_type": "qwen2_moe", "moe_intermediate_size": 520},
        {"fp8": True},
        f"moe_intermediate_size is 520; FP8 .* a multiple of 16{SERVE_UNQUANTISED}",
    ),
    (
        MIXTURES["olmoe"]
        | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 513},
        {},
        f"num_local_experts is 513; .* support at most 512{SERVE}",
    ),
    (
        MIXTURES["olmoe"] | {"model_type": "olmoe", "num_experts": 513},
        {},
        f"num_experts is 513; .* support at most 512{SERVE}",
    ),
    (
        MIXTURES["olmoe"] | {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 33},
        {},
        f"num_experts_per_tok is 33; .* support at most 32{SERVE}",
    ),
]


def test_the_width_of_an_expert_that_is_complete_on_a_rank_is_not_divided(tmp_path: Path) -> None:
    changes = {"model_type": "olmoe", "intermediate_size": 528}
    config = read_config(folder_of(tmp_path, "llama", **MIXTURES["olmoe"] | changes))
    split = replica_model(config, fp8=True, tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match=r"528 \(264 on each of 2 ranks\)"):
        split.check_shapes()
    replace(split, config=config.with_whole_experts()).check_shapes()


@pytest.mark.parametrize(("changes", "served", "words"), UNSERVED, ids=lambda value: str(value)[:40])
def test_a_model_that_no_kernel_serves_is_refused_before_anything_is_compiled_or_loaded(
    tmp_path: Path, changes: dict[str, Any], served: dict[str, Any], words: str
) -> None:
    folder = folder_of(tmp_path, "llama", **changes)
    with pytest.raises(UnsupportedError, match=f"config.json: {words}"):
        read_served(folder, **served)
    model = replica_model(read_config(folder), **served)
    with pytest.raises(UnsupportedError, match=f"^{words}.*"):
        check_kernels(model, GPU)
    check_kernels(replace(model, dtype="float32"), GPU)
    check_kernels(model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("gpu", "held", "words"),
    [
        (
            ("Tesla T4", 75),
            {},
            f"Tesla T4 has compute capability 7.5; .* need at least 8.0; .* on another GPU, {ELSEWHERE}",
        ),
        (
            ("NVIDIA A100-SXM4-80GB", 80),
            {"fp8": True, "kv_fp8": True},
            "weights are fp8, but NVIDIA A100-SXM4-80GB has compute capability 8.0; FP8 needs at least 8.9; "
            "serve this model with weights that are not FP8, or on another GPU$",
        ),
        (
            ("NVIDIA A10", 86),
            {"kv_fp8": True},
            "kv_cache_dtype is fp8, but NVIDIA A10 .*; "
            'serve this model with kv_cache_dtype "auto", or on another GPU$',
        ),
        (
            ("NVIDIA L4", 89),
            {"head_dim": 256},
            f"head_dim is 256, so .* needs 113 KiB .* NVIDIA L4 .* only 99 KiB; .* another GPU, {ELSEWHERE}",
        ),
        (("NVIDIA A100-SXM4-80GB", 80), {"head_dim": 256}, ""),
        (("NVIDIA A10", 86), {}, ""),
        (("NVIDIA L4", 89), {"fp8": True, "kv_fp8": True}, ""),
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
    folder = folder_of(tmp_path, "llama", head_dim=held.pop("head_dim", 64))
    served = replica_model(read_config(folder), **held)
    monkeypatch.setattr(compiling, "current_gpu", lambda device: compiling.GpuModel.of(*gpu))
    with pytest.raises(UnsupportedError, match=f"^{words}") if words else nullcontext():
        check_kernels(served, GPU)
    check_kernels(replace(served, dtype="float32"), GPU)
    if not words:
        return
    options = [*["--fp8"] * served.fp8, *["--kv-fp8"] * served.kv_fp8]
    monkeypatch.setattr(sys, "argv", ["engine.build", "--config", str(folder), *options])
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.GpuModel.of(*gpu))
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
def test_unusual_sizes_that_the_kernels_support_are_accepted(tmp_path: Path, changes: dict[str, Any]) -> None:
    read_served(folder_of(tmp_path, "llama", **changes))


def test_a_missing_gpu_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "_send_gpu", lambda sender: None)
    monkeypatch.setattr(sys, "argv", ["engine.build", "--config", str(folder_of(tmp_path, "llama"))])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert "no usable NVIDIA GPU found: check nvidia-smi" in said
    assert "--gpu and --capability" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--tensor-parallel", "0"], 1, "tensor_parallel_size is 0; it must be at least 1"),
        (["--tensor-parallel", "-1"], 1, "tensor_parallel_size is -1; it must be at least 1"),
        (["--max-num-seqs", "0"], 2, "--max-num-seqs is 0; it must be at least 1"),
        (["--max-num-batched-tokens", "0"], 2, "--max-num-batched-tokens is 0; it must be at least 1"),
        (["--processes", "0"], 2, "--processes is 0; it must be at least 1"),
        (["--capability", "9"], 2, "--capability is 9; give the compute capability times ten, at least 80"),
        (
            ["--cache", "FILE"],
            1,
            "the cache folder FILE is not writable (File exists): choose another folder",
        ),
    ],
)
def test_an_impossible_build_is_reported_before_anything_is_compiled(
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
    monkeypatch.setattr(sys, "argv", ["engine.build", *known, *given])
    try:
        ended = build.main()
    except SystemExit as error:
        ended = error.code
    assert ended == code
    *usage, line = capsys.readouterr().err.splitlines()
    assert said.replace("FILE", file) in line
    assert bool(usage) == (code == 2)


def test_a_gpu_that_the_compiler_does_not_know_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*arguments: object) -> None:
        os._exit(3)

    known = ["--config", str(folder_of(tmp_path, "llama")), "--gpu", "NVIDIA Z9", "--capability", "990"]
    monkeypatch.setattr(sys, "argv", ["engine.build", *known, "--processes", "1"])
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "record", lambda target, run: [compiling.CompileJob("_norm", None, "")])
    monkeypatch.setattr(compiling, "_work", dies)
    assert build.main() == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "compiler processes exited (exit codes 3) with 1 kernel left to compile, for capability 990, which"
    )


def test_the_documented_command_creates_the_folder_of_a_public_shape(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    [command] = re.findall(
        r"^    (python -c .*write_config.*)$", (root / "docs/kernels.md").read_text(), re.M
    )
    _python, *arguments = shlex.split(command)
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=True, timeout=600)
    assert read_config(tmp_path / "models" / "llama-8b").hidden_size == 4096


@pytest.mark.parametrize("failures", [[], [compiling.CompileFailure("_norm", "no")]])
def test_a_build_is_found_again_for_the_same_model_and_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[compiling.CompileFailure]
) -> None:
    small = read_served(folder_of(tmp_path, "qwen2"), kv_fp8=True)
    h200, other = compiling.GpuModel.of("NVIDIA H200", 90), compiling.GpuModel.of("NVIDIA L4", 89)
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "record", lambda target, run: [])
    monkeypatch.setattr(compiling, "compile_jobs", lambda target, jobs, processes: failures)
    assert not kernel_build.is_built(small, h200)
    assert kernel_build.build(small, h200, 1).failures == failures
    assert kernel_build.is_built(small, h200) == (not failures)
    assert not kernel_build.is_built(small, other)
    assert not kernel_build.is_built(replace(small, max_num_seqs=7), h200)


def test_the_compiling_process_is_told_how_the_model_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = read_served(folder_of(tmp_path, "qwen2"), kv_fp8=True)
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: commands.append(command))
    monkeypatch.setattr(compiling, "current_gpu", lambda device: compiling.GpuModel.of("NVIDIA H200", 90))
    monkeypatch.setattr(build.knobs.cache, "dir", str(tmp_path / "cache"))
    kernel_build.start_build(small, GPU)
    [command] = commands
    monkeypatch.setattr(sys, "argv", command[command.index("engine.build") :])
    assert small.config.sliding_windows == (None, 100)
    assert build._arguments().served == small


def test_a_build_ends_with_the_replica_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    small = read_served(folder_of(tmp_path, "qwen2"), max_num_seqs=1, max_num_batched_tokens=1)
    receiver, sender = os.pipe()
    if not (replica := os.fork()):
        process = kernel_build._start_process(small, compiling.GpuModel.of("NVIDIA H200", 90))
        os.write(sender, str(process.pid).encode())
        os._exit(0)
    os.waitpid(replica, 0)
    pid = int(os.read(receiver, 100))
    for descriptor in (receiver, sender):
        os.close(descriptor)
    wait_until(lambda: not running(pid), 60)
    assert not (tmp_path / "cache").exists(), "the build continued without the replica"


def running(pid: int) -> bool:
    """Return whether a process is running. It may have ended without having been reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_build_that_fails_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    failing = KernelBuild(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    failing.wait()
    assert "compiling the kernels in advance failed (exit code 3)" in caplog.text
    assert not failing.running
