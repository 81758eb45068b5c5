"""Tests that the text streams of a request's samples follow its text rules: the text that precedes a
completion, and `min_tokens`."""

from __future__ import annotations

import openai
import pytest

from tests.front.harness import MODEL, Harness


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_finishes_the_character_in_which_a_prompt_of_token_ids_ends(
    client: openai.OpenAI, front: Harness, stream: bool
) -> None:
    letter = front.tokenizer.encode_blocking("€", False)
    assert len(letter) == 3, "the test needs a character of several tokens"
    front.script = front.replica.script = lambda submit, sample: [*letter[2:], *letter, front.eos]
    asked = client.completions.create(model=MODEL, prompt=letter[:2], max_tokens=8, stream=stream)
    text = "".join(one.choices[0].text for one in (asked if stream else [asked]))
    assert text == "€€"


def test_a_chat_answer_does_not_continue_the_characters_of_its_prompt(
    client: openai.OpenAI, front: Harness
) -> None:
    ends_inside = front.tokenizer.encode_blocking("€", False)[2:]
    front.script = front.replica.script = lambda submit, sample: [*ends_inside, front.eos]
    asked = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert asked.choices[0].message.content == "\ufffd"


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 0), (3, 1), (5, 1), (6, 2), (9, 3)])
def test_stop_strings_within_the_first_min_tokens_do_not_end_an_answer(
    client: openai.OpenAI, front: Harness, min_tokens: int, ends_at: int
) -> None:
    words = [front.tokenizer.encode_blocking(text, False) for text in "z!"]
    assert [len(word) for word in words] == [1, 1]
    other, stop = words[0][0], words[1][0]
    front.script = front.replica.script = lambda submit, sample: [other, other, stop] * 4
    asked = client.completions.create(
        model=MODEL, prompt="x", max_tokens=12, stop=["!"], extra_body={"min_tokens": min_tokens}
    )
    assert asked.choices[0].text == "zz!" * ends_at + "zz"
    assert asked.choices[0].finish_reason == "stop"
