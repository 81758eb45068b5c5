"""Tests of request fields that vLLM's API has and OpenAI's API lacks. The fields must have the same meaning
as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.channel.core_messages import Admitted
from appliance.front.sampling import bit_map
from engine.messages import Submit, TokenLogprob
from tests.front import fake_replica
from tests.front.harness import MAX_MODEL_LEN, Harness
from tests.front.raw import chat, connect, events, post, read_answer, request
from tests.prompts import prompt_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
KEEP_ALIVES = [
    *[(0, 0.0), (90, 90.0), (-1, -1.0), ("90", 90.0), ("5m", 300.0)],
    *[("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25), ("-1s", -1.0)],
]
"""Values of `keep_alive`, each with its duration in seconds."""


def completion(front: Harness, **fields: Any) -> Any:
    """Return the answer to a completion request."""
    answer = post(front, COMPLETION, {"model": "demo", "prompt": "quick", "max_tokens": -1, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def chunks(front: Harness, path: str, body: dict[str, Any]) -> list[Any]:
    """Return all events of a stream except the last one, "[DONE]"."""
    answer = post(front, path, body | {"stream": True})
    assert answer.status == 200, answer.body
    return events(answer)[:-1]


def submitted(front: Harness) -> Submit:
    return front.replica.submits[-1]


# ── how long the model stays loaded ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [*KEEP_ALIVES, (None, None)],
)
def test_keep_alive_is_a_number_of_seconds_or_a_text_with_units(
    front: Harness, sent: Any, seconds: float | None
) -> None:
    completion(front, keep_alive=sent)
    assert front.admits[-1].keep_alive_s == seconds


# ── which tokens may be generated ────────────────────────────────────────────────────────────────


def test_allowed_tokens_reach_the_replica_as_a_bit_map(front: Harness) -> None:
    completion(front, allowed_token_ids=[7, 300, 8, 7])
    allowed = submitted(front).sampling.allowed_tokens
    assert [i for i in range(8 * len(allowed)) if allowed[i // 8] >> i % 8 & 1] == [7, 8, 300]


@pytest.mark.parametrize("ids", [[0], [7], [8], [0, 9, 9, 262_143]])
def test_a_bit_map_has_the_bits_of_its_ids(ids: list[int]) -> None:
    assert int.from_bytes(bit_map(ids), "little") == sum(1 << i for i in set(ids))


def test_bad_words_are_banned_at_the_beginning_of_a_text_and_after_a_space(front: Harness) -> None:
    encode = front.tokenizer.encode_blocking
    completion(front, bad_words=["quick", " lazy dog", "q"])
    expected = ["quick", " quick", " lazy dog", "q", " q"]
    assert submitted(front).sampling.bad_words == tuple(tuple(encode(text, False)) for text in expected)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "non-empty"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids", "100000"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "from 0"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "token ids"),
        (
            {"allowed_token_ids": [1], "min_tokens": 2},
            "allowed_token_ids",
            "no token with which the answer can begin",
        ),
        ({"bad_words": "quick"}, "bad_words", "list of strings"),
        ({"bad_words": ["a", ""]}, "bad_words", "word 1 has 0 characters"),
        ({"bad_words": ["a" * 257]}, "bad_words", "has 257 characters"),
        ({"bad_words": ["a"] * 129}, "bad_words", "at most 128"),
        ({"bad_words": ["a", "ß" * 40]}, "bad_words", "word 1 has"),
        ({"keep_alive": "soon"}, "keep_alive", "must be a number of seconds"),
        ({"keep_alive": "10 m"}, "keep_alive", "10 m"),
        ({"keep_alive": True}, "keep_alive", "must be a number of seconds"),
        ({"keep_alive": 1e10}, "keep_alive", "up to 1e+09"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"best_of": 1, "n": 2}, "best_of", "must be at least n = 2"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"best_of": 129}, "best_of", "128"),
        ({"max_tokens": -2}, "max_tokens", "-1"),
        ({"stop_token_ids": [7] * 65}, "stop_token_ids", "64"),
    ],
)
def test_invalid_values_are_refused_with_the_fields_name(
    front: Harness, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = post(front, COMPLETION, {"model": "demo", "prompt": "quick", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert said in answer.error["message"]
    assert not front.admits


def test_lists_of_tokens_times_prompts_are_bounded(front: Harness) -> None:
    words = [f"{'quick brown ' * 4}{number}" for number in range(40)]
    answer = post(front, COMPLETION, {"model": "demo", "prompt": ["x"] * 1024, "bad_words": words})
    assert (answer.status, answer.error["param"]) == (400, "bad_words")


# ── the prompt ───────────────────────────────────────────────────────────────────────────────────


def prompt_text(front: Harness, **fields: Any) -> str:
    """Return the prompt that the front renders for a chat."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "quick "}]
    answer = post(front, CHAT, {"model": "demo", "messages": messages, **fields})
    assert answer.status == 200, answer.body
    return front.tokenizer.decode(prompt_of(submitted(front)), skip_special_tokens=False)


