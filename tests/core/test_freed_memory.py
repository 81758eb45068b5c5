"""Tests, in a real core, that an unload reports memory that was not freed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.actions.parameters import AddModel, LoadModel, UnloadModel
from tests.core.conftest import Service

pytestmark = pytest.mark.system


def test_a_process_that_survives_an_unload_is_named_until_the_model_is_loaded_again(
    make_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = make_service()
    folder = tmp_path / "late"
    folder.mkdir()
    for file in (tmp_path / "m").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "fake.json").write_text(json.dumps({"child": True}))
    service.start_and_wait()
    service.admin.act(AddModel(name="late", folder=str(folder)))
    service.admin.act(LoadModel(model="late", wait=True))
    # The fake replica writes a file into the model's folder, so comparing the folder with its manifest
    # afterwards would fail.
    child = int((folder / "child").read_text())
    (folder / "child").unlink()
    try:
        unloaded = service.admin.act(UnloadModel(model="late", wait=True))
        assert unloaded.state == "available"
        assert f"were killed but still exist: {child} (state S)" in unloaded.detail
        assert any(f"{child} (state S)" in one.description for one in service.admin.status().problems)
    finally:
        os.kill(child, signal.SIGKILL)
    service.admin.act(LoadModel(model="late", wait=True))
    os.kill(int((folder / "child").read_text()), signal.SIGKILL)
    (folder / "child").unlink()
    assert service.admin.act(UnloadModel(model="late", wait=True)).detail == ""
