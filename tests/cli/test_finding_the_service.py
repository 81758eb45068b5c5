"""Tests of the run directory that commands use by default, and of the message when no service is running."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from appliance import rundir
from appliance.cli.service import find_run_dir
from appliance.ownership import UntrustedError, trusted_directory
from appliance.rundir import RunDirError, prepare_directories
from tests.cli.conftest import Run


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate an installed systemd unit without a service in its run directory."""
    path = tmp_path / "system"
    path.mkdir()
    monkeypatch.setattr(rundir, "SYSTEM_RUN_DIR", path)
    monkeypatch.setattr(rundir, "unit_is_installed", lambda: True)
    return path


@pytest.fixture
def in_tmp(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> Path:
    """Return the caller's private run directory in /tmp."""
    assert run_dir.parent == Path("/tmp")
    monkeypatch.setattr("appliance.settings.default_run_dir", lambda: str(run_dir))
    return run_dir


def test_a_directory_in_tmp_never_precedes_systemds_service(system: Path, in_tmp: Path) -> None:
    (in_tmp / "admin.sock").touch()
    assert find_run_dir(None) == in_tmp
    (system / "admin.sock").touch()
    assert find_run_dir(None) == system


def test_a_directory_in_tmp_that_others_can_write_is_skipped(system: Path, in_tmp: Path) -> None:
    (in_tmp / "admin.sock").touch()
    in_tmp.chmod(0o777)
    assert find_run_dir(None) == system


def test_a_private_directory_with_a_service_precedes_systemds(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr("appliance.settings.default_run_dir", lambda: str(own))
    (system / "admin.sock").touch()
    assert find_run_dir(None) == system
    (own / "admin.sock").touch()
    assert find_run_dir(None) == own


@pytest.mark.parametrize("words", [("status",), ("chat", "hello"), ("bench",), ("doctor",)], ids=" ".join)
def test_if_a_systemd_unit_is_installed_no_second_service_is_recommended(
    cli: Run, system: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("appliance.client.start_remedy", rundir.start_remedy)
    outcome = cli(*words)
    said = " ".join((outcome.out + outcome.err).split())
    assert "systemctl start appliance" in said and "appliance serve" not in said


def test_a_service_does_not_start_in_a_directory_that_its_clients_refuse(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(0o770)
    with pytest.raises(RunDirError, match="is writable by other users"):
        prepare_directories(run, tmp_path)
    run.chmod(0o750)
    prepare_directories(run, tmp_path)


def test_a_directory_that_does_not_exist_is_accepted(tmp_path: Path) -> None:
    assert trusted_directory(tmp_path / "missing", "--run-dir") == {0, os.geteuid()}


def test_an_unknown_service_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_SERVICE_USER", "nobody-here")
    with pytest.raises(UntrustedError, match=r"APPLIANCE_SERVICE_USER is 'nobody-here'"):
        trusted_directory(tmp_path, "--run-dir")


@pytest.mark.parametrize("words", [("requests",), ("audit", "list")], ids=" ".join)
def test_a_socket_of_another_machine_is_not_replaced_by_files_of_this_one(
    cli: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "admin.sock"))
    outcome = cli(*words, "--run-dir", tmp_path)
    said = " ".join((outcome.out + outcome.err).split())
    assert outcome.code != 0
    assert "another machine" in said and "--state-dir" in said
