"""Tests that text is cut only where the cut does not change the token ids, and that no token represents more
bytes than the maximum reported by the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from appliance.settings import demo_model_folder
from appliance.text import cuts
from appliance.text.cuts import can_be_cut, longest_token_bytes, split_text
from appliance.text.encoder import MAX_UNCUT_BYTES, Encoder, UncuttableTextError
from appliance.text.fair_queue import run_steps
from appliance.text.token_table import build_token_table, id_to_token
from tests.examples import examples
from tests.text.conftest import byte_fallback, byte_level

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_with(**parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    state = json.loads(backend.to_str())
    # Remove the added token that contains a space.
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != " spaced token"]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(demo_model_folder()) / "tokenizer.json"))


BACKENDS = {
    "demo": demo(),
    "gpt-2": byte_level_with(),
    "llama-3": byte_level_with(pre_tokenizer=split_by(LLAMA_3)),
    "qwen": byte_level_with(
        pre_tokenizer=split_by(LLAMA_3.replace("{1,3}", "")), normalizer=normalizers.NFC()
    ),
    "o200k": byte_level_with(pre_tokenizer=split_by(O200K)),
}
PARTS = (
    *(
        "a",
        "I",
        "'ll",
        "'s",
        "don't",
        "é",
        "e\u0301",
        "ß",
        "中文",
        "你好",
        "한",
        "ひ",
        "٣",
        "12345",
        "_",
        "\u0345",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\x1c",
        ",",
        ".",
        "!?",
        "。",
        "/",
        "=\u0338",
        "😀",
        "\u200b",
        "\u180e",
    ),
    *("</s>", "<|end|>", "<s>", "Ġplain", "<|end|", "\ud7b0"),
)
TEXT = st.lists(st.sampled_from(PARTS) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pieces so small that text is cut at every permitted position."""
    monkeypatch.setattr(cuts, "PIECE_CHARACTERS", 1)
    monkeypatch.setattr("appliance.text.encoder.PIECE_CHARACTERS", 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_have_the_ids_of_the_whole_text(small_pieces: None, name: str) -> None:
    encoder = Encoder(BACKENDS[name])
    assert encoder.cuts_texts
    cut = 0

    @given(text=TEXT, add=st.booleans())
    @examples(150)
    def holds(text: str, add: bool) -> None:
        nonlocal cut
        pieces = list(split_text(text))
        assert "".join(pieces) == text
        cut += len(pieces) > 1
        assert (
            run_steps(encoder.steps([text], add))[0]
            == BACKENDS[name].encode(text, add_special_tokens=add).ids
        )

    holds()
    assert cut > 15


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(),  # an added token that contains a space
        byte_fallback(),  # no pre-tokenizer
        byte_level_with(pre_tokenizer=split_by(r"\w+ \w+|\s+|.")),
        byte_level_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level_with(normalizer=normalizers.Lowercase()),
    ],
)
def test_other_tokenizers_encode_a_text_whole(backend: tokenizers.Tokenizer) -> None:
    assert not can_be_cut(backend)


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"single_word": True}])
def test_added_tokens_that_depend_on_neighbouring_text_prevent_cuts(flags: dict[str, bool]) -> None:
    backend = byte_level_with()
    backend.add_tokens([AddedToken("word", **flags)])
    assert not can_be_cut(backend)


def test_a_text_that_cannot_be_cut_stays_whole_and_others_are_cut_evenly() -> None:
    assert list(split_text("a" * 100_000)) == ["a" * 100_000]
    pieces = list(split_text("word " * 100_000))
    assert max(map(len, pieces)) < cuts.PIECE_CHARACTERS + 10 and len(pieces) > 25


def test_a_piece_that_cannot_be_cut_is_refused_beyond_a_bound() -> None:
    name = next(iter(BACKENDS))
    encoder = Encoder(BACKENDS[name])
    longest = "x" * MAX_UNCUT_BYTES
    assert (
        run_steps(encoder.steps([longest], False))[0]
        == BACKENDS[name].encode(longest, add_special_tokens=False).ids
    )
    for text in ("a word " * 10 + longest + "x word", "a word " * 10 + "😀" * (len(longest) // 4 + 1)):
        with pytest.raises(UncuttableTextError, match=r"starting at character (69|70) ") as caught:
            run_steps(encoder.steps(["short", text], False))
        assert caught.value.index == 1


def test_a_tokenizer_that_cannot_cut_refuses_longer_texts() -> None:
    encoder = Encoder(byte_fallback())
    with pytest.raises(UncuttableTextError, match="cannot encode a text in parts"):
        run_steps(encoder.steps(["word " * (MAX_UNCUT_BYTES // 5 + 1)], False))


@pytest.mark.parametrize("name", [*BACKENDS, "byte_fallback"])
def test_no_token_stands_for_more_bytes_than_longest_token_bytes(name: str) -> None:
    backend = BACKENDS.get(name) or byte_fallback()
    table = build_token_table(backend, id_to_token(backend))
    longest = longest_token_bytes(backend, table)
    assert longest is not None

    @given(text=TEXT | st.sampled_from(["Ν\u0308\u0301ι\u0308\u0301", "\u1fbe\u0308\u0301" * 20, "각" * 9]))
    @examples(50)
    def holds(text: str) -> None:
        assert len(text.encode()) <= longest * len(backend.encode(text, add_special_tokens=False).ids)

    holds()


def test_longest_token_bytes_is_unknown_if_characters_can_vanish_or_merge() -> None:
    stripping = byte_level_with()
    stripping.add_tokens([AddedToken("<x>", lstrip=True)])
    lower = byte_level_with(normalizer=normalizers.Lowercase())
    other = byte_fallback(decoders.Metaspace())
    for backend in (stripping, lower, other):
        assert longest_token_bytes(backend, build_token_table(backend, id_to_token(backend))) is None
