"""Tests of a complete output stream: text, stop strings, and the number of delivered tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.text.stop import StopSet

TEXT = "The quick brown fox 😀 jumps over 中文 the lazy dog."


def test_without_stop_strings_a_stream_emits_the_text_and_delivers_every_token(loaded):
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode_blocking(TEXT)
    stream = tokenizer.stream()
    deltas = [stream.push([i]) for i in ids] + [stream.finish()]
    assert "".join(d.text for d in deltas) == TEXT
    assert sum(d.tokens_delivered for d in deltas) == stream.tokens_delivered == len(ids)


@given(
    stop=st.sampled_from([" fox", "😀 j", "o", "文 the l", "."]),
    width=st.integers(1, 9),
    include=st.booleans(),
)
def test_tokens_are_delivered_up_to_the_one_that_completes_the_stop_string(loaded, stop, width, include):
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode_blocking(TEXT)
    needed = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    stream = tokenizer.stream(StopSet([stop]), include)
    deltas = [stream.push(ids[at : at + width]) for at in range(0, len(ids), width)] + [stream.finish()]
    end = TEXT.index(stop) + (len(stop) if include else 0)
    assert "".join(d.text for d in deltas) == TEXT[:end]
    assert sum(d.tokens_delivered for d in deltas) == stream.tokens_delivered == needed
    assert deltas[-1].stopped == stop


@pytest.mark.parametrize("width", [1, 3, 100])
def test_a_stop_string_does_not_end_a_stream_within_min_tokens(loaded, width):
    tokenizer = loaded["byte_level"]
    text = "one two one two one two"
    ids = tokenizer.encode_blocking(text, add_special_tokens=False)
    end_positions = [n for n in range(1, len(ids) + 1) if tokenizer.decode(ids[:n]).endswith("two")]
    assert len(end_positions) == 3
    for min_tokens, end in (
        (0, 0),
        (end_positions[0] - 1, 0),
        (end_positions[0], 1),
        (end_positions[1], 2),
        (len(ids), 3),
    ):
        stream = tokenizer.stream(StopSet(["two"]), min_tokens=min_tokens)
        deltas = [stream.push(ids[at : at + width]) for at in range(0, len(ids), width)] + [stream.finish()]
        expected = "one two " * end + "one " if end < 3 else text
        assert "".join(delta.text for delta in deltas) == expected
        assert stream.tokens_delivered == (end_positions[end] if end < 3 else len(ids))


def test_text_held_for_a_stop_string_is_emitted_at_the_end(loaded):
    tokenizer = loaded["byte_level"]
    stream = tokenizer.stream(StopSet(["dog. END"]))
    assert stream.push(tokenizer.encode_blocking(TEXT)).text == TEXT[: TEXT.index("dog.")]
    assert stream.finish().text == "dog."


def test_a_stop_string_can_be_completed_by_the_flush_of_a_broken_character(loaded):
    tokenizer = loaded["byte_level"]
    stream = tokenizer.stream(StopSet(["x\ufffd"]))
    ids = tokenizer.encode_blocking("ax한", add_special_tokens=False)[:-1]
    assert stream.push(ids).text == "a"
    last = stream.finish()
    assert (last.text, last.stopped) == ("", "x\ufffd")


def test_characters_decoded_before_a_push_is_the_tokens_text_offset(loaded):
    tokenizer = loaded["byte_level"]
    ids = tokenizer.encode_blocking("The quick fox", add_special_tokens=False)
    stream = tokenizer.stream(StopSet(["quick never"]))
    for i in ids:
        offset = stream.characters_decoded
        stream.push([i])
        assert "The quick fox"[offset:].startswith(tokenizer.token_text(i))
