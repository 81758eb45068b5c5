"""Reads a model's description from its folder, without loading the model."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from appliance.channel.served_models import ServedModel
from appliance.models.preflight_process import Findings
from appliance.settings import Fault, Loaded, ModelSettings, Settings, SettingsError, dotted
from engine import sizing

log = logging.getLogger(__name__)

_WHOLE_BYTES = 32 << 20
_SAMPLE_BYTES = 1 << 20


def model_faults(
    loaded: Loaded, findings: Findings, level: Literal["problem", "warning"] = "problem"
) -> list[Fault]:
    """Return the models' problems, or warnings about models, as settings faults. Each fault refers to the
    model's `folder` setting."""
    return [
        loaded.fault(("models", name, "folder"), f"model {name!r}: {finding.text}", finding.remedy)
        for name, found in findings.items()
        for finding in found
        if finding.level == level
    ]


def describe_models(
    loaded: Loaded, former: Settings | None = None, broken: Collection[str] = ()
) -> list[ServedModel]:
    """Return descriptions of the models that are new or whose settings for the fronts differ from those in
    `former`. The folders of models in `broken` may be unreadable, so their descriptions contain only the name
    and folder. Raises SettingsError for any other unreadable folder.
    """
    served, faults = [], []
    for name, model in loaded.settings.models.items():
        known = former.models.get(name) if former is not None else None
        if known is not None and known.text == model.text:
            continue
        if name in broken:
            served.append(
                ServedModel(
                    name=name,
                    folder=model.folder,
                    version="",
                    created=0,
                    max_model_len=0,
                    vocab_size=0,
                    required=model.required,
                )
            )
            continue
        try:
            served.append(describe(name, model))
        except OSError as error:
            setting, value = "folder", model.folder
            remedy = "the folder of a Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors)"
            if model.chat_template is not None and error.filename == model.chat_template:
                setting, value, remedy = "chat_template", model.chat_template, "a file with a Jinja template"
            path = ("models", name, setting)
            description = f"{dotted(path)} = {value!r} cannot be used: {error.filename}: {error.strerror}"
            faults.append(loaded.fault(path, description, f"set it to {remedy}"))
    if faults:
        raise SettingsError(*faults)
    for described in served:
        log.info("model %s: %s (version %s)", described.name, described.folder, described.version)
    return served


def describe(name: str, settings: ModelSettings) -> ServedModel:
    """Return a model's description for the fronts before any replica is ready. Raises OSError if the folder
    or the chat template cannot be read."""
    folder = Path(settings.folder)
    max_model_len, vocab_size = _limits(settings)
    return ServedModel(
        name=name,
        folder=str(folder),
        version=fingerprint(folder, settings.chat_template),
        created=int((folder / "config.json").stat().st_mtime),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        required=settings.required,
        chat_template=settings.chat_template,
        sampling=settings.sampling.over(_config(folder / "generation_config.json")),
    )


def fingerprint(folder: Path, chat_template: str | None = None) -> str:
    """Return 12 hex digits that identify the contents of the folder's files and of the configured chat
    template, if any."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            for start in (0, size // 2, size - _SAMPLE_BYTES):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    if chat_template is not None:
        path = Path(chat_template)
        if not path.is_file():  # reading a device or named pipe may block forever
            raise FileNotFoundError(errno.ENOENT, "not a regular file", chat_template)
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _limits(settings: ModelSettings) -> tuple[int, int]:
    """Return a checkpoint's maximum sequence length and vocabulary size. If the engine cannot load the
    checkpoint, return the configured length (0 if there is none) and 0."""
    try:
        config = sizing.read_config(settings.folder)
        return config.resolve_length(settings.max_model_len), config.vocab_size
    except sizing.ModelError:  # the engine reports the error when it loads the model
        return settings.max_model_len or 0, 0


def _config(path: Path) -> dict[str, Any]:
    # The engine reports a broken file by name when it loads the model.
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, FileNotFoundError):
        return {}
    return config if isinstance(config, dict) else {}
