"""Tests that tokenizers are loaded correctly, and that they encode text in the same way as transformers."""

from __future__ import annotations

import asyncio
import json
import random
import string
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from appliance.settings import demo_model_folder
from appliance.text.encoder import LoneSurrogateError, TooManyTokensError
from appliance.text.fair_queue import WorkPool, run_steps
from appliance.text.tokenizer import Tokenizer
from appliance.text.tokenizer_files import TokenizerFilesError
from tests.text.conftest import byte_fallback, byte_level, write_model

SAMPLE = "<s>Hello 中文 😀<|end|> the lazy dog</s>"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30) | st.just(SAMPLE), add=st.booleans())
def test_encoding_equals_transformers(loaded, oracles, kind, text, add):
    assert loaded[kind].encode_blocking(text, add) == oracles[kind].encode(text, add_special_tokens=add)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}},
        {"additional_special_tokens": ["你好"], "pad_token": "</s>"},
        {"extra_special_tokens": {"image_token": "<|end|>"}},
    ],
)
def test_bos_eos_and_special_tokens_are_those_of_transformers(tmp_path, make, config):
    folder = write_model(tmp_path, make(), **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for text in ("", "x", SAMPLE):
        ids = theirs.encode(text)
        assert ours.encode_blocking(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.adds_bos == (ours.bos_id is not None and theirs.encode("x")[0] == ours.bos_id)
    assert ours.bos_id == theirs.bos_token_id
    assert {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)} == ours.special_tokens


def test_tokens_that_only_the_config_declares_are_added_at_their_ids(tmp_path):
    base = byte_level()
    next_id = base.get_vocab_size()
    declared = {str(next_id): {"content": "<|tool|>", "special": True, "normalized": False}}
    ours = Tokenizer.load(write_model(tmp_path, base, added_tokens_decoder=declared))
    assert ours.encode_blocking("<|tool|>", False) == [next_id]
    assert ours.decode([next_id]) == ""
    wrong = {str(next_id + 5): declared[str(next_id)]}
    with pytest.raises(TokenizerFilesError, match=f"id {next_id + 5}, but tokenizer.json gives it {next_id}"):
        Tokenizer.load(write_model(tmp_path, base, added_tokens_decoder=wrong))


def test_long_words_take_little_memory_after_they_were_encoded():
    ours = Tokenizer.load(demo_model_folder())
    draw = random.Random(1)

    def words() -> str:
        return " ".join("".join(draw.choices(string.ascii_letters, k=250)) for _ in range(3500))

    memory = psutil.Process().memory_info
    ours.encode_blocking(words())  # The heap grows to the size that encoding needs.
    before = memory().rss
    ours.encode_blocking(words())
    assert memory().rss - before < 20e6, "the library's default cache keeps 9 KB for each of these words"


def test_a_special_token_without_an_id_is_left_out(tmp_path):
    ours = Tokenizer.load(write_model(tmp_path, byte_level(), pad_token="<pad>"))
    assert max(ours.encode_blocking("<pad>")) < ours.vocabulary_size


def test_the_special_tokens_map_is_read_if_the_config_declares_no_tokens(tmp_path):
    folder = write_model(tmp_path, byte_level())
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    assert Tokenizer.load(folder).eos_ids == (3,)


def test_eos_ids_come_from_the_tokenizer_and_the_generation_config(tmp_path):
    folder = write_model(tmp_path, byte_level())
    assert Tokenizer.load(folder).eos_ids == (2,)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(folder).eos_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert Tokenizer.load(folder).eos_ids == (2, 3)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(TokenizerFilesError, match=r"generation_config.json: eos_token_id must be a token id"):
        Tokenizer.load(folder)


def test_padding_and_truncation_in_the_file_are_ignored(tmp_path):
    base = byte_level()
    base.enable_truncation(4)
    base.enable_padding(length=8)
    text = "The quick brown fox jumps"
    ids = Tokenizer.load(write_model(tmp_path, base)).encode_blocking(text)
    assert ids == Tokenizer.load(write_model(tmp_path / "plain", byte_level())).encode_blocking(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer.json does not exist; copy it"),
        ("tokenizer.json", "{", r"tokenizer.json is not a valid tokenizer file .* copy the file again"),
        ("tokenizer_config.json", "[1", r"tokenizer_config.json cannot be read as JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config.json: expected a JSON object, found list"),
        ("tokenizer_config.json", '{"bos_token": 5}', r"bos_token must be a token .* found 5"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', r"extra_special_tokens must be a list"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": "y"}}',
            r"has key 'x', expected a token id",
        ),
    ],
)
def test_broken_files_are_named_with_a_remedy(tmp_path, name, content, message):
    folder = write_model(tmp_path, byte_level())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerFilesError, match=message):
        Tokenizer.load(folder)


