"""Tests of `appliance doctor`: each test breaks one part of an installation."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from appliance.cli.doctor import examination_lines
from appliance.cli.output import cells
from appliance.http.sockets import bind_unix
from appliance.models.gpus import DetectedGpu, GpuReport
from appliance.monitoring.findings import Examination, Finding
from appliance.monitoring.models import running_models
from appliance.protocol.status import CurrentProblem, Problem
from appliance.rundir import RunDirLock
from appliance.settings import SettingsError, demo_model_folder
from store.requests import RequestReader
from tests.audit_trail import forge
from tests.cli.conftest import History, Run, a_row, a_status, change_replica
from tests.cli.servers import AdminService, ApiService

Doctor = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder that contains the small files of the shipped model, and links to its weight files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in demo_model_folder().glob("*.json"):
        shutil.copy(path, folder)
    for shard in set(
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    ):
        (folder / shard).symlink_to(demo_model_folder() / shard)
    return folder


@pytest.fixture
def doctor(cli: Run, run_dir: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return a function that runs the doctor on `run_dir` and `tmp_path`. The service has one model, and the
    machine has no GPU."""
    monkeypatch.setattr("appliance.monitoring.doctor.find_gpus", lambda: GpuReport([]))
    monkeypatch.setattr("appliance.monitoring.places.ANSWER_TIMEOUT_S", 600.0)
    config = tmp_path / "appliance.toml"

    def run(
        *flags: object, settings: str = f'[models.m]\nfolder = "{model}"\n'
    ) -> tuple[int, list[dict[str, Any]]]:
        config.write_text(settings)
        given = {"--config": config, "--run-dir": run_dir, "--state-dir": tmp_path}
        given |= dict(zip(flags[::2], flags[1::2], strict=True))  # type: ignore[arg-type]
        outcome = cli("doctor", "--json", *(word for pair in given.items() for word in pair))
        examination = json.loads(outcome.out)
        bad = [finding for finding in examination["findings"] if finding["level"] == "problem"]
        assert examination["problems"] == len(bad)
        assert all(finding["remedy"] for finding in bad)
        return outcome.code, examination["findings"]

    return run


def found(findings: list[dict[str, Any]], area: str, level: str) -> str:
    """Return the text and the remedy of the only finding with this area and level."""
    (match,) = (f for f in findings if (f["area"], f["level"]) == (area, level))
    return f"{match['text']} → {match['remedy']}"


def test_a_correct_installation_has_no_problem(doctor: Doctor, databases: Path) -> None:
    code, findings = doctor()
    assert code == 0
    assert {finding["level"] for finding in findings} <= {"ok", "warning"}
    areas = {finding["area"] for finding in findings}
    assert areas == {"versions", "devices", "directories", "service", "models", "databases", "leftovers"}
    text = " ".join(finding["text"] for finding in findings)
    for fact in (
        "torch 2",
        f"SQLite {sqlite3.sqlite_version}",
        "no NVIDIA GPU",
        "2 rows, head",
        "10.8 M parameters",
    ):
        assert fact in text


def test_a_missing_model_folder_is_a_problem(doctor: Doctor) -> None:
    code, findings = doctor(settings='[models.m]\nfolder = "/no/such/folder"\n')
    assert code == 1
    assert "the folder '/no/such/folder' does not exist" in found(findings, "models", "problem")


def test_a_settings_file_with_an_error_hides_no_other_findings(doctor: Doctor, databases: Path) -> None:
    code, findings = doctor(settings="frontz = 3")
    assert code == 1
    assert "did you mean 'fronts'" in found(findings, "service", "problem")
    assert "audit chain is complete" in " ".join(finding["text"] for finding in findings)


