"""Reads the JSON files next to a Hugging Face model's `tokenizer.json`. Error messages are written for the
operator who created the folder."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerFilesError(ValueError):
    """Raised if a tokenizer file is missing or invalid. `cause` names the file, and `remedy` says what to
    do."""

    def __init__(self, cause: str, remedy: str = "copy the file again from the original model") -> None:
        super().__init__(cause, remedy)
        self.cause, self.remedy = cause, remedy

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the JSON files next to `tokenizer.json`.

    - `named` maps `bos_token`, `eos_token`, … to their texts.
    - `special` contains all tokens that these files declare as special.
    - `added` maps token ids to tokens that `tokenizer.json` may lack (`added_tokens_decoder`).

    `add_bos_token` and `add_eos_token` are not read: as in transformers, the post-processor in
    `tokenizer.json` adds these tokens.
    """

    named: dict[str, str]
    special: tuple[AddedToken, ...]
    added: dict[int, AddedToken]
    eos_ids: tuple[int, ...]


MAX_JSON_BYTES = 256 << 20
"""Maximum size of one file. The largest `tokenizer.json` of any known model is 35 MB."""


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file. Raises OSError if the file cannot be read, and ValueError if it is too
    large or not a regular file, because reading a device or a named pipe may block forever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"is {status.st_size} bytes long, but the limit is {max_bytes} bytes")
        return file.read(max_bytes)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or {} if the file does not exist. Raises `TokenizerFilesError` if the
    file is invalid."""
    try:
        value = json.loads(read_regular_file(path, MAX_JSON_BYTES).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerFilesError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read `tokenizer_config.json`, `special_tokens_map.json` and the end-of-sequence ids in `folder`. Files
    may be missing. Raises `TokenizerFilesError` if a file is invalid.

    Precedence is as in transformers: the special tokens map is used only if `tokenizer_config.json` has no
    `added_tokens_decoder`, and the ids in `config.json` only if `generation_config.json` has none.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path)
    declared = config.get("added_tokens_decoder")
    if declared is None:
        config = config | {
            key: value
            for key, value in read_json_object(folder / "special_tokens_map.json").items()
            if value is not None
        }
    elif not isinstance(declared, dict):
        raise TokenizerFilesError(f"{path}: added_tokens_decoder must be an object, found {declared!r:.80}")
    added: dict[int, AddedToken] = {}
    for key, value in (declared or {}).items():
        if not key.isdecimal():
            raise TokenizerFilesError(
                f"{path}: added_tokens_decoder has key {key!r:.80}, expected a token id"
            )
        added[int(key)] = _added_token(value, path, f"added_tokens_decoder[{key}]")
    by_text = {token.content: token for token in added.values()}
    named: dict[str, str] = {}
    special: dict[str, AddedToken] = {}
    for name, value in _special_entries(config, path):
        token = _added_token(value, path, name)
        token = by_text.get(token.content, token)
        token.special = True
        special[token.content] = token
        if name.endswith("_token"):
            named[name] = token.content
    return TokenizerFiles(
        named=named,
        special=tuple(special.values()),
        added=added,
        eos_ids=_eos_ids(folder),
    )


def _special_entries(config: Mapping[str, Any], path: Path) -> list[tuple[str, Any]]:
    """Return a (name, token) pair for each special token in a tokenizer config. Tokens in a list without
    names get the name "". Raises `TokenizerFilesError` if an entry is not a token."""
    entries = [(name, config[name]) for name in NAMED_SPECIAL_TOKENS if config.get(name) is not None]
    entries += [
        (name, value)
        for name, value in config.items()
        if name.endswith("_token") and name not in NAMED_SPECIAL_TOKENS and isinstance(value, (str, dict))
    ]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        if not isinstance(extra, (list, dict)):
            raise TokenizerFilesError(
                f"{path}: {name} must be a list or an object of tokens, found {extra!r:.80}"
            )
        entries += extra.items() if isinstance(extra, dict) else [("", value) for value in extra]
    return entries


def _added_token(value: object, path: Path, name: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
        return AddedToken(value["content"], **{flag: bool(value[flag]) for flag in flags if flag in value})
    raise TokenizerFilesError(
        f"{path}: {name} must be a token (text, or an object with content), found {value!r:.80}"
    )


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise TokenizerFilesError(
                f"{folder / name}: eos_token_id must be a token id or a list of them, found {value!r:.80}"
            )
        return tuple(dict.fromkeys(ids))
    return ()
