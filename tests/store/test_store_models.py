"""Tests of the model registry in `control.db`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from store.control import ControlStore
from store.errors import ConflictError, UnknownModelError
from store.models import ModelFile
from store.registry import ModelRegistry, read_registry

FILES = (ModelFile("config.json", 2, "ab" * 32),)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ModelRegistry]:
    control = ControlStore(tmp_path / "control.db")
    control.start()
    yield ModelRegistry(control)
    control.close()


def add(registry: ModelRegistry, name: str = "chat") -> int:
    added = registry.add_version(
        actor="uid:0", model=name, folder=f"/srv/{name}", files=FILES, settings={"dtype": "float32"}
    )
    return added.result(60).version


def test_versions_are_numbered_from_1_and_the_first_is_the_default(registry: ModelRegistry) -> None:
    assert [add(registry), add(registry), add(registry, "other")] == [1, 2, 1]
    assert registry.current.models["chat"].default_version == 1


def test_the_records_survive_a_restart(registry: ModelRegistry, tmp_path: Path) -> None:
    add(registry)
    registry.set_loaded("chat", 1, True).result(60)
    registry.set_alias(actor="uid:0", name="gpt", target="chat@1").result(60)
    read = read_registry(tmp_path / "control.db")
    version = read.versions[("chat", 1)]
    assert (version.folder, version.files, version.settings) == ("/srv/chat", FILES, {"dtype": "float32"})
    assert version.loaded_at is not None and read.versions == registry.current.versions
    assert read.aliases["gpt"].target == "chat@1"


def test_the_previous_default_version_is_stored(registry: ModelRegistry) -> None:
    add(registry), add(registry)
    registry.set_default(actor="uid:0", action="models.default", model="chat", version=2).result(60)
    model = registry.current.models["chat"]
    assert (model.default_version, model.previous_version) == (2, 1)
    registry.set_default(actor="uid:0", action="models.default", model="chat", version=2).result(60)
    assert registry.current.models["chat"].previous_version == 1


def test_numbers_of_removed_versions_are_not_reused(registry: ModelRegistry) -> None:
    add(registry), add(registry)
    registry.remove(actor="uid:0", model="chat", version=2).result(60)
    assert add(registry) == 3


def test_a_default_or_aliased_version_is_not_removed(registry: ModelRegistry) -> None:
    add(registry), add(registry)
    registry.set_alias(actor="uid:0", name="next", target="chat@2").result(60)
    for version, reason in ((1, "default"), (2, "alias 'next'")):
        with pytest.raises(ConflictError, match=reason):
            registry.remove(actor="uid:0", model="chat", version=version).result(60)
    registry.delete_alias(actor="uid:0", name="next").result(60)
    registry.remove(actor="uid:0", model="chat", version=2).result(60)
    registry.remove(actor="uid:0", model="chat", version=1).result(60)
    assert not registry.current.models and not registry.current.versions


def test_unknown_versions_are_named(registry: ModelRegistry) -> None:
    add(registry)
    with pytest.raises(UnknownModelError, match="no version 7: available versions: 1"):
        registry.set_default(actor="uid:0", action="models.default", model="chat", version=7).result(60)


def test_every_change_has_an_audit_row(registry: ModelRegistry, tmp_path: Path) -> None:
    add(registry), add(registry)
    registry.set_default(actor="uid:7", action="models.rollback", model="chat", version=2).result(60)
    import sqlite3

    with sqlite3.connect(tmp_path / "control.db") as connection:
        rows = connection.execute("SELECT actor, action, after FROM audit ORDER BY seq").fetchall()
    assert rows[-1] == ("uid:7", "models.rollback", '{"default_version":2}')
    assert [row[1] for row in rows[:2]] == ["models.add", "models.add"]


def split(registry: ModelRegistry, name: str = "chat", **weights: float) -> None:
    targets = {f"chat@{version.removeprefix('v')}": weight for version, weight in weights.items()}
    registry.set_split(actor="uid:0", name=name, weights=targets).result(60)


def test_a_split_survives_a_restart_and_is_replaced_as_a_whole(
    registry: ModelRegistry, tmp_path: Path
) -> None:
    add(registry), add(registry), add(registry)
    split(registry, v1=90, v2=10)
    split(registry, v2=1, v3=2.5)
    assert read_registry(tmp_path / "control.db").splits["chat"].weights == {"chat@2": 1, "chat@3": 2.5}
    registry.set_split(actor="uid:0", name="chat", weights=None).result(60)
    assert not registry.current.splits
    with pytest.raises(UnknownModelError, match="'chat' has no split"):
        registry.set_split(actor="uid:0", name="chat", weights=None).result(60)


def test_a_version_in_a_split_cannot_be_removed(registry: ModelRegistry) -> None:
    add(registry), add(registry)
    registry.set_alias(actor="uid:0", name="gpt", target="chat").result(60)
    split(registry, "gpt", v1=1, v2=1)
    with pytest.raises(ConflictError, match="models split gpt --clear"):
        registry.remove(actor="uid:0", model="chat", version=2).result(60)
    registry.delete_alias(actor="uid:0", name="gpt").result(60)
    split(registry, v1=1, v2=1)
    with pytest.raises(ConflictError, match="the split of 'chat' includes"):
        registry.remove(actor="uid:0", model="chat", version=2).result(60)
    registry.remove(actor="uid:0", model="chat", version=None).result(60)
    assert not registry.current.splits and not registry.current.models


def test_a_new_default_version_ends_the_split_in_the_same_change(registry: ModelRegistry) -> None:
    add(registry), add(registry)
    for version in (2, 2):  # the second change only ends the split
        split(registry, v1=90, v2=10)
        registry.set_default(actor="uid:0", action="models.default", model="chat", version=version).result(60)
        assert not registry.current.splits
    assert registry.current.models["chat"].previous_version == 1


def test_a_shadow_survives_a_restart_and_protects_its_target(registry: ModelRegistry, tmp_path: Path) -> None:
    add(registry), add(registry)
    registry.set_shadow(actor="uid:0", name="chat", target="chat@2", share=0.1).result(60)
    registry.set_shadow(actor="uid:0", name="chat", target="chat@2", share=0.5).result(60)
    shadow = read_registry(tmp_path / "control.db").shadows["chat"]
    assert (shadow.target, shadow.share) == ("chat@2", 0.5)
    with pytest.raises(ConflictError, match="models shadow chat --clear"):
        registry.remove(actor="uid:0", model="chat", version=2).result(60)
    registry.set_shadow(actor="uid:0", name="chat", target=None, share=0.5).result(60)
    with pytest.raises(UnknownModelError, match="'chat' has no shadow"):
        registry.set_shadow(actor="uid:0", name="chat", target=None, share=0.5).result(60)
    registry.remove(actor="uid:0", model="chat", version=2).result(60)
