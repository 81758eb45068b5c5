"""Tests that the shipped model's folder is complete, and that the model in it answers questions."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "appliance" / "demo_model"
FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "NOTICE",
    "MODEL_CARD.md",
    "questions.jsonl",
    "heldout.txt",
}
MAX_WEIGHT_BYTES = 24_000_000


def read_json(name: str) -> Any:
    return json.loads((FOLDER / name).read_text("utf-8"))


def read_questions() -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()]


def shard_header(name: str) -> dict[str, Any]:
    """Return the header of a safetensors file: an 8-byte little-endian length followed by JSON."""
    with (FOLDER / name).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER, padding_side="left")


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_the_folder_holds_the_shipped_files_and_nothing_else() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES


def test_the_weights_stay_within_24_million_bytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) <= MAX_WEIGHT_BYTES


def test_the_index_names_every_tensor_of_each_shard_and_their_size() -> None:
    index = read_json("model.safetensors.index.json")
    shards = {name: shard_header(name) for name in sorted(set(index["weight_map"].values()))}
    assert len(shards) == 2
    assert {tensor: name for name, header in shards.items() for tensor in header} == index["weight_map"]
    tensors = [entry for header in shards.values() for entry in header.values()]
    assert {entry["dtype"] for entry in tensors} == {"BF16"}
    sizes = [end - begin for begin, end in (entry["data_offsets"] for entry in tensors)]
    assert sum(sizes) == index["metadata"]["total_size"]


def test_every_matrix_divides_by_64_on_each_of_four_ranks() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] % 4 == 0
    assert config["tie_word_embeddings"] is True
    for name in ("intermediate_size", "vocab_size"):
        assert config[name] % (4 * 64) == 0, name
    assert config["hidden_size"] % 64 == 0


def test_stop_tokens_are_the_same_in_all_files(tokenizer: Any) -> None:
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|end_of_text|>")]
    assert read_json("config.json")["eos_token_id"] == stops
    assert read_json("generation_config.json")["eos_token_id"] == stops
    assert tokenizer.eos_token_id == stops[0]
    assert tokenizer.bos_token_id == read_json("config.json")["bos_token_id"]


def test_any_text_round_trips_through_the_tokenizer(tokenizer: Any) -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert plain.get_vocab_size() == read_json("config.json")["vocab_size"]
    text = (FOLDER / "heldout.txt").read_text("utf-8")[:20_000] + "\tÄ 漢字 🙂\r\n\x00  12345 "
    ids = plain.encode(text).ids
    assert ids[0] == tokenizer.bos_token_id
    assert plain.decode(ids) == text
    assert tokenizer(text)["input_ids"] == ids


def test_the_chat_template_renders_roles_and_the_turn_to_come(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What does len do?\n"},
        {"role": "assistant", "content": "Return the number of items in a container."},
        {"role": "user", "content": "Thanks"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|begin_of_text|><|system|>Be brief.<|end|><|user|>What does len do?<|end|>"
        "<|assistant|>Return the number of items in a container.<|end|><|user|>Thanks<|end|><|assistant|>"
    )
    with pytest.raises(Exception, match="role must be system, user or assistant, not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_the_200_questions_are_well_formed_and_unique() -> None:
    questions = read_questions()
    assert len(questions) == 200
    for field in ("id", "question", "expected"):
        assert len({row[field] for row in questions}) == 200, field
    for row in questions:
        assert set(row) == {"id", "question", "expected"}
        assert row["question"].endswith("?") and row["question"].isascii()
        assert row["expected"].endswith(".") and row["expected"].isascii()
    assert questions[0]["question"] == "What does textwrap.dedent do?"


def test_the_held_out_text_and_the_questions_are_about_different_modules() -> None:
    text = (FOLDER / "heldout.txt").read_text("utf-8")
    assert 100_000 <= len(text.encode()) <= 250_000
    names = [line.removeprefix("# Lib/") for line in text.splitlines() if line.startswith("# Lib/")]
    modules = {name.removesuffix(".py").split("/")[0] for name in names}
    assert {"sched", "tomllib", "nntplib"} <= modules
    asked = {row["question"].split()[2].split(".")[0] for row in read_questions()}
    assert not modules & asked


@torch.no_grad()
def test_greedy_answers_begin_with_the_expected_sentence(tokenizer: Any, model: Any) -> None:
    asked = read_questions()[::20]
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": row["question"]}] for row in asked],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=64,
        do_sample=False,
    )
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    wrong = [
        (row["question"], answer)
        for row, answer in zip(asked, answers, strict=True)
        if not answer.startswith(row["expected"])
    ]
    assert not wrong
