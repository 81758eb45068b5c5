"""Tests of the checks that a model must pass before it is loaded. Each test breaks one part of a copy of the
shipped model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.models.fit import MachineMemory
from appliance.models.gpus import DetectedGpu
from appliance.models.preflight import ModelFinding, check_model, problem_of
from appliance.models.preflight_process import check_apart
from appliance.models.readable import FileReader, service_user, this_process
from appliance.settings import ModelSettings, demo_model_folder

SHARD = "model-00002-of-00002.safetensors"
GIB = 1 << 30
MEMORY = MachineMemory(gpus=[], available_bytes=8 * GIB, total_bytes=8 * GIB)
STRANGER = FileReader(65534, frozenset((65534,)), is_this_process=False)
"""A user who owns no files."""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the shipped model that every user can read."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder(), folder)
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def check(
    folder: Path,
    memory: MachineMemory = MEMORY,
    reader: FileReader | None = None,
    **settings: object,
) -> list[ModelFinding]:
    wanted = ModelSettings(folder=str(folder), **settings)  # type: ignore[arg-type]
    return check_model(wanted, memory, reader or this_process())


def problem(folder: Path, **arguments: object) -> str:
    """Return the text and the remedy of the only problem."""
    found = problem_of(check(folder, **arguments))  # type: ignore[arg-type]
    assert found is not None and found.remedy
    return str(found)


def test_a_complete_model_has_no_problem_and_its_memory_is_reported(model: Path) -> None:
    (finding,) = check(model)
    assert finding.level == "ok"
    assert "10.8 M parameters in float32: weights 41.3 MiB" in finding.text
    assert "usable of 8.0 GiB" in finding.text


def test_a_missing_shard_is_named_with_the_index_that_lists_it(model: Path) -> None:
    (model / SHARD).unlink()
    assert f"{model / SHARD} does not exist, but model.safetensors.index.json lists it" in problem(model)


@pytest.mark.parametrize(
    ("settings", "cause", "remedy"),
    [
        (
            {"expert_parallel": True},
            "expert_parallel is true, but llama models have no experts",
            "remove this setting",
        ),
        (
            {"max_model_len": 99_999_999},
            "max_model_len is 99999999; this checkpoint allows 1 to ",
            "choose a length",
        ),
    ],
    ids=["expert_parallel", "max_model_len"],
)
def test_the_cause_and_the_remedy_from_the_engine_are_separate(
    model: Path, settings: dict[str, object], cause: str, remedy: str
) -> None:
    found = problem_of(check(model, **settings))
    assert found is not None
    assert found.text.startswith(cause) and remedy not in found.text
    assert found.remedy.startswith(remedy)


def test_several_missing_shards_are_counted(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    assert "2 model files are missing" in problem(model)


def test_a_truncated_weight_file_is_found_by_its_header(model: Path) -> None:
    size = (model / SHARD).stat().st_size
    os.truncate(model / SHARD, size - 1)
    assert f"{model / SHARD} is truncated: expected {size} bytes, found {size - 1}: download it again" in (
        problem(model)
    )


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_a_git_lfs_pointer_is_named_with_the_command_that_replaces_it(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    found = problem(model)
    assert f"{model / name} is a Git LFS pointer" in found and f"git -C {model} lfs pull" in found


def test_a_gguf_file_is_named_as_a_format_that_is_not_read(model: Path, tmp_path: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    (model / "chat.Q4.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert "chat.Q4.gguf is a GGUF file, which this engine does not read" in problem(model)
    (model / "config.json").unlink()
    assert "chat.Q4.gguf is a GGUF file" in problem(model)
    assert "is a GGUF file" in problem(model / "chat.Q4.gguf")
    (tmp_path / "renamed").write_bytes(b"GGUF\3\0\0\0")
    assert "renamed is a GGUF file" in problem(tmp_path / "renamed")


def hub_cache(model: Path, root: Path) -> Path:
    """Create a hub cache with two snapshots of a model, and return the snapshot of branch `main`."""
    repository = root / "models--Org--Chat"
    for commit in ("aaaa", "bbbb"):
        shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("aaaa")
    return repository / "snapshots" / "aaaa"


def test_for_the_root_of_a_hub_cache_the_error_names_the_snapshot_to_use(model: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(model, tmp_path / "home" / "hub")
    for folder in (tmp_path / "home", tmp_path / "home" / "hub"):
        found = problem(folder)
        assert "is the root of a Hugging Face hub cache" in found and found.endswith(str(snapshot))
    found = problem(snapshot.parents[1])
    assert "is a repository in a Hugging Face hub cache" in found and found.endswith(str(snapshot))
    assert problem_of(check(snapshot)) is None


def test_a_link_to_a_missing_file_is_named(model: Path) -> None:
    (model / SHARD).unlink()
    (model / SHARD).symlink_to("../../blobs/0123")
    assert "is a symbolic link to ../../blobs/0123, which does not exist" in problem(model)


def test_a_pipe_in_place_of_a_file_is_refused_without_reading_it(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "config.json is not a regular file" in problem(model)


def test_weights_that_only_their_owner_may_read_are_named_with_the_commands(model: Path) -> None:
    (model / SHARD).chmod(0o600)
    found = problem(model, reader=STRANGER)
    assert f"{model / SHARD} cannot be read by" in found and "its mode is 600" in found
    assert f"chmod -R a+rX {model}, or chown -R 65534 {model}" in found
    assert problem_of(check(model, reader=this_process())) is None


def test_a_directory_that_the_user_may_not_enter_is_named(model: Path) -> None:
    model.parent.chmod(0o700)
    found = problem(model, reader=STRANGER)
    assert f"has no access to the directory {model.parent}" in found and f"chmod a+x {model.parent}" in found


def test_file_access_is_checked_with_the_rights_of_the_reading_process(model: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to switch to another user")
    (model / SHARD).chmod(0o600)
    os.seteuid(65534)
    try:
        found = problem(model)
    finally:
        os.seteuid(0)
    assert "cannot be read by" in found and "(uid 65534)" in found


def test_root_checks_file_access_with_the_rights_of_the_services_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    monkeypatch.setenv("APPLIANCE_SERVICE_USER", "nobody")
    assert service_user().uid == 65534 and not service_user().is_this_process
    monkeypatch.delenv("APPLIANCE_SERVICE_USER")
    monkeypatch.setattr("appliance.models.readable.unit_is_installed", lambda: False)
    assert service_user() == this_process()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_configuration_that_the_engine_does_not_support_is_named(
    model: Path, change: dict[str, object], said: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    assert said in problem(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert name in problem(model)


def test_a_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a valid tokenizer file" in problem(model)


def test_a_template_that_does_not_compile_is_named(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    assert "is not valid Jinja2" in problem(model)


def test_a_model_without_a_template_is_a_warning_unless_another_template_is_given(
    model: Path, tmp_path: Path
) -> None:
    def template(text: str) -> str:
        (path := tmp_path / "other.jinja").write_text(text)
        return str(path)

    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    warning = check(model)[0]
    assert warning.level == "warning" and "chat requests will be refused with status 400" in warning.text
    assert [finding.level for finding in check(model, chat_template=template("{{ messages }}"))] == ["ok"]
    assert "is not valid Jinja2" in problem(model, chat_template=template("{% for %}"))
    missing = problem(model, chat_template="/nowhere.jinja")
    assert "chat_template = '/nowhere.jinja' cannot be read" in missing and "No such file" in missing


def test_a_model_that_can_never_fit_is_refused_with_the_required_memory(model: Path) -> None:
    found = problem(model, kv_blocks=1_000_000)
    assert "does not fit into memory" in found and "weights 41.3 MiB, working memory" in found
    assert "1,000,000 KV blocks" in found and "usable of 8.0 GiB" in found


def test_a_model_that_does_not_fit_at_the_moment_is_a_warning(model: Path) -> None:
    busy = MachineMemory(gpus=[], available_bytes=30 << 20, total_bytes=8 * GIB)
    (warning,) = check(model, busy)
    assert warning.level == "warning" and "not enough memory is currently free" in warning.text


def test_memory_used_by_other_processes_on_a_gpu_is_reported(model: Path) -> None:
    gpus = [DetectedGpu(0, "NVIDIA H200", 140 * GIB, 139 * GIB, "9.0")]
    busy = MachineMemory(gpus=gpus, available_bytes=8 * GIB, total_bytes=8 * GIB)
    (warning,) = check(model, busy)
    assert "of which other processes use 139 GiB" in warning.text
    assert "needs 2 GPUs, but the machine has 1" in problem(model, memory=busy, tensor_parallel_size=2)


@pytest.mark.parametrize("gpus", [0, 1], ids=["no GPU", "a GPU that is too small"])
def test_a_model_that_may_run_on_the_cpu_is_checked_for_the_cpu(model: Path, gpus: int) -> None:
    small = [DetectedGpu(number, "NVIDIA T4", 64 << 20, 0, "7.5") for number in range(gpus)]
    memory = MachineMemory(gpus=small, available_bytes=8 * GIB, total_bytes=8 * GIB)
    assert problem(model, memory=memory, device="cuda")
    warning, *others = check(model, memory, device="cuda", cpu_fallback=True)
    assert warning.level == "warning" and warning.text.startswith("the model will run on the CPU: ")
    assert {finding.level for finding in others} <= {"ok", "warning"}
    too_large = check(model, memory, device="cuda", cpu_fallback=True, kv_blocks=1_000_000)
    assert problem_of(too_large) is not None


def test_a_separate_process_finds_the_same_problems(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    (template := model.parent / "other.jinja").write_text("{{ messages }}")
    sound = ModelSettings(folder=str(demo_model_folder()))
    models = {
        "good": sound,
        "bad": ModelSettings(folder=str(model)),
        "fixed": ModelSettings(folder=str(model), chat_template=str(template)),
    }
    found = check_apart(models)
    assert {name: problem_of(findings) is None for name, findings in found.items()} == {
        "good": True,
        "bad": False,
        "fixed": True,
    }
    assert "is not valid Jinja2" in str(problem_of(found["bad"]))


def test_a_check_whose_process_dies_is_a_problem_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.launch.module_command", lambda module: ["false"])
    found = check_apart({"m": ModelSettings(folder="/")})
    assert "could not check the model's files" in str(problem_of(found["m"]))
    monkeypatch.setattr("engine.launch.module_command", lambda module: ["sleep", "60"])
    monkeypatch.setattr("appliance.models.preflight_process._TIMEOUT_S", 0.2)
    found = check_apart({"m": ModelSettings(folder="/")})
    assert "could not be checked within 0.2 s" in str(problem_of(found["m"]))
