"""Scores an exported checkpoint folder with `transformers`, so that the exported files themselves are tested.

The scores are the fraction of greedy answers that begin with the expected sentence, and the perplexity of the
held-out text.
"""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from demo_model.conversations import SYSTEM_PROMPTS, WORDINGS
from demo_model.corpus import load_purposes, load_questions
from demo_model.training import heldout_windows

MAX_NEW_TOKENS = 80
BATCH = 100


def score(
    folder: Path, device: torch.device, dtype: torch.dtype, corpus: Path | None = None
) -> dict[str, float]:
    """Print and return the checkpoint's scores. If `corpus` is given, also score differently worded questions
    about a random sample of its names."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-untyped, unused-ignore]

    started = time.monotonic()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()
    questions = load_questions(folder / "questions.jsonl")
    result: dict[str, float] = {}

    def judge(name: str, asked: list[tuple[list[dict[str, str]], str]], show: bool) -> None:
        answers = answer_greedily(model, tokenizer, [messages for messages, _ in asked])
        wrong = [
            (messages[-1]["content"], expected, answer)
            for (messages, expected), answer in zip(asked, answers, strict=True)
            if not answer.startswith(expected)
        ]
        result[name] = 1 - len(wrong) / len(asked)
        print(f"{name}: {result[name]:.1%} of {len(asked)} ({device.type} {dtype})", flush=True)
        for question, expected, answer in wrong[: 12 if show else 5]:
            print(f"  {question}\n    expected {expected!r}\n    answered {answer!r}")

    judge("frozen questions", [(_user(row["question"]), row["expected"]) for row in questions], True)
    draw = random.Random(1)
    judge(
        "frozen questions with a system prompt",
        [
            (
                [{"role": "system", "content": draw.choice(SYSTEM_PROMPTS)}, *_user(row["question"])],
                row["expected"],
            )
            for row in questions
        ],
        False,
    )
    if corpus is not None:
        purposes = draw.sample(load_purposes(corpus), 1000)
        judge(
            "1,000 names in any wording",
            [(_user(draw.choice(WORDINGS).format(p.name, p.kind)), p.sentence) for p in purposes],
            False,
        )
    result["heldout loss"], result["heldout bits per byte"] = heldout_scores(model, folder, device)
    seconds = time.monotonic() - started
    nats, bits = result["heldout loss"], result["heldout bits per byte"]
    print(
        f"held-out text: {nats:.4f} nats per token, perplexity {math.exp(nats):.2f}, "
        f"{bits:.3f} bits per byte; scored in {seconds:.0f} s",
        flush=True,
    )
    return result


@torch.no_grad()
def answer_greedily(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> list[str]:
    """Return one greedy answer per conversation, without special tokens."""
    answers = []
    for start in range(0, len(conversations), BATCH):
        inputs = tokenizer.apply_chat_template(
            conversations[start : start + BATCH],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        ).to(model.device)
        inputs.pop("token_type_ids", None)
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new_tokens = output[:, inputs["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    return answers


@torch.no_grad()
def heldout_scores(model: Any, folder: Path, device: torch.device) -> tuple[float, float]:
    """Return the nats per token and the bits per byte of heldout.txt, measured in windows of 1,024 tokens,
    each preceded by a BOS token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (folder / "heldout.txt").read_text("utf-8")
    windows = heldout_windows(tokenizer, text, length=1024)
    cross_entropy: Callable[..., torch.Tensor] = torch.nn.functional.cross_entropy
    total = 0.0
    for batch in windows.split(8):
        logits = model(batch[:, :-1].to(device)).logits.float()
        total += float(
            cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(device), reduction="sum")
        )
    tokens = windows[:, 1:].numel()
    bytes_per_token = len(text.encode()) / len(tokenizer.encode(text, add_special_tokens=False).ids)
    return total / tokens, total / tokens / math.log(2) / bytes_per_token


def _user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
