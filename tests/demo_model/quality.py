"""Measures how much quality the shipped model loses through quantisation. The unquantised model and each
quantised variant get the same questions and the same held-out text, and run in the real engine."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams
from tests.demo_model.asking import DEMO, END, questions
from tests.demo_model.block_checkpoint import write_blocks

BEGIN = 0
"""The demo model's BOS token."""
WINDOW = 1024
"""Number of held-out tokens that are scored together after a BOS token, as in the model card."""
MAX_ANSWER_TOKENS = 100
UNQUANTISED = "unquantised"

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Form:
    """A quantised variant of the model, with the maximum quality loss that is accepted for it."""

    name: str
    weights: str
    kv_cache_dtype: str
    most_perplexity_change: float
    """Maximum relative change of the perplexity on held-out text: 0.005 is half a percent."""
    blocks: bool = False
    """Whether the model is first written as an FP8 checkpoint with one scale per block."""


FORMS = (
    Form(UNQUANTISED, "auto", "auto", 0.0),
    Form("FP8 weights", "fp8", "auto", 0.005),
    Form("FP8 KV", "auto", "fp8", 0.003),
    Form("FP8 weights and KV", "fp8", "fp8", 0.008),
    Form("FP8 blocks", "auto", "auto", 0.005, blocks=True),
    # Converted to one scale per output. This rounds a second time, so twice the loss is accepted.
    Form("FP8 blocks, converted", "fp8", "auto", 0.010, blocks=True),
)
MIN_KEPT = 0.97
"""Minimum fraction of the unquantised model's correct answers that the variant must also answer correctly."""


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of one variant in one dtype, compared with the unquantised model in that dtype."""

    device: str
    dtype: str
    form: str
    perplexity: float
    perplexity_change: float
    """Change relative to the unquantised model's perplexity."""
    change_error: float
    """Standard error of `perplexity_change`, over windows of text."""
    most_perplexity_change: float
    token_change: float
    """Mean absolute change of a held-out token's log probability, in nats."""
    held_out_tokens: int
    right: int
    """Number of the `asked` answers that begin with the expected sentence."""
    asked: int
    kept: float
    """Fraction of the unquantised model's correct answers that are still correct."""
    same: int
    """Number of answers that are identical to the unquantised model's."""

    @property
    def passes(self) -> bool:
        return abs(self.perplexity_change) <= self.most_perplexity_change and self.kept >= MIN_KEPT


@dataclass(slots=True)
class _Run:
    losses: list[list[float]]
    """Loss of each token in nats, by window."""
    answers: list[list[int]]
    right: list[bool]


def measure(
    device: str,
    dtype: str,
    *,
    asked: int | None = None,
    windows: int | None = None,
    model: Path = DEMO,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Score]:
    """Return the scores of FORMS. `asked` and `windows` are the numbers of questions and of windows of
    held-out text to use, selected at even intervals; None uses all. `model` is the folder of a model with the
    demo model's tokenizer."""
    first: _Run | None = None
    scores = []
    for form in FORMS:
        progress(f"{device} {dtype}: {form.name}")
        run = _run(model, device, dtype, form, asked, windows)
        first = first or run
        scores.append(_score(device, dtype, form, run, first))
    return scores


@functools.cache
def held_out_windows() -> list[list[int]]:
    """Return `heldout.txt` in windows of WINDOW tokens, each preceded by a BOS token. An incomplete last
    window is left out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode((DEMO / "heldout.txt").read_text("utf-8"), add_special_tokens=False).ids
    count = len(ids) // WINDOW
    return [[BEGIN, *ids[index * WINDOW : (index + 1) * WINDOW]] for index in range(count)]


def _run(model: Path, device: str, dtype: str, form: Form, asked: int | None, windows: int | None) -> _Run:
    if not form.blocks:
        return _run_folder(model, device, dtype, form, asked, windows)
    with tempfile.TemporaryDirectory(prefix="appliance-blocks-") as folder:
        written = write_blocks(model, Path(folder) / "model")
        return _run_folder(written, device, dtype, form, asked, windows)


def _run_folder(
    model: Path, device: str, dtype: str, form: Form, asked: int | None, windows: int | None
) -> _Run:
    from tokenizers import Tokenizer

    prompts, expected = questions()
    prompts, expected = _spread(prompts, asked), _spread(expected, asked)
    engine = LocalEngine(
        ReplicaSpec(
            replica="quality-0",
            model_path=str(model),
            device=device,
            dtype=dtype,
            quantization=form.weights,
            kv_cache_dtype=form.kv_cache_dtype,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            kv_blocks=2048,
        )
    )
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    greedy = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, stop_token_ids=(END,))
    texts = [
        samples[0].prompt_logprobs
        for samples in engine.generate(_spread(held_out_windows(), windows), scored)
    ]
    answers = [samples[0].token_ids for samples in engine.generate(prompts, greedy)]
    engine.close()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    said = [tokenizer.decode(ids) for ids in answers]
    return _Run(
        losses=[[-token.logprob for token in text or [] if token is not None] for text in texts],
        answers=answers,
        right=[text.startswith(sentence) for text, sentence in zip(said, expected, strict=True)],
    )


def _score(device: str, dtype: str, form: Form, run: _Run, first: _Run) -> Score:
    pairs = [
        list(zip(mine, theirs, strict=True)) for mine, theirs in zip(run.losses, first.losses, strict=True)
    ]
    tokens = sum(map(len, run.losses))
    mean = sum(map(sum, run.losses)) / tokens
    before = sum(map(sum, first.losses)) / tokens
    # The error is computed from the means of windows. Windows are far apart in the text, so their means are
    # nearly independent, unlike single tokens.
    changes = [sum(mine - theirs for mine, theirs in window) / len(window) for window in pairs]
    spread = sum((change - sum(changes) / len(changes)) ** 2 for change in changes)
    kept = sum(now for now, was in zip(run.right, first.right, strict=True) if was)
    return Score(
        device=device,
        dtype=dtype,
        form=form.name,
        perplexity=math.exp(mean),
        perplexity_change=math.expm1(mean - before),
        change_error=math.sqrt(spread / (len(changes) * max(1, len(changes) - 1))),
        most_perplexity_change=form.most_perplexity_change,
        token_change=sum(abs(mine - theirs) for window in pairs for mine, theirs in window) / tokens,
        held_out_tokens=tokens,
        right=sum(run.right),
        asked=len(run.right),
        kept=kept / max(1, sum(first.right)),
        same=sum(mine == theirs for mine, theirs in zip(run.answers, first.answers, strict=True)),
    )


def _spread(items: list[_Item], count: int | None) -> list[_Item]:
    """Return `count` items, selected at even intervals, or all items if `count` is None."""
    if count is None:
        return items
    return [items[index * len(items) // count] for index in range(count)]
