"""Tests that references to unknown models are found in the settings and in the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.models.references import fallback_faults, stored_registry, unknown_targets
from appliance.settings import Loaded, ModelSettings, Place, Settings
from store.control import ControlStore
from store.errors import StoreError
from store.models import AliasRecord, ModelRecord, Registry, ShadowRecord, SplitRecord, VersionRecord
from store.registry import ModelRegistry

CHAT = ModelRecord(name="chat", created_at=0.0, default_version=1, next_version=2)
VERSION = VersionRecord(model="chat", version=1, created_at=0.0, folder="/")
ALIAS = AliasRecord(name="assistant", target="chat@1", created_at=0.0)
REGISTRY = Registry([CHAT], [VERSION], [ALIAS])


def loaded(**fallbacks: str) -> Loaded:
    models = {name: ModelSettings(folder="/", fallback=fallback) for name, fallback in fallbacks.items()}
    places = {("models", name, "fallback"): Place("a.toml", 7) for name in models}
    return Loaded(Settings(models=models), places, [])


@pytest.mark.parametrize("fallback", ["other", "chat", "assistant", ""])
def test_a_fallback_may_be_another_model_or_alias(fallback: str) -> None:
    assert fallback_faults(loaded(large=fallback, other=""), REGISTRY) == []


@pytest.mark.parametrize("fallback", ["large", "smal", "chat@1"])
def test_an_unknown_fallback_is_an_error_with_its_place_value_and_remedy(fallback: str) -> None:
    [fault] = fallback_faults(loaded(large=fallback, other=""), REGISTRY)
    assert (str(fault.place), fault.field) == ("a.toml:7", "models.large.fallback")
    assert fault.description == f"models.large.fallback = {fallback!r} does not name another model or alias"
    assert fault.remedy == "use one of assistant, chat, other, or remove it"


def test_records_that_name_unknown_models_are_found() -> None:
    registry = Registry(
        [CHAT],
        [VERSION, VersionRecord(**{**as_dict(VERSION), "version": 3, "settings": {"fallback": "large"}})],
        [ALIAS, AliasRecord(name="old", target="large", created_at=0.0)],
        [SplitRecord(name="chat", weights={"chat@1": 1, "large": 1, "chat@2": 1}, created_at=0.0)],
        [ShadowRecord(name="assistant", target="large", share=0.1, created_at=0.0)],
    )
    found = [
        (record, description.split(",")[0]) for record, description in unknown_targets(registry, {"small"})
    ]
    assert found == [
        ("alias old", "its target 'large' is not a model"),
        ("split of chat", "its target 'large' is not a model"),
        ("split of chat", "its target 'chat@2' is not a model"),
        ("shadow of assistant", "its target 'large' is not a model"),
        ("chat@3", "its fallback 'large' is not a model or alias"),
    ]
    found = [
        (record, description.split(",")[0])
        for record, description in unknown_targets(registry, {"small", "large"})
    ]
    assert found == [("split of chat", "its target 'chat@2' is not a model")]


def as_dict(record: VersionRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_the_registry_of_a_folder_is_empty_before_the_first_start(tmp_path: Path) -> None:
    assert not stored_registry(str(tmp_path)).models
    control = ControlStore(tmp_path / "control.db")
    control.start()
    try:
        registry = ModelRegistry(control)
        registry.add_version(actor="test", model="chat", folder="/", files=(), settings={}).result(60)
        assert list(stored_registry(str(tmp_path)).models) == ["chat"]
    finally:
        control.close()
    (tmp_path / "control.db").write_bytes(b"x" * 4096)
    with pytest.raises(StoreError):
        stored_registry(str(tmp_path))
