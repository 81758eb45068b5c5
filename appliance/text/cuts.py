"""Splits texts at positions (cuts) where encoding the pieces gives the same token ids as encoding the whole
text. Also determines the maximum length of a token. Both results are derived from a tokenizer's added tokens,
normalizer and pre-tokenizer. If no cuts can be derived, texts are encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from appliance.text.token_table import TokenTable, component_steps

PIECE_CHARACTERS = 16_384
"""Length of a piece, in characters. Encoding a piece takes about 15 ms (1 µs per character with the demo
model's tokenizer)."""

_WINDOW_CHARACTERS = 16_384
_SAFE_LETTER = "A-Za-z0-9一-龥ぁ-ゖァ-ヺ가-힣"
_CUT = re.compile(rf"\w |[{_SAFE_LETTER}][\n.,;!?、。，；！？]")
"""Matches two adjacent characters if the text can be cut between them."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SAFE_ALTERNATIVES = frozenset(
    [
        "C",
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+"),
        *(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{contraction}"
            for a, b in (("*", "+"), ("+", "*"))
            for contraction in ("", "C?")
        ),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    ]
)
r"""The alternatives of the regular expressions that GPT-2, Llama 3, Qwen 2, o200k and Tekken use to split
text before tokenization. C stands for a contraction. With each of these expressions, a match begins at every
cut, and the matches on one side of a cut do not depend on the text on the other side, because:

- No match contains a non-space character followed by a space, or a letter or digit followed by one of the
  other characters in `_CUT`.
- No alternative has a lookbehind.
- Only one alternative has a lookahead (`\s+(?!\S)`). Its matches end in white space, but the text before a
  cut never does.
"""

_MAX_NFC_SHRINKING = 4
"""Upper bound on the factor by which NFC normalization can shorten UTF-8 text. According to a search of
Unicode 14, the largest factor is 3.5 (U+1FBE U+0308 U+0301 becomes U+0390)."""


def can_be_cut(backend: tokenizers.Tokenizer) -> bool:
    """Return True if encoding the pieces from `split_text` separately gives the same token ids as encoding
    the whole text."""
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        if token.single_word or _CUT.search(text) or (token.rstrip and re.search(r"\w\Z", text)):
            return False
    if any(step["type"] != "NFC" for step in component_steps(backend.normalizer, "normalizers")):
        return False
    steps = component_steps(backend.pre_tokenizer, "pretokenizers")
    if not steps or not _splits_at_cuts(steps[0]):
        return False
    # The pre-tokenizer's first step splits the text. Later steps process each part separately.
    return all(step["type"] in ("Split", "Digits", "Punctuation") or _is_plain(step) for step in steps[1:])


def split_text(text: str) -> Iterator[str]:
    """Yield `text` in pieces of about `PIECE_CHARACTERS` characters. Where the text cannot be cut, pieces are
    longer."""
    begin = 0
    while (end := _find_cut(text, begin + PIECE_CHARACTERS)) < len(text):
        yield text[begin:end]
        begin = end
    yield text[begin:]


def last_cut(text: str) -> int:
    """Return the last position at which `text` can be cut, or 0 if there is none."""
    return max((found.start() + 1 for found in _CUT.finditer(text)), default=0)


def longest_token_bytes(backend: tokenizers.Tokenizer, table: TokenTable | None) -> int | None:
    """Return the maximum number of bytes that one token can represent, or None if unknown."""
    added = backend.get_added_tokens_decoder().values()
    if table is None or any(token.lstrip or token.rstrip for token in added):
        return None
    if table.bad_byte_each:
        complete = backend.model.byte_fallback and all(
            backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)
        )
    else:
        complete = (
            any(
                step["type"] == "ByteLevel"
                for step in component_steps(backend.pre_tokenizer, "pretokenizers")
            )
            and len({data for data in table.raw if len(data) == 1}) == 256
        )
    if not complete:
        # The tokenizer may drop characters, or represent any number of them with a single unknown token.
        return None
    shrinking = 1
    for step in component_steps(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            shrinking *= _MAX_NFC_SHRINKING
        elif step["type"] != "Prepend" and not _lengthens(step):
            return None
    longest = max(map(len, table.raw))
    return shrinking * max(longest, *(len(token.content.encode()) for token in added), 1)


def _find_cut(text: str, begin: int) -> int:
    """Return the position of the first cut after `begin`, or the end of the text if there is none. The search
    covers one window at a time, because the regular expression engine holds the GIL."""
    while begin < len(text):
        found = _CUT.search(text, begin - 1, begin + _WINDOW_CHARACTERS)
        if found is not None:
            return found.start() + 1
        begin += _WINDOW_CHARACTERS - 1
    return len(text)


def _splits_at_cuts(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"] and step["use_regex"]
    if step["type"] != "Split" or (step["behavior"], step["invert"]) not in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return False
    pattern = step["pattern"].get("Regex", "").replace(_CONTRACTION, "C")
    alternatives = pattern.split("|")
    return _SAFE_ALTERNATIVES.issuperset(alternatives) and r"\s+" in alternatives


def _is_plain(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and not step["add_prefix_space"]


def _lengthens(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern", {}).get("String")
    return bool(
        step["type"] == "Replace" and pattern and len(step["content"].encode()) >= len(pattern.encode())
    )
