"""Checks a model folder's files without loading weights: they must exist, be complete, and be readable by the
service's user."""

from __future__ import annotations

import json
import os
from pathlib import Path

from appliance.models.readable import FileReader, hidden_by_unit, unreadable_reason
from engine import sizing

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    sizing.INDEX,
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_GGUF = b"GGUF"
_NAMES_SHOWN = 3
_EXPECTED = "a folder with config.json, tokenizer.json and *.safetensors"


class FolderFault(Exception):
    """A problem with a model folder. `remedy` explains how to fix it."""

    def __init__(self, description: str, remedy: str) -> None:
        super().__init__(description)
        self.remedy = remedy


def check_files(folder: Path, reader: FileReader, *, weights: bool) -> None:
    """Check a model folder's files. If `weights` is false, weight files may be missing. Raises FolderFault
    for the first problem found."""
    _check_kind(folder, reader)
    for path in _needed(folder, weights):
        if unreadable := unreadable_reason(path, reader):
            raise FolderFault(unreadable.description, unreadable.remedy)
        _check_content(path, folder)
    if weights:
        _check_weights(folder)
    if not (folder / TOKENIZER).exists():
        raise FolderFault(
            f"{folder / TOKENIZER} does not exist",
            "copy it from the original model, or create it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )


def _check_kind(folder: Path, reader: FileReader) -> None:
    """Check that `folder` contains a checkpoint rather than a model in a different storage format."""
    if unreadable := unreadable_reason(folder, reader):
        raise FolderFault(unreadable.description, unreadable.remedy)
    if not os.path.isdir(folder):
        raise _not_a_folder(folder)
    if os.path.lexists(folder / CONFIG):
        return
    if snapshots := _snapshots(folder):
        raise FolderFault(
            f"{folder} is a repository in a Hugging Face hub cache, not a checkpoint folder",
            f"use its snapshot folder: {snapshots[0]}",
        )
    if cached := sorted(folder.glob("models--*--*")) or sorted(folder.glob("hub/models--*--*")):
        found = [snapshots[0] for repository in cached if (snapshots := _snapshots(repository))]
        raise FolderFault(
            f"{folder} is the root of a Hugging Face hub cache, not a checkpoint folder",
            f"use a snapshot folder: {_listed(found)}"
            if found
            else f"download a model into it first; {cached[0].name} has no complete snapshot",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        raise _gguf(gguf[0])
    raise FolderFault(
        f"{folder} has no {CONFIG}",
        f"use the folder of a Hugging Face checkpoint: {_EXPECTED}",
    )


def _not_a_folder(path: Path) -> FolderFault:
    if path.suffix == ".gguf" or _starts_with(path, _GGUF):
        return _gguf(path)
    if os.path.exists(path):
        return FolderFault(f"{str(path)!r} is a file, not a folder", f"use {_EXPECTED}")
    if hidden_by_unit(path):
        return FolderFault(
            f"the service cannot see {str(path)!r}, because its systemd unit hides /home and /root",
            "move the model to a directory such as /srv/models, or use the drop-in models-in-home.conf",
        )
    return FolderFault(f"the folder {str(path)!r} does not exist", f"use {_EXPECTED}")


def _gguf(path: Path) -> FolderFault:
    return FolderFault(
        f"{path} is a GGUF file, which this engine does not read",
        f"use the safetensors version of the model: {_EXPECTED}",
    )


def _snapshots(repository: Path) -> list[Path]:
    """Return a repository's snapshots in a hub cache: the main branch's first, then the others, newest
    first."""
    try:
        found = [path for path in (repository / "snapshots").iterdir() if path.is_dir()]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []
    try:
        main = (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        main = ""
    return sorted(found, key=lambda path: path.name != main)


def _needed(folder: Path, weights: bool) -> list[Path]:
    """Return the paths of the files that the service reads from a model folder. Some may not exist."""
    found = [folder / name for name in SMALL_FILES]
    return found + sorted(folder.glob("*.safetensors")) if weights else found


def _check_content(path: Path, folder: Path) -> None:
    """Check that a file, if it exists, is not a broken link, a special file or a Git LFS pointer."""
    if os.path.islink(path) and not os.path.exists(path):
        raise FolderFault(
            f"{path} is a symbolic link to {path.readlink()}, which does not exist",
            "download the model again, or copy the folder with the files that its links point to (cp -L)",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise FolderFault(f"{path} is not a regular file", "replace it with the original model's file")
    if _starts_with(path, _POINTER):
        raise FolderFault(
            f"{path} is a Git LFS pointer: the repository was cloned without its large files",
            f"run: git -C {folder} lfs pull",
        )


def _check_weights(folder: Path) -> None:
    """Check that all weight files exist and have the sizes given in their headers."""
    index = folder / sizing.INDEX
    if (
        not index.exists()
        and not (folder / sizing.SINGLE).exists()
        and (gguf := sorted(folder.glob("*.gguf")))
    ):
        raise _gguf(gguf[0])
    missing = [name for name in _shards(index) if not (folder / name).exists()]
    if missing:
        more = f"; {len(missing)} model files are missing" if len(missing) > 1 else ""
        raise FolderFault(
            f"{folder / missing[0]} does not exist, but {sizing.INDEX} lists it{more}",
            "copy or download the checkpoint again, with all of its files",
        )
    try:
        sizing.read_entries(folder)
    except sizing.CheckpointError as error:
        raise FolderFault(error.cause, error.remedy) from error


def _shards(index: Path) -> list[str]:
    """Return the names of all weight files listed in the checkpoint's index. If the index is invalid, return
    no names; `read_entries` reports the problem."""
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({name for name in names if isinstance(name, str) and Path(name).name == name})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        if not os.path.isfile(path):
            return False
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError:
        return False


def _listed(paths: list[Path]) -> str:
    more = f" or {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
    return " or ".join(map(str, paths[:_NAMES_SHOWN])) + more