def test_each_fault_of_the_settings_is_a_finding_with_its_remedy(doctor: Doctor) -> None:
    _, findings = doctor(settings="frontz = 3\nfronts = 'many'")
    faults = [finding for finding in findings if finding["subject"] == "settings"]
    assert len(faults) == 2
    for line, fault in enumerate(faults, start=1):
        assert f"appliance.toml:{line}: " in fault["text"]
        assert fault["remedy"] and fault["remedy"] not in fault["text"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "tokenizer.json does not exist"),
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors does not exist"),
        (
            "model.safetensors.index.json",
            "model.safetensors: no such file, and no model.safetensors.index.json",
        ),
    ],
)
def test_a_missing_file_of_a_model_is_named(doctor: Doctor, model: Path, missing: str, said: str) -> None:
    (model / missing).unlink()
    code, findings = doctor()
    assert code == 1 and said in found(findings, "models", "problem")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kv_blocks = 90000000", "does not fit into memory"),
        (
            "kv_blocks = 4\nmax_model_len = 512",
            "the KV cache holds 256 tokens, fewer than one sequence of 512",
        ),
        ("max_model_len = 999999", "max_model_len is 999999"),
        ("tensor_parallel_size = 3", "does not divide"),
        ('device = "cuda"', "needs one GPU, but the machine has 0"),
    ],
)
def test_a_model_that_cannot_run_on_this_machine_is_reported_before_it_is_loaded(
    doctor: Doctor, model: Path, setting: str, said: str
) -> None:
    code, findings = doctor(settings=f'[models.m]\nfolder = "{model}"\n{setting}\n')
    assert code == 1 and said in found(findings, "models", "problem")


