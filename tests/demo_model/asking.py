"""Runs the demo model in an in-process engine and sends it the frozen questions."""

from __future__ import annotations

import json
from pathlib import Path

import appliance
from engine.generate import GeneratedSample, LocalEngine
from engine.messages import ReplicaSpec, SamplingParams

DEMO = Path(appliance.__file__).parent / "demo_model"
END = 6
"""The demo model's end-of-turn token."""


def engine(
    device: str, dtype: str, kv_cache_dtype: str = "auto", weights: str = "auto", model: Path = DEMO
) -> LocalEngine:
    """Start an engine. `model` is the folder of the demo model or of a model with the same tokenizer."""
    return LocalEngine(
        ReplicaSpec(
            replica=f"{device}-0",
            model_path=str(model),
            device=device,
            dtype=dtype,
            quantization=weights,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            kv_blocks=2048,
        )
    )


def questions() -> tuple[list[list[int]], list[str]]:
    """Return the prompts and the expected first sentences."""
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


def generated(made: LocalEngine, logprobs: int | None = None) -> list[GeneratedSample]:
    """Answer all questions greedily in one batch, and close the engine."""
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(END,), logprobs=logprobs)
    prompts, _ = questions()
    got = [samples[0] for samples in made.generate(prompts, sampling)]
    made.scheduler.check()
    made.close()
    return got


def answers(made: LocalEngine) -> list[list[int]]:
    """Return the token ids of the answers from `generated`."""
    return [answer.token_ids for answer in generated(made)]


def share_right(got: list[list[int]]) -> float:
    """Return the fraction of answers that begin with the expected sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    _, expected = questions()
    texts = [tokenizer.decode(ids) for ids in got]
    return sum(text.startswith(line) for text, line in zip(texts, expected, strict=True)) / len(expected)