def test_add_generation_prompt_decides_whether_an_assistant_message_is_begun(front: Harness) -> None:
    conversation = "<s><|user|>hi</s><|assistant|>quick </s>"
    assert prompt_text(front) == conversation + "<|assistant|>"
    assert prompt_text(front, add_generation_prompt=True) == conversation + "<|assistant|>"
    assert prompt_text(front, add_generation_prompt=False) == conversation


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_continue_final_message_ends_the_prompt_inside_the_last_message(
    front: Harness, fields: dict[str, Any]
) -> None:
    assert prompt_text(front, continue_final_message=True, **fields) == "<s><|user|>hi</s><|assistant|>quick "


def test_a_special_tokens_text_in_a_message_that_is_continued_is_plain_text(front: Harness) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a</s>b"}]
    body = {"model": "demo", "messages": messages, "continue_final_message": True}
    assert post(front, CHAT, body).status == 200
    ids = prompt_of(submitted(front))
    assert ids.count(front.eos) == 1 and front.tokenizer.decode(ids).endswith("a</s>b")


def test_continue_final_message_excludes_add_generation_prompt(front: Harness) -> None:
    answer = post(front, CHAT, chat(continue_final_message=True, add_generation_prompt=True))
    assert (answer.status, answer.error["param"]) == (400, "continue_final_message")


def test_tokenize_returns_the_tokens_that_a_chat_submits(front: Harness) -> None:
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        assert post(front, CHAT, chat(**fields)).status == 200
        assert post(front, "/tokenize", chat(**fields)).json["tokens"] == prompt_of(submitted(front))


def test_truncate_prompt_tokens_keeps_the_last_tokens(front: Harness) -> None:
    ids = list(range(5, 5 + 300)) * 2
    answer = completion(front, prompt=ids, truncate_prompt_tokens=100, echo=True, max_tokens=5)
    assert prompt_of(submitted(front)) == ids[-100:]
    assert answer["usage"]["prompt_tokens"] == 100
    assert answer["choices"][0]["text"].startswith(front.tokenizer.decode(ids[-100:]))
    completion(front, prompt=[ids, [5, 6]], truncate_prompt_tokens=-1, max_tokens=50)
    assert [prompt_of(submit) for submit in front.replica.submits[-2:]] == [
        ids[-(MAX_MODEL_LEN - 50) :],
        [5, 6],
    ]


def test_truncation_keeps_the_beginning_of_text_token(front: Harness) -> None:
    whole = front.tokenizer.encode_blocking("quick brown fox", True)
    completion(front, prompt="quick brown fox", truncate_prompt_tokens=3)
    assert prompt_of(submitted(front)) == [whole[0], *whole[-2:]]
    completion(front, prompt="quick brown fox", truncate_prompt_tokens=1)
    assert prompt_of(submitted(front)) == whole[:1]


def test_a_conversation_is_truncated_too(front: Harness) -> None:
    assert post(front, CHAT, chat(truncate_prompt_tokens=2)).status == 200
    cut = prompt_of(submitted(front))
    assert post(front, CHAT, chat()).status == 200
    assert cut == prompt_of(submitted(front))[-2:]


# ── the text ─────────────────────────────────────────────────────────────────────────────────────


def test_skip_special_tokens_false_shows_special_tokens(front: Harness) -> None:
    front.replica.script = lambda submit, sample: [50, 2, 51, front.eos]
    plain, shown = front.tokenizer.decode([50, 51]), front.tokenizer.decode([50, 2, 51], False)
    assert completion(front)["choices"][0]["text"] == plain
    assert completion(front, skip_special_tokens=False)["choices"][0]["text"] == shown
    assert completion(front, skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0][
        "text"
    ] == (shown + "</s>")


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_include_stop_str_in_output_keeps_the_stop_string(
    front: Harness, stream: bool, logprobs: int | None
) -> None:
    fields = {"stop": ["own f"], "include_stop_str_in_output": True, "logprobs": logprobs}
    body = {"model": "demo", "prompt": "x", "max_tokens": -1, **fields}
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks(front, COMPLETION, body)]
    else:
        choices = post(front, COMPLETION, body).json["choices"]
    assert "".join(choice["text"] for choice in choices) == "0The quick brown f"
    assert choices[-1]["finish_reason"] == "stop"


