"""Tests of the model descriptions that front processes receive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from appliance.channel.sampling import SamplingDefaults
from appliance.models.registry import describe
from appliance.settings import ModelSettings, demo_model_folder

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_folder() / name, folder / name)
    return folder


def sampling(folder: Path, **settings: float) -> SamplingDefaults:
    return describe("m", ModelSettings(folder=str(folder), sampling=SamplingDefaults(**settings))).sampling  # type: ignore[arg-type]


def test_settings_take_precedence_over_the_checkpoint(model: Path) -> None:
    assert sampling(model) == SamplingDefaults()
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(config))
    assert sampling(model) == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    assert sampling(model, temperature=0.0, min_p=0.1) == SamplingDefaults(
        temperature=0.0, top_p=0.9, top_k=20, min_p=0.1
    )


@pytest.mark.parametrize("value", [None, True, "0.6", -1, 10.0, [0.6]])
def test_values_of_the_checkpoint_that_the_engine_cannot_use_are_ignored(model: Path, value: object) -> None:
    config = {"temperature": value, "top_p": 0.9}
    (model / "generation_config.json").write_text(json.dumps(config))
    assert sampling(model) == SamplingDefaults(top_p=0.9)


@pytest.mark.parametrize(
    ("changes", "max_model_len", "expected"),
    [
        ({"max_position_embeddings": 512}, None, (512, 5120)),
        ({"max_position_embeddings": None}, None, (2048, 5120)),
        ({"rope_scaling": YARN}, None, (4096, 5120)),
        ({"rope_scaling": YARN}, 3000, (3000, 5120)),
        ({"rope_scaling": YARN}, 5000, (5000, 0)),
        ({"model_type": "unknown"}, None, (0, 0)),
    ],
)
def test_the_limits_follow_the_engines_rules(
    model: Path, changes: dict[str, object], max_model_len: int | None, expected: tuple[int, int]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    found = describe("m", ModelSettings(folder=str(model), max_model_len=max_model_len))
    assert (found.max_model_len, found.vocab_size) == expected


def test_the_fingerprint_covers_a_chat_template_that_replaces_the_folders(
    model: Path, tmp_path: Path
) -> None:
    def version(template: Path | None) -> str:
        path = None if template is None else str(template)
        return describe("m", ModelSettings(folder=str(model), chat_template=path)).version

    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    first, without = version(template), version(None)
    template.write_text("{{ messages[0] }}")
    assert len({first, without, version(template)}) == 3
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        version(tmp_path)