@pytest.mark.parametrize("text", ["ab\ud800", "ab\udfff" + "c" * 2000])
def test_a_lone_surrogate_is_refused_with_its_position(loaded, text):
    with pytest.raises(LoneSurrogateError, match="at character 2") as caught:
        loaded["byte_level"].encode_blocking(text)
    assert caught.value.position == 2


def test_a_panic_of_the_tokenizers_library_is_an_ordinary_exception(tmp_path):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?:x+x+)+y"), "isolated")
    backend.decoder = decoders.Strip("e", 1, 1)
    tokenizer = Tokenizer.load(write_model(tmp_path, backend))
    with pytest.raises(RuntimeError, match="retry-limit-in-match"):
        tokenizer.encode_blocking("x" * 5000)
    stream = tokenizer.stream()
    with pytest.raises(RuntimeError, match="slice index"):
        stream.push(tokenizer.encode_blocking("e"))


def test_several_texts_give_the_same_ids_as_each_by_itself(loaded):
    tokenizer = loaded["byte_level"]
    texts = ["", "short", SAMPLE * 50]
    assert run_steps(tokenizer.encode_steps(texts)) == [tokenizer.encode_blocking(text) for text in texts]


def test_the_event_loop_keeps_ticking_while_two_megabytes_are_encoded(loaded):
    texts = ["The quick brown fox jumps over the lazy dog 中文. " * 9_000] * 5

    async def watch() -> int:
        pool = WorkPool(max_wait_s=300)
        encoding = asyncio.ensure_future(
            pool.run("acme", loaded["byte_level"].encode_steps(texts), is_long=True)
        )
        ticks = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert sum(map(len, await encoding)) > 100_000
        return ticks

    assert sum(len(text.encode()) for text in texts) > 2_000_000
    # If the encoder blocked the event loop, there would be about one tick per text. Otherwise there are
    # hundreds.
    assert asyncio.run(watch()) > 20


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_encoding_stops_at_the_bound_on_tokens(loaded, kind):
    tokenizer = loaded[kind]
    ids = tokenizer.encode_blocking("fox " * 100)
    assert run_steps(tokenizer.encode_steps(["fox " * 100], max_tokens=len(ids))) == [ids]
    with pytest.raises(TooManyTokensError) as caught:
        run_steps(tokenizer.encode_steps(["a", "fox " * 100], max_tokens=len(ids) - 1))
    assert (caught.value.index, caught.value.tokens) == (1, len(ids))


def test_encoding_a_long_text_stops_at_the_bound():
    tokenizer = Tokenizer.load(demo_model_folder())
    with pytest.raises(TooManyTokensError) as caught:
        run_steps(tokenizer.encode_steps(["fox " * 200_000], max_tokens=100_000))
    assert caught.value.tokens is None and 100_000 < caught.value.encoded_tokens < 150_000


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_text_with_more_bytes_than_its_tokens_can_have_is_not_encoded(loaded, kind):
    with pytest.raises(TooManyTokensError) as caught:
        run_steps(loaded[kind].encode_steps(["fox " * 200_000], max_tokens=1000))
    assert caught.value.encoded_tokens == 0


def test_added_tokens_keep_their_flags(tmp_path):
    token = AddedToken("<|end|>", rstrip=True, special=True, normalized=False)
    declared = {"3": {"content": "<|end|>", "rstrip": True, "special": True, "normalized": False}}
    base = byte_level()
    base.add_special_tokens([token])
    folder = write_model(tmp_path, base, added_tokens_decoder=declared, eos_token="<|end|>")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert Tokenizer.load(folder).encode_blocking("a<|end|>  b") == theirs.encode("a<|end|>  b")


def test_the_package_loads_neither_torch_nor_transformers_nor_a_web_framework():
    code = (
        "import sys, appliance.text.tokenizer, appliance.text.chat_template, appliance.text.stream;"
        "print([m for m in ('torch', 'transformers', 'starlette', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"
