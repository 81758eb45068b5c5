"""Tests that the detokenizer produces the same text as decoding with transformers, for random ids and for
tokens that split characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.text.detokenizer import Detokenizer, WindowDetokenizer
from appliance.text.fair_queue import run_steps
from appliance.text.tokenizer import TokenIdError, Tokenizer

KINDS = ["byte_level", "byte_fallback", "metaspace"]
TRICKY = st.sampled_from(
    [
        "中文",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "e\u0301\u0301",
        "ö",
        "สวัสดี",
        "\ufffd",
        " ",
        "  x",
        "▁",
        "a",
        "\n",
        "<s>",
        "你好",
        "\u0000",
    ]
)
TEXTS = st.lists(TRICKY | st.text(max_size=6), max_size=8).map("".join)


def streamed(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> str:
    """Return the whole text produced by the detokenizer. `ids` arrive first in pieces of the lengths in
    `cuts`, and then one by one."""
    pieces, at = [], 0
    for length in [*cuts, *[1] * len(ids)]:
        pieces.append(detokenizer.push(ids[at : at + length]))
        at += length
    return "".join(pieces) + detokenizer.finish()


CUTS = st.lists(st.integers(0, 4), max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cuts=CUTS, skip=st.booleans())
def test_a_stream_over_any_text_equals_transformers_decode(loaded, oracles, kind, text, cuts, skip):
    ids = loaded[kind].encode_blocking(text)
    expected = oracles[kind].decode(ids, skip_special_tokens=skip)
    if kind != "metaspace":
        assert loaded[kind].decode(ids, skip) == expected
    assert streamed(loaded[kind].detokenizer(skip), ids, cuts) == expected


@given(ids=st.lists(st.integers(0, 500), max_size=24), cuts=CUTS, skip=st.booleans())
def test_a_byte_level_stream_over_any_ids_equals_transformers_decode(loaded, oracles, ids, cuts, skip):
    expected = oracles["byte_level"].decode(ids, skip_special_tokens=skip)
    assert streamed(loaded["byte_level"].detokenizer(skip), ids, cuts) == expected
    assert loaded["byte_level"].decode(ids, skip) == expected


def tolerant_byte_fallback(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode with ByteFallback, and replace only the invalid bytes. This is an independent implementation of
    the detokenizer's rule."""
    tokens = [
        tokenizer._tokens[i] for i in ids if i < tokenizer.vocabulary_size and i not in tokenizer.special_ids
    ]
    text = ""
    for run in re.split(r"((?:<0x..>)+)", "\x1f".join(tokens).replace(">\x1f<0x", "><0x")):
        if run.startswith("<0x"):
            data = bytes.fromhex(run.replace("<0x", "").replace(">", ""))
            text += re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))
        else:
            text += run.replace("\x1f", "").replace("▁", " ")
    return text.removeprefix(" ")


@given(ids=st.lists(st.integers(0, 450) | st.integers(145, 405), max_size=24), cuts=CUTS)
def test_a_byte_fallback_stream_replaces_bad_bytes_and_keeps_whole_characters(loaded, oracles, ids, cuts):
    tokenizer = loaded["byte_fallback"]
    expected = tolerant_byte_fallback(tokenizer, ids)
    assert streamed(tokenizer.detokenizer(), ids, cuts) == expected == tokenizer.decode(ids)
    if "\ufffd" not in expected:
        assert expected == oracles["byte_fallback"].decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 450), max_size=24), cuts=CUTS, skip=st.booleans())
def test_a_window_stream_over_any_ids_equals_transformers_decode(loaded, oracles, ids, cuts, skip):
    expected = oracles["metaspace"].decode(ids, skip_special_tokens=skip)
    assert streamed(loaded["metaspace"].detokenizer(skip), ids, cuts) == expected