# ── several answers ──────────────────────────────────────────────────────────────────────────────


def test_best_of_returns_the_answers_with_the_highest_cumulative_log_probability(
    front: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Within a sample, all tokens but the end token have the same probability. Sample i consists of three
    # tokens and the end token.
    values = {60: -0.5, 61: -0.1, 62: -0.9, 63: -0.2}
    front.replica.script = lambda submit, sample: [60 + sample] * 3 + [front.eos]
    monkeypatch.setattr(
        fake_replica,
        "_logprob",
        lambda token, k: TokenLogprob(token, values.get(token, -0.3), []),
    )
    text = [front.tokenizer.decode([60 + sample] * 3) for sample in range(4)]
    answer = completion(front, prompt=["a", "b"], n=2, best_of=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [text[1], text[3]] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    # All samples are billed, because all of them were generated for the client.
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 4 == front.settled(1)[0].delivered_tokens
    assert front.admits[0].num_seqs == 8
    (best,) = completion(front, best_of=4, logprobs=0, echo=True)["choices"]
    assert best["text"] == "quick" + text[1] and best["logprobs"]["token_logprobs"][-3:] == [-0.1] * 3


def test_best_of_continues_after_a_replica_is_lost(front: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fake_replica, "_logprob", lambda token, k: TokenLogprob(token, -0.1 * (token % 7), [])
    )
    front.replica.script = lambda submit, sample: [60 + sample] * 6
    expected = completion(front, best_of=4, max_tokens=6)["choices"]
    front.replica.die_after, front.admit = 3, "hold"
    body = {"model": "demo", "prompt": "quick", "best_of": 4, "max_tokens": 6}
    answered = len(front.admits)
    with connect(front) as sock:
        sock.sendall(request(body, COMPLETION))
        front.wait_for(lambda: len(front.admits) == answered + 1)
        request_id = front.admits[-1].request_id
        front.send(Admitted(request_id, 0, front.replica.name, "salt", 1))
        front.wait_for(lambda: len(front.admits) == answered + 2)
        front.script = lambda submit, sample: [60 + sample] * 6
        front.attach("demo-1")
        front.send(Admitted(request_id, 1, "demo-1", "salt", 1))
        assert read_answer(sock).json["choices"] == expected


# ── contents of the answer ───────────────────────────────────────────────────────────────────────


def test_return_token_ids_returns_the_ids_of_prompt_and_answer(front: Harness) -> None:
    answer = completion(front, return_token_ids=True, n=2)
    for sample, choice in enumerate(answer["choices"]):
        tokens = front.sentence_script(submitted(front), sample)
        assert choice["prompt_token_ids"] == prompt_of(submitted(front))
        assert choice["token_ids"] == tokens
    answer = post(front, CHAT, chat(return_token_ids=True, stop="fox")).json
    assert answer["prompt_token_ids"] == prompt_of(submitted(front))
    ids = answer["choices"][0]["token_ids"]
    assert "fox" in front.tokenizer.decode(ids) and len(ids) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_streams_token_ids_are_those_of_its_text(front: Harness, path: str, logprobs: bool) -> None:
    body = chat(n=2) if path == CHAT else {"model": "demo", "prompt": "quick", "max_tokens": -1, "n": 2}
    body |= {"return_token_ids": True} | ({"logprobs": True if path == CHAT else 1} if logprobs else {})
    ids: list[list[int]] = [[], []]
    prompts = []
    for chunk in chunks(front, path, body):
        (choice,) = chunk["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        prompts += [x["prompt_token_ids"] for x in (chunk, choice) if "prompt_token_ids" in x]
    assert ids == [front.sentence_script(submitted(front), sample) for sample in (0, 1)]
    assert prompts == [prompt_of(submitted(front))] * (1 if path == CHAT else 2)


def test_prompts_have_log_probabilities_as_in_vllm(front: Harness) -> None:
    ids = [45, 50, 70]
    (choice,) = completion(front, prompt=ids, prompt_logprobs=2)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    text = front.tokenizer.token_text
    # The fake replica lists the sampled token first, followed by the alternatives 40, 41 and so on.
    assert second == {
        "50": {"logprob": -0.25, "rank": 1, "decoded_token": text(50)},
        "40": {"logprob": -42.0, "rank": 2, "decoded_token": text(40)},
    }
    assert list(third) == ["70", "40"]
    answer = post(front, CHAT, chat(prompt_logprobs=0)).json
    assert len(answer["prompt_logprobs"]) == submitted(front).prompt_tokens
    assert "prompt_logprobs" not in answer["choices"][0]


def test_echo_and_prompt_logprobs_each_return_their_own_number_of_alternatives(front: Harness) -> None:
    ids = [45, 50]
    (choice,) = completion(front, prompt=ids, prompt_logprobs=3, echo=True, logprobs=1)["choices"]
    assert submitted(front).sampling.prompt_logprobs == 3
    assert len(choice["prompt_logprobs"][1]) == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1


def test_too_many_log_probabilities_of_prompts_are_refused(front: Harness) -> None:
    body = {"model": "demo", "prompt": [[5] * 400] * 40, "prompt_logprobs": 20, "max_tokens": 1}
    answer = post(front, COMPLETION, body)
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")
    assert "131072" in answer.error["message"]


def test_too_many_log_probabilities_of_a_complete_answer_are_refused(front: Harness) -> None:
    body = chat(n=100, max_tokens=200, logprobs=True, top_logprobs=20)
    answer = post(front, CHAT, body)
    assert (answer.status, answer.error["param"]) == (400, "top_logprobs")
    assert "420000 log probabilities" in answer.error["message"] and "262144" in answer.error["message"]
    body = {"model": "demo", "prompt": ["x"] * 40, "n": 4, "max_tokens": 200, "logprobs": 20}
    answer = post(front, COMPLETION, body)
    assert (answer.status, answer.error["param"]) == (400, "logprobs")
    assert not front.admits


def test_without_max_tokens_an_answer_with_many_log_probabilities_is_shorter(front: Harness) -> None:
    answer = post(front, CHAT, chat(n=100, logprobs=True, top_logprobs=20))
    assert answer.status == 200, answer.body
    assert submitted(front).sampling.max_tokens == 262_144 // (100 * 21)
    chunks(front, CHAT, chat(logprobs=True, n=100, top_logprobs=20))
    assert submitted(front).sampling.max_tokens > 400


@pytest.mark.usefixtures("restore_models")
def test_too_many_token_ids_of_prompts_are_refused(front: Harness) -> None:
    """The model's maximum length is not known yet. If it were, a prompt of this length would be refused
    earlier."""
    front.models = [front.served("long", max_model_len=0)]
    front.reconfigure()
    body = {"model": "long", "prompt": [[5] * 1100] * 100, "n": 10, "return_token_ids": True}
    answer = post(front, COMPLETION, body)
    assert (answer.status, answer.error["param"]) == (400, "return_token_ids")
    assert "1048576" in answer.error["message"]


def test_prompts_times_samples_are_bounded(front: Harness) -> None:
    for fields, param in (({"best_of": 3}, "best_of"), ({"n": 3}, "n")):
        answer = post(front, COMPLETION, {"model": "demo", "prompt": ["x"] * 342, **fields})
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "1024" in answer.error["message"]


def test_log_probabilities_are_the_same_in_one_step_and_in_several(front: Harness) -> None:
    """Long answers are encoded on a separate thread."""
    prompts = [[5 + number] * 300 for number in range(4)]
    long = completion(front, prompt=prompts, prompt_logprobs=5, max_tokens=2, logprobs=1)["choices"]
    for number, prompt in enumerate(prompts):
        (short,) = completion(front, prompt=prompt, prompt_logprobs=5, max_tokens=2, logprobs=1)["choices"]
        assert long[number] == short | {"index": number}


def test_continuous_usage_stats_puts_token_counts_into_every_chunk(front: Harness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *before, last = chunks(front, CHAT, chat(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in before]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] > 1
    assert last["choices"] == []
    for chunk in before:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    only = chunks(front, CHAT, chat(stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in only)


@pytest.mark.usefixtures("restore_models")
def test_numbers_have_bounds_while_the_limits_of_the_model_are_unknown(front: Harness) -> None:
    front.models = [front.served(max_model_len=0, vocab_size=0)]
    front.reconfigure()
    for token_id in (-1, front.vocab_size, 1 << 40, 1 << 80):
        for path, field in (("/detokenize", "tokens"), (COMPLETION, "prompt")):
            answer = post(front, path, {"model": "demo", field: [5, token_id]})
            assert (answer.status, answer.error["param"]) == (400, field)
        if token_id >= 0:
            answer = post(front, COMPLETION, {"model": "demo", "prompt": "x", "stop_token_ids": [token_id]})
            assert (answer.status, answer.error["param"]) == (400, "stop_token_ids")
    for path, prompt in ((COMPLETION, {"prompt": "quick"}), (CHAT, chat())):
        answer = post(front, path, {"model": "demo", "max_tokens": 1 << 70, **prompt})
        assert answer.status == 200