def test_a_model_is_checked_against_the_memory_of_the_gpu(
    doctor: Doctor, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus_with(memory_bytes: int) -> GpuReport:
        return GpuReport([DetectedGpu(0, "NVIDIA H200", memory_bytes, 1 << 20, "9.0")], "580.1", "13.0")

    monkeypatch.setattr("appliance.monitoring.doctor.find_gpus", lambda: gpus_with(140 << 30))
    _, findings = doctor()
    text = " ".join(finding["text"] for finding in findings)
    assert "NVIDIA H200, 140 GiB" in text and "133 GiB usable" in text and "in bfloat16" in text
    monkeypatch.setattr("appliance.monitoring.doctor.find_gpus", lambda: gpus_with(50 << 20))
    _, findings = doctor()
    assert "47.5 MiB usable" in found(findings, "models", "problem")


def test_quantised_data_is_reported_and_needs_less_memory(doctor: Doctor, model: Path) -> None:
    def told(settings: str) -> str:
        _, findings = doctor(settings=f'[models.m]\nfolder = "{model}"\nkv_blocks = 64\n{settings}')
        return found(findings, "models", "ok")

    plain = told("")
    assert "M parameters in float32: weights 41.3 MiB" in plain and "64 KV blocks 40.0 MiB" in plain
    both = told('quantization = "fp8"\nkv_cache_dtype = "fp8"\n')
    assert "M parameters in float32, weights fp8, KV fp8: weights 16.0 MiB" in both
    assert "64 KV blocks 10.6 MiB" in both


def test_a_running_model_is_shown_with_its_dtypes(run_dir: Path) -> None:
    status = a_status(run_dir)
    change_replica(status, dtype="bfloat16", weights="bfloat16", kv_cache_dtype="fp8")
    finding = next(iter(running_models(status.models)))
    assert "demo-0 is running on cpu in bfloat16, KV fp8: 1.2 GiB used" in finding.text


def test_it_is_a_warning_if_memory_limits_the_sequences_to_less_than_the_checkpoint_allows(
    doctor: Doctor, model: Path
) -> None:
    code, findings = doctor(settings=f'[models.m]\nfolder = "{model}"\nkv_blocks = 4\n')
    assert code == 0
    warning = found(findings, "models", "warning")
    assert "the KV cache limits sequences to 256 tokens, but the checkpoint allows 2,048" in warning
    assert "max_model_len = 256" in warning


def test_a_directory_that_cannot_be_created_or_written_is_a_problem(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, findings = doctor("--state-dir", tmp_path / "file")
    assert code == 1 and "is not a directory" in found(findings, "directories", "problem")
    code, findings = doctor("--run-dir", "/proc/1/run")
    assert code == 1 and "may not create /proc/1/run" in found(findings, "directories", "problem")


def test_a_directory_of_another_user_is_a_problem(run_dir: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to switch to another user")
    from appliance.monitoring.places import directories

    run_dir.chmod(0o755)
    os.seteuid(65534)
    try:
        levels = {finding.subject: finding for finding in directories(run_dir, run_dir)}
    finally:
        os.seteuid(0)
    assert levels["run directory"].level == "problem"
    assert "uid 65534" in levels["run directory"].text and "--run-dir" in levels["run directory"].remedy


def test_a_socket_path_that_is_too_long_is_a_problem(doctor: Doctor, tmp_path: Path) -> None:
    code, findings = doctor("--run-dir", tmp_path / ("d" * 100))
    assert code == 1 and "the limit is 107 bytes" in found(findings, "directories", "problem")


def test_a_damaged_database_is_a_problem(doctor: Doctor, databases: Path) -> None:
    with (databases / "history.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))
    code, findings = doctor()
    assert code == 1 and "history.db" in found(findings, "databases", "problem")


@pytest.mark.parametrize("name", ["history.db", "audit.heads"])
def test_a_pipe_in_place_of_a_file_of_the_state_directory_does_not_block_doctor(
    doctor: Doctor, databases: Path, name: str
) -> None:
    (databases / name).unlink(missing_ok=True)
    os.mkfifo(databases / name)
    code, findings = doctor()
    assert code == 1 and f"{name} is not a regular file → remove or rename it" in found(
        findings, "databases", "problem"
    )


def test_a_database_that_a_group_can_write_is_a_problem(doctor: Doctor, databases: Path) -> None:
    (databases / "history.db").chmod(0o660)
    code, findings = doctor()
    said = found(findings, "databases", "problem")
    assert code == 1 and "history.db is writable by other users (mode 660)" in said and "chmod go-w" in said


def test_a_file_that_is_not_a_database_is_a_problem(doctor: Doctor, databases: Path) -> None:
    (databases / "control.db").write_text("nothing of the kind " * 1000)
    code, findings = doctor()
    assert code == 1 and "is not a valid SQLite database" in found(findings, "databases", "problem")


def test_a_database_of_a_later_version_is_a_problem(doctor: Doctor, databases: Path) -> None:
    with sqlite3.connect(databases / "history.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    code, findings = doctor()
    assert code == 1 and "schema version 99" in found(findings, "databases", "problem")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "DELETE FROM audit WHERE seq = 2; UPDATE sqlite_sequence SET seq = 1 WHERE name = 'audit'",
            "row 2 is missing from the end",
        ),
        ("UPDATE audit SET actor = 'nobody' WHERE seq = 1", "row 1: rewritten"),
    ],
)
def test_a_forged_audit_chain_is_a_problem(doctor: Doctor, databases: Path, change: str, said: str) -> None:
    forge(databases, change)
    code, findings = doctor()
    assert code == 1 and said in found(findings, "databases", "problem")


def test_requests_left_open_by_a_dead_service_are_a_warning(
    doctor: Doctor, history: History, tmp_path: Path
) -> None:
    history.log.open(a_row("req-open", finished_at=None))
    history.flush()
    _, findings = doctor()
    assert "for example req-open" in found(findings, "databases", "warning")
    assert RequestReader(tmp_path / "history.db").last_sequence() == 1


def test_sockets_left_by_a_dead_service_are_a_warning(doctor: Doctor, run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "api.sock"))
    code, findings = doctor()
    assert code == 0
    assert "was left behind by a service that was killed" in found(findings, "leftovers", "warning")


def test_a_service_that_has_locked_its_directory_but_does_not_answer_is_a_problem(
    doctor: Doctor, run_dir: Path, tmp_path: Path
) -> None:
    lock = RunDirLock(run_dir, tmp_path)
    code, findings = doctor()
    lock.release()
    assert code == 1
    assert f"process {os.getpid()} uses the run directory {run_dir}" in found(
        findings, "leftovers", "problem"
    )


def test_a_service_that_denies_access_to_this_user_is_not_a_problem(run_dir: Path, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root to switch to another user")
    from appliance.models import gpus
    from appliance.monitoring import doctor

    gpus.find_gpus()  # The command imports modules that the other user may not be able to read.
    (run_dir / "admin.sock").unlink(missing_ok=True)
    run_dir.chmod(0o755)
    lock = RunDirLock(run_dir, tmp_path)
    with bind_unix(run_dir / "admin.sock", "0600"):
        os.seteuid(65534)
        try:
            findings = doctor.examine(run_dir, tmp_path, SettingsError()).findings
        finally:
            os.seteuid(0)
            lock.release()
    assert [finding for finding in findings if finding.area == "leftovers" and finding.level != "ok"] == []
    (kept_out,) = (finding for finding in findings if finding.subject == "state")
    assert kept_out.level == "warning" and "permission denied for uid 65534" in kept_out.text


def test_a_process_that_writes_to_the_databases_without_a_service_is_a_problem(
    doctor: Doctor, databases: Path
) -> None:
    with (databases / "control.db-lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, findings = doctor()
    assert code == 1 and f"process {os.getpid()} is writing to" in found(findings, "leftovers", "problem")


def test_a_rank_that_outlived_its_service_is_a_problem(doctor: Doctor) -> None:
    # The doctor looks only at command lines, so this process can simply sleep. The process's parent exits
    # immediately.
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "engine.replica"]
    source = f"import subprocess; print(subprocess.Popen({sleeper!r}, stdout=subprocess.DEVNULL).pid)"
    started = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True)
    orphan = int(started.stdout)
    try:
        if parent_of(orphan) != 1:
            pytest.skip("process 1 does not adopt orphans here")
        code, findings = doctor()
    finally:
        os.kill(orphan, 9)
    assert code == 1 and f"kill -9 {orphan}" in found(findings, "leftovers", "problem")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_foreign_package_named_kernels_is_a_problem(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "site" / "kernels-0.9.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    code, findings = doctor()
    assert code == 1
    assert "kernels 0.9.0 from PyPI conflicts" in found(findings, "versions", "problem")
    assert "pip uninstall kernels" in found(findings, "versions", "problem")


def test_a_running_service_is_asked_for_its_problems(
    doctor: Doctor, admin: AdminService, api: ApiService
) -> None:
    _, findings = doctor()
    text = " ".join(finding["text"] for finding in findings)
    assert "api.sock responds and is ready" in text and "1.2 GiB used, 1.0 GiB predicted (+17%)" in text
    assert "was removed: running replicas continue" in found(findings, "models", "problem")


def test_the_reason_why_the_api_is_not_ready_is_reported(
    doctor: Doctor, admin: AdminService, api: ApiService
) -> None:
    api.ready = (b'{"status": "not_ready", "reason": "demo-0 is loading"}', 503)
    _, findings = doctor()
    said = found(findings, "sockets", "warning").partition(" → ")[0]
    assert said.endswith("api.sock responds but is not ready: demo-0 is loading")


def test_the_problems_that_the_service_reports_are_findings(
    doctor: Doctor, admin: AdminService, run_dir: Path, tmp_path: Path
) -> None:
    admin.status.state, admin.status.reason = "degraded", "demo-0 has failed"
    admin.status.current_problems = [
        CurrentProblem(
            where="demo-0", description="model.safetensors: truncated", remedy="the service tries again"
        )
    ]
    admin.status.databases[0] = structs.replace(admin.status.databases[0], dropped_rows=3)
    admin.status.problems = [Problem(at=4e9, where="demo-0", description="it broke")]
    code, findings = doctor()
    text = " ".join(f"{finding['text']} → {finding['remedy']}" for finding in findings)
    assert code == 1
    for fact in (
        "degraded: demo-0 has failed",
        "the service tries again",
        "model.safetensors: truncated",
        "3 rows have been dropped",
        "it broke",
    ):
        assert fact in text
    assert "api.sock is not responding: does not exist" in text


def test_a_check_that_fails_does_not_stop_the_other_checks(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("appliance.monitoring.machine.versions", breaks)
    _, findings = doctor()
    assert "RuntimeError: no such thing" in found(findings, "versions", "warning")
    assert any(finding["area"] == "leftovers" for finding in findings)


@pytest.mark.parametrize("width", [80, 120])
def test_findings_fit_the_terminal_and_end_with_a_summary(width: int) -> None:
    finding = Finding(
        area="models", subject="m", level="problem", text="too large " * 30, remedy="shrink " * 30
    )
    examination = Examination(
        at=1.79e9, host="box", run_dir="/r", state_dir="/s", problems=1, warnings=0, findings=[finding]
    )
    lines = list(examination_lines(examination, width))
    assert max(map(cells, lines)) <= width
    assert any(line.lstrip().startswith("→ shrink") for line in lines)
    assert lines[-1] == "1 problem, 0 warnings"
