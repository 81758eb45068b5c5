"""Tests of the demo model's corpus: first sentences, conversations, and the model trained on them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "demo_model"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("doc", "purpose"),
    [
        ("Remove a thing.  Then stop at once.\n\nMore.", ("Remove a thing.", "Then stop at once.")),
        ("range(stop) -> range object\n\nReturn an object of numbers.", ("Return an object of numbers.", "")),
        (
            "Take names, e.g. Linux or Windows. They were given.",
            ("Take names, e.g. Linux or Windows.", "They were given."),
        ),
        ("Return the\n    folded   line.\n", ("Return the folded line.", "")),
        ("Too short.", None),
        ("", None),
        ("Alias for field number 0", None),
        ("Ends with a colon and then:\n  - a list", None),
    ],
)
def test_the_purpose_is_the_first_sentence_of_a_docstring(doc: str, purpose: tuple[str, str] | None) -> None:
    from demo_model.docstrings import purpose_of_doc

    assert purpose_of_doc(doc) == purpose


def test_the_training_model_computes_what_transformers_computes() -> None:
    from demo_model.llama import Llama, LlamaShape
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = ROOT / "appliance" / "demo_model"
    ours = Llama(LlamaShape())
    state = {
        name: value for shard in folder.glob("*.safetensors") for name, value in load_file(shard).items()
    }
    ours.load_state_dict({name: value.float() for name, value in state.items()})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(7, 5120, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4


def test_conversations_tokenize_as_the_chat_template_renders_them() -> None:
    from demo_model.conversations import IGNORED, ConversationMaker
    from demo_model.docstrings import Purpose
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "appliance" / "demo_model" / "tokenizer.json"))
    purposes = [
        Purpose(f"{module}.{name}", "function", module, f"Does {name} to text.", "Twice.")
        for module, name in (("textwrap", "dedent"), ("textwrap", "fill"), ("json", "dumps"))
    ]
    rows = ConversationMaker(tokenizer, purposes, [], seed=1).rows(count=50, length=192)
    end = tokenizer.token_to_id("<|end|>")
    for tokens, labels in zip(rows.tokens.tolist(), rows.labels.tolist(), strict=True):
        used = 1 + max(index for index, label in enumerate(labels) if label != IGNORED)
        text = tokenizer.decode(tokens[:used], skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == tokens[:used]
        assert labels[used - 1] == end
        assert all(
            label in (IGNORED, following)
            for label, following in zip(labels[: used - 1], tokens[1:used], strict=True)
        )
