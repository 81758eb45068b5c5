"""The same engine on a GPU: the demo model's answers, and the tokens that the CPU gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import appliance
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams

pytestmark = pytest.mark.gpu

DEMO = Path(appliance.__file__).parent / "demo_model"
END = 6
"""The demo model's end of turn."""


def engine(device: str, dtype: str) -> LocalEngine:
    return LocalEngine(
        ReplicaSpec(
            replica=f"{device}-0",
            model_path=str(DEMO),
            device=device,
            dtype=dtype,
            max_rows=256,
            step_tokens=4096,
            kv_blocks=2048,
        )
    )


def questions() -> tuple[list[list[int]], list[str]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    entries = [json.loads(line) for line in (DEMO / "questions.jsonl").read_text().splitlines()]
    prompts = [
        tokenizer.encode(
            f"<|begin_of_text|><|user|>{entry['question']}<|end|><|assistant|>", add_special_tokens=False
        ).ids
        for entry in entries
    ]
    return prompts, [entry["expected"] for entry in entries]


def answers(made: LocalEngine) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(END,))
    prompts, _ = questions()
    got = [sample[0].token_ids for sample in made.generate(prompts, sampling)]
    made.core.check()
    made.close()
    return got


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_frozen_questions_are_answered_as_documented(dtype: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    _, expected = questions()
    got = [tokenizer.decode(ids) for ids in answers(engine("cuda", dtype))]
    right = sum(text.startswith(sentence) for text, sentence in zip(got, expected, strict=True))
    assert right >= 0.95 * len(expected)


def test_float32_gives_the_tokens_of_the_cpu() -> None:
    assert answers(engine("cuda", "float32")) == answers(engine("cpu", "float32"))


def test_a_seed_gives_the_same_sample_in_any_batch() -> None:
    made = engine("cuda", "float32")
    prompts, _ = questions()
    sampling = [SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=seed) for seed in range(20)]
    together = [sample[0].token_ids for sample in made.generate(prompts[:20], sampling)]
    alone = [made.generate([prompts[i]], sampling[i])[0][0].token_ids for i in range(0, 20, 5)]
    made.close()
    assert alone == together[::5]
