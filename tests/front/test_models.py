"""Tests of the models that a front serves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.channel.served_models import ServedModel
from appliance.front import models
from appliance.front.models import Catalog
from appliance.text.tokenizer_files import TokenizerFilesError


def test_a_broken_model_is_read_again_if_a_file_has_changed_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "other.txt"
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    model = ServedModel(
        name="m",
        folder=str(folder),
        version="",
        created=0,
        max_model_len=0,
        vocab_size=0,
        chat_template=str(template),
    )
    reads = 0

    async def load_model(served: ServedModel) -> models.LoadedModel:
        nonlocal reads
        reads += 1
        raise TokenizerFilesError("tokenizer.json is broken")

    async def reads_after_two_replacements(catalog: Catalog) -> int:
        nonlocal reads
        reads = 0
        for _ in range(2):
            await catalog.replace([model])
            assert list(catalog.problems) == ["m"]
        return reads

    async def scenario() -> None:
        catalog = Catalog()
        assert await reads_after_two_replacements(catalog) == 1
        assert await reads_after_two_replacements(catalog) == 0
        for path in (
            folder / "tokenizer.json",
            folder / "additional_chat_templates" / "a.jinja",
            template,
        ):
            for text in ("a", "bb"):
                path.write_text(text)
                assert await reads_after_two_replacements(catalog) == 1, path
        monkeypatch.setattr(models, "_RETRY_UNCHANGED_S", 0.0)
        template.unlink()
        assert await reads_after_two_replacements(catalog) == 2

    monkeypatch.setattr(models, "load_model", load_model)
    asyncio.run(scenario())