@given(text=TEXTS, cuts=CUTS)
def test_a_window_over_a_byte_level_decoder_equals_the_table(loaded, text, cuts):
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode_blocking(text)
    window = WindowDetokenizer(tokenizer._backend, tokenizer.special_ids)
    assert streamed(window, ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_push_never_emits_an_incomplete_character(loaded, kind):
    text = "a😀b中c한👩‍👩‍👧‍👦é"
    tokenizer = loaded[kind]
    ids = tokenizer.encode_blocking(text, add_special_tokens=False)
    assert len(ids) > len(text) / 2
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([i]) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert "" in pieces


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(loaded, kind):
    tokenizer = loaded[kind]
    ids = tokenizer.encode_blocking("x한", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids) == "x"
    assert set(detokenizer.finish()) == {"\ufffd"}


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_that_begins_in_the_prompt_is_whole_in_the_continuation(loaded, kind, window):
    tokenizer = loaded[kind]
    ids = tokenizer.encode_blocking("x한y", add_special_tokens=False)
    cuts = [cut for cut in range(1, len(ids)) if tokenizer.decode(ids[:cut]).endswith("\ufffd")]
    assert cuts
    for cut in cuts:
        detokenizer: Detokenizer = tokenizer.detokenizer(context=ids[:cut])
        if window:
            detokenizer = WindowDetokenizer(tokenizer._backend, frozenset(), context=ids[:cut])
        pieces = [detokenizer.push([token_id]) for token_id in ids[cut:]]
        assert "".join([*pieces, detokenizer.finish()]) == "한y"


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_echoed_prompt_and_its_continuation_contain_each_character_once(loaded, kind, window):
    tokenizer = loaded[kind]
    table = tokenizer.table
    whole, other = (tokenizer.encode_blocking(text, add_special_tokens=False) for text in ("x한y", "y"))
    try:
        if window:
            tokenizer.table = None
        for cut in range(1, len(whole)):
            for rest in (whole[cut:], other):
                echoed = run_steps(tokenizer.decode_steps(whole[:cut], complete=False))
                stream = tokenizer.detokenizer(context=whole[:cut])
                text = echoed + stream.push(rest) + stream.finish()
                assert text == tokenizer.decode([*whole[:cut], *rest])
    finally:
        tokenizer.table = table


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_a_text_loses_its_first_space_and_a_continuation_keeps_it(loaded, kind):
    tokenizer = loaded[kind]
    prompt, word = tokenizer.encode_blocking("the lazy"), tokenizer.encode_blocking(" dog")
    assert tokenizer.detokenizer().push(word) == "dog"
    assert tokenizer.detokenizer(context=[tokenizer.bos_id]).push(word) == "dog"
    assert tokenizer.detokenizer(context=prompt).push(word) == " dog"


def test_a_window_that_always_ends_in_replacement_characters_is_bounded(loaded):
    tokenizer = loaded["byte_level"]
    window = WindowDetokenizer(tokenizer._backend, tokenizer.special_ids)
    ids = tokenizer.encode_blocking("\ufffd", add_special_tokens=False) * 200
    pieces = [window.push([i]) for i in ids]
    assert "".join(pieces)
    assert len(window._ids) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_add_nothing_and_negative_ones_are_refused(loaded, kind):
    tokenizer = loaded[kind]
    beyond = tokenizer.vocabulary_size + 7
    assert tokenizer.decode([beyond]) == tokenizer.detokenizer().push([beyond]) == ""
    assert (tokenizer.token_bytes(beyond), tokenizer.token_text(beyond)) == (b"", "")
    with pytest.raises(TokenIdError, match="token id -1 is negative"):
        tokenizer.decode([3, -1])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_token_bytes_join_to_the_text_and_split_characters_show_as_bytes(loaded, kind):
    tokenizer = loaded[kind]
    ids = tokenizer.encode_blocking("fox 한", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "fox 한"
    assert tokenizer.token_text(ids[-1]).startswith("bytes:\\x")
    assert tokenizer.token_text(tokenizer.bos_id) == "<s>"
