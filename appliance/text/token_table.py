"""The table that maps token ids to bytes. With this table, converting a token to text takes one list
lookup."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Each token's text, for decoders that decode each token independently of its neighbours.

    - `raw[id]` contains the token's bytes, or no bytes if the vocabulary has no token with this id.
    - `shown` and `shown_with_special` contain the text that a detokenizer emits for each token: a `str` if
      the bytes are complete characters, otherwise the `bytes`. In `shown`, special tokens are "".
    - `leading_strip` is the number of spaces to drop at the beginning of a text.
    - `bad_byte_each` is true if each invalid byte becomes one U+FFFD (as in ByteFallback), and false if each
      maximal ill-formed subsequence becomes one.

    The table never changes and is shared by all of a tokenizer's streams.
    """

    raw: list[bytes]
    shown: list[str | bytes]
    shown_with_special: list[str | bytes]
    leading_strip: int
    bad_byte_each: bool


def id_to_token(backend: tokenizers.Tokenizer) -> list[str | None]:
    """Return the vocabulary's token texts in id order, with None for ids without a token."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    tokens: list[str | None] = [None] * (max([-1, *vocabulary.values(), *added]) + 1)
    for text, token_id in vocabulary.items():
        tokens[token_id] = text
    for token_id, token in added.items():
        tokens[token_id] = token.content
    return tokens


def build_token_table(backend: tokenizers.Tokenizer, tokens: list[str | None]) -> TokenTable | None:
    """Return the table for `backend`, or None if its decoder is neither byte-level nor ByteFallback.

    In byte-level decoders (GPT-2, Llama 3, Qwen), each character represents a byte. In ByteFallback decoders
    (Llama 2, Mistral, Gemma), "▁" represents a space, <0xNN> represents a byte, and everything else is text.
    `tokens` is the result of `id_to_token`.
    """
    steps = component_steps(backend.decoder, "decoders")
    kinds = [step["type"] for step in steps]
    leading_strip = 0
    if kinds == ["ByteLevel"]:
        byte_of = _byte_level_alphabet()
        raw = [_byte_level_bytes(token, byte_of) if token else b"" for token in tokens]
    elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and len(kinds) <= 4:
        pattern = steps[0].get("pattern", {}).get("String")
        if not pattern:
            return None
        if len(kinds) == 4:
            strip = steps[3]
            if kinds[3] != "Strip" or strip["content"] != " " or strip["stop"] != 0:
                return None
            leading_strip = strip["start"]
        content = steps[0]["content"]
        raw = [_fallback_bytes(token.replace(pattern, content)) if token else b"" for token in tokens]
    else:
        return None
    everything = [_whole_text(data) for data in raw]
    shown = list(everything)
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token.special:
            shown[token_id] = ""
    return TokenTable(raw, shown, everything, leading_strip, bad_byte_each=kinds[0] != "ByteLevel")


def component_steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, as written in `tokenizer.json`. `name` is
    the field that contains the steps of a `Sequence`."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return (
            [each for inner in step[name] for each in flat(inner)] if step["type"] == "Sequence" else [step]
        )

    # Read the component's pickled state, which is its JSON. Serializing the whole tokenizer would include the
    # vocabulary.
    return [] if component is None else flat(json.loads(component.__getstate__()))


def _byte_level_alphabet() -> dict[str, int]:
    """Map each character of GPT-2's byte-level alphabet to the byte that it represents (`bytes_to_unicode` in
    OpenAI's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # An added token that contains characters outside the alphabet stands for its own text.
        return token.encode()


def _fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()


def _whole_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
