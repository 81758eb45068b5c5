"""Tokenizers that are trained when the tests start and written to model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from appliance.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. def main(argv): return len(argv) != 2",
    "Größe, naïve café, e\u0301 combining, 中文字符測試, 日本語のテキスト, 한국어, สวัสดี, 😀👩‍👩‍👧‍👦🏳️‍🌈",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer like those of Llama 3 and Qwen: a regular expression splits the text, and byte-level
    BPE encodes the pieces. A token may contain part of a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["你好", " spaced token", "Ġplain"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral: "▁" represents a space, and byte tokens represent
    characters that are not in the vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    # Train only on the first half of the corpus, so that characters that occur only in the second half are
    # missing from the alphabet.
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(CORPUS[:1], trainer)
    state = json.loads(trained.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer that the detokenizer cannot handle with a table of token texts."""
    return byte_fallback(decoders.Metaspace(prepend_scheme="always"))


def write_model(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    """Write a model folder with `backend` and a tokenizer_config.json that contains the usual names and
    `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        make.__name__: write_model(root / make.__name__, make(), chat_template=TEMPLATE)
        for make in (byte_level, byte_fallback, metaspace)
    }


@pytest.fixture(scope="session")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    return {kind: PreTrainedTokenizerFast.from_pretrained(folder) for kind, folder in folders.items()}
