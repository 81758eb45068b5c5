"""Compares the demo model's answers on two devices, and with `transformers`. The tokens must be the same, or
diverge at a near tie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from engine.generate import GeneratedSample
from engine.messages import SamplingParams, TokenLogprob
from tests.demo_model.asking import DEMO, END, engine, generated, questions

NEAR_TIE = 0.25
"""Below this gap between the reference's top two tokens, a device may choose the second one. The gap is the
same in log probabilities (nats) and in logits.

The value is two units in the last place of the largest logit. bfloat16 has 8 significant bits, so numbers
from 16 to 32 are 1/8 apart, and the answers' largest logit is 24.75. Rounding can move each of two logits to
a neighbouring number.

Measured on a CPU, bfloat16 changes the answers' gaps by 0.034 (median) and 0.256 (maximum) compared with
float32. It changes the top token at 211 of 20,480 held-out positions, where the gap is at most 0.094. The
batch and the number of threads do not change a single bit. The smallest gap in the answers is 3.9, because
the model has memorised the questions. If the answers of a device diverge at such a gap, the cause is
therefore not rounding.
"""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The position at which an answer first differs from the reference."""

    question: int
    place: int
    """Index of the diverging token in the answer."""
    gap: float
    """Gap between the reference's top two tokens at the diverging position."""
    second: bool
    """Whether the device under test chose the reference's second-best token."""

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE and self.second


@dataclass(frozen=True, slots=True)
class Parity:
    """A device's greedy answers, compared with the reference's answers."""

    device: str
    dtype: str
    asked: int
    same: int
    """Number of answers that are identical to the reference's."""
    tokens: int
    """Number of tokens in the answers. Tokens after a divergence are not counted."""
    min_gap: float
    """Smallest gap between the reference's top two tokens, over all counted tokens."""
    most_moved: float
    """Largest difference between the top-two gap on the device under test and the gap in the reference."""
    divergences: list[Divergence]

    @property
    def passes(self) -> bool:
        return all(divergence.is_near_tie for divergence in self.divergences)

    def summary(self) -> str:
        """Return the result in one line."""
        widest = max((divergence.gap for divergence in self.divergences), default=None)
        parted = "none" if widest is None else f"at most {widest:.4f}"
        return (
            f"{self.device} {self.dtype}: {self.same} of {self.asked} answers match the CPU's exactly "
            f"({self.tokens} tokens); gaps at first divergences: {parted} (allowed: below {NEAR_TIE}); "
            f"smallest gap {self.min_gap:.4f}, gaps moved by at most {self.most_moved:.4f}"
            f"{'' if self.passes else '  FAILS'}"
        )


def measure(
    device: str, dtype: str = "bfloat16", reference_dtype: str = "bfloat16", model: Path = DEMO
) -> Parity:
    """Compare a device's answers to the 200 frozen questions with the reference, which is the CPU."""
    reference = generated(engine("cpu", reference_dtype, model=model), logprobs=2)
    return compare(device, dtype, generated(engine(device, dtype, model=model), logprobs=2), reference)


def compare(
    device: str, dtype: str, found: list[GeneratedSample], reference: list[GeneratedSample]
) -> Parity:
    """Compare the answers of `device` in `dtype` with the reference's answers. Both must include the log
    probabilities of the top two tokens. Raises ValueError if the reference's answer ends before the device's
    answer does, because the gap between the top two tokens is then unknown at that position."""
    divergences, gaps, moved = [], [], []
    for question, (mine, theirs) in enumerate(zip(found, reference, strict=True)):
        pairs = enumerate(zip_longest(mine.token_ids, theirs.token_ids))
        parted = next((place for place, (token, other) in pairs if token != other), None)
        if parted is not None:
            divergences.append(_divergence(question, parted, mine, theirs))
        for ours, known in zip(mine.logprobs[:parted], theirs.logprobs[:parted], strict=True):
            gaps.append(_gap(known))
            now = dict(ours.top)
            if now.keys() == dict(known.top).keys():
                (best, _), (second, _) = known.top
                moved.append(abs(now[best] - now[second] - gaps[-1]))
    return Parity(
        device=device,
        dtype=dtype,
        asked=len(reference),
        same=len(reference) - len(divergences),
        tokens=len(gaps),
        min_gap=min(gaps, default=0.0),
        most_moved=max(moved, default=0.0),
        divergences=divergences,
    )


def transformers_parity(model: Path, asked: int | None = None) -> float:
    """Compare the engine's answers in float32 on the CPU with `transformers`. Returns the largest difference
    between the two log probabilities of any answer token. `asked` is the number of questions (all if None).
    Raises AssertionError if a token is not the one that `transformers` ranks first."""
    from transformers import AutoModelForCausalLM

    sampling = SamplingParams(max_tokens=100, stop_token_ids=(END,), logprobs=1)
    prompts = questions()[0][:asked]
    started = engine("cpu", "float32", model=model)
    answers = [sample for (sample,) in started.generate(prompts, sampling)]
    started.close()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    largest = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        # If the BOS token equalled the padding token, `generate` would exclude it from attention.
        tokens = torch.tensor([prompt + answer.token_ids])
        with torch.inference_mode():
            scores = reference(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == answer.token_ids, f"prompt {prompt}"
        found = torch.tensor([known.logprob for known in answer.logprobs])
        wanted = scores[torch.arange(len(found)), answer.token_ids]
        largest = max(largest, (found - wanted).abs().max().item())
    return largest


def _divergence(question: int, place: int, mine: GeneratedSample, theirs: GeneratedSample) -> Divergence:
    if place == len(theirs.token_ids):
        raise ValueError(f"question {question}: the reference ends after {place} tokens, the other continues")
    known = theirs.logprobs[place]
    token = mine.token_ids[place] if place < len(mine.token_ids) else None
    return Divergence(question, place, _gap(known), second=token in dict(known.top))


def _gap(token: TokenLogprob) -> float:
    (_, best), (_, second) = token.top
    return best - second
