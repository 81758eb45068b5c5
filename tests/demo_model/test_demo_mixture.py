"""Tests of the mixture of experts that is made from the demo model. `scripts/quality --model` measures a
trained mixture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.messages import SamplingParams
from tests.demo_model.asking import DEMO, END, engine, questions
from tests.demo_model.parity import transformers_parity

ROOT = Path(__file__).resolve().parents[2]
SEED = 1


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("demo_model.mixture")
    for name in [name for name in sys.modules if name.split(".")[0] == "demo_model"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def dense() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def _answers(model: Path, weights: str) -> list[list[int]]:
    started = engine("cpu", "float32", weights=weights, model=model)
    prompts = questions()[0][:4]
    samples = started.generate(prompts, SamplingParams(max_tokens=20, stop_token_ids=(END,)))
    started.close()
    return [sample.token_ids for (sample,) in samples]


def test_experts_that_are_copies_give_the_answers_of_the_demo_model(
    mixture: Any, dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    """The weights of a token's chosen experts add up to one, no matter which experts are chosen."""
    mixture.export(mixture.upcycle(dense, 0.0, SEED), DEMO, tmp_path)
    for weights in ("auto", "fp8"):
        assert _answers(tmp_path, weights) == _answers(DEMO, weights)


def test_training_changes_only_experts_and_routers_and_answers_remain_those_of_transformers(
    mixture: Any, dense: LlamaForCausalLM, tmp_path: Path
) -> None:
    student = mixture.upcycle(dense, mixture.NOISE, SEED)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    divergences = _train(mixture, student, dense)
    assert len(divergences) == 1 and 0 < divergences[0] < 10
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".mlp." in name}
    mixture.export(student, DEMO, tmp_path)
    assert transformers_parity(tmp_path, asked=4) < 1e-4


def _train(mixture: Any, student: Any, dense: LlamaForCausalLM) -> list[float]:
    """Train for one step with few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CHAT_ROWS", 2), ("TEXT_ROWS", 1), ("TEXT_LENGTH", 32)):
            patch.setattr(mixture, name, value)
        patch.setattr(mixture, "_text", lambda tokenizer: torch.arange(200) % 100 + 10)
        divergences: list[float] = mixture.train(student, dense, DEMO, 1, SEED)
    return divergences
