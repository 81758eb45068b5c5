"""Tests of deleting downloaded models."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.hub.cleanup import delete_snapshot
from appliance.hub.repository import HubError
from tests.hub.conftest import Pull
from tests.hub.server import HubServer

WEIGHTS = b"w" * (1 << 20)
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def test_deleting_the_only_commit_frees_its_files(hub: HubServer, pull: Pull, root: Path) -> None:
    hub.add("org/demo", FILES)
    folder = Path(pull().folder)
    assert delete_snapshot(folder) >= len(WEIGHTS)
    assert not (root / "models--org--demo").exists()


def test_files_that_another_commit_uses_are_kept(hub: HubServer, pull: Pull) -> None:
    repository = hub.add("org/demo", FILES)
    old = Path(pull().folder)
    repository.revisions["main"] = "a" * 40
    repository.files["config.json"] = b'{"changed": 1}'
    new = Path(pull().folder)
    assert delete_snapshot(old) < len(WEIGHTS)
    assert not old.exists()
    assert (new / "model.safetensors").read_bytes() == WEIGHTS


def test_a_copy_of_the_repository_with_the_same_commits_is_kept(hub: HubServer, pull: Pull) -> None:
    for name in ("org/one", "org/two", "org/three"):
        hub.add(name, FILES)
    folders = [Path(pull(name).folder) for name in ("org/one", "org/two", "org/three")]
    assert len({folder.name for folder in folders}) == 1
    delete_snapshot(folders[1])
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_a_folder_outside_a_hub_cache_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(HubError, match="was not downloaded with models pull, so its files are kept"):
        delete_snapshot(tmp_path)
    assert (tmp_path / "config.json").exists()
