"""Tests, with the real engine on the CPU, that greedy tokens do not depend on other requests or on how a
request is computed: batch, chunk size, prefix hits, preemption, number of samples, and overlap. Each test
runs in float32, with an FP8 cache, and with FP8 weights and an FP8 cache.

The last bits of sums depend on the shapes of tensors. In float32, a sequence may therefore diverge from its
reference, but only where the gap between the top two tokens is below NEAR_TIE. Log probabilities are compared
too, because they reveal wrong keys or values that are too small to change a token.

With FP8, activations are quantised per token, and the cache per token and head, so quantisation does not
depend on the batch. But if a sum lies close to the boundary between two e4m3 values, a difference in its last
bit grows to a whole step of e4m3. The tests with FP8 therefore compute sums in float64 and round them once to
float32, so that the sums are equal for every shape. Every token and every log probability must then be
bitwise equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.generate import LocalEngine
from engine.messages import Output, ReplicaSpec, SamplingParams, Submit, TokenLogprob, pack_tokens
from kernels import reference, reference_attention
from tests.engine.tiny import TINY

NEAR_TIE = 1e-4
"""Maximum difference between the top two log probabilities that counts as a near-tie, in nats."""
LOGPROB_ERROR = 1e-3
VOCAB = TINY["vocab_size"]
FLOAT32: dict[str, str] = {}
FP8_CACHE = {"kv_cache_dtype": "fp8"}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@dataclass
class Ask:
    prompt: list[int]
    max_tokens: int
    n: int = 1
    priority: int = 1
    scored: bool = False
    """Whether prompt logprobs are requested."""


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    finish_reason: str = ""


Build = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module", params=[FLOAT32, FP8_CACHE, FP8], ids=["float32", "FP8 cache", "FP8"])
def form(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Settings that determine the precision of the engines. With FP8, sums are computed in float64."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options).to(q.dtype)

    exact = {"linear": linear, "scaled_dot_product_attention": attention}
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            for module in (reference, reference_attention):
                patch.setattr(module, "F", SimpleNamespace(**{**vars(F), **exact}))
            patch.setattr(reference, "_has_packed_linear", lambda: False)
        yield request.param


@pytest.fixture
def build(model: Path, form: dict[str, str]) -> Iterator[Build]:
    """A function that creates engines for the model. The engines are closed at the end."""
    engines: list[LocalEngine] = []

    def make(**changes: object) -> LocalEngine:
        sizes = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "max_model_len": 320,
            "kv_blocks": 64,
            **form,
            **changes,
        }
        spec = ReplicaSpec(
            replica="tiny-0", model_path=str(model), load_format="dummy", device="cpu", threads=1, **sizes
        )
        engines.append(LocalEngine(spec))
        return engines[-1]

    try:
        yield make
    finally:
        for engine in engines:
            engine.close()


class Alone:
    """Reference outputs, which are cached for later tests. For a reference, a request runs alone in an empty
    engine, without chunking and without cached blocks."""

    def __init__(self, model: Path, **changes: str) -> None:
        self._engine = LocalEngine(
            ReplicaSpec(
                replica="alone-0",
                model_path=str(model),
                load_format="dummy",
                device="cpu",
                max_num_seqs=1,
                max_num_batched_tokens=512,
                max_model_len=320,
                kv_blocks=8,
                prefix_cache=False,
                overlap=False,
                threads=1,
                **changes,  # type: ignore[arg-type]
            )
        )
        self.exact = bool(changes)
        """Whether answers must be bitwise equal to the reference outputs."""
        self._known: dict[tuple[int, ...], Answer] = {}

    def answer(self, ask: Ask) -> Answer:
        key = (ask.max_tokens, *ask.prompt)
        if key not in self._known:
            reference = Ask(ask.prompt, ask.max_tokens, scored=True)
            ((self._known[key],),) = serve(self._engine, [reference])
        return self._known[key]

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(scope="module")
def alone(model: Path, form: dict[str, str]) -> Iterator[Alone]:
    references = Alone(model, **form)
    yield references
    references.close()


def serve(engine: LocalEngine, asks: list[Ask], arrive: Callable[[], int] = lambda: 0) -> list[list[Answer]]:
    """Submit the requests, run them to completion, and check the invariants at every step. `arrive()` returns
    the number of steps between one request and the next."""
    core = engine.core
    answers = [[Answer() for _ in range(ask.n)] for ask in asks]

    def step() -> None:
        for output in core.step().outputs.get("test", []):
            take(answers[output.handle][output.sample], output)
        core.scheduler.check()

    for handle, ask in enumerate(asks):
        sampling = SamplingParams(
            max_tokens=ask.max_tokens, logprobs=2, prompt_logprobs=0 if ask.scored else None
        )
        core.scheduler.add(
            "test",
            Submit(
                handle=handle,
                request_id=f"request-{handle}",
                prompt=pack_tokens(ask.prompt),
                n=ask.n,
                sampling=sampling,
                priority=ask.priority,
            ),
        )
        for _ in range(arrive()):
            step()
    while core.has_work:
        step()
    return answers


def take(answer: Answer, output: Output) -> None:
    assert not answer.finish_reason and not output.error
    answer.token_ids += output.token_ids
    answer.logprobs += output.logprobs or []
    answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
    answer.cached_tokens += output.cached_tokens or 0
    answer.finish_reason = output.finish_reason


def expect_equal(answer: Answer, reference: Answer, *, exact: bool) -> None:
    assert answer.finish_reason == reference.finish_reason == "length"
    if exact:
        assert (answer.token_ids, answer.logprobs) == (reference.token_ids, reference.logprobs)
        assert answer.prompt_logprobs in (None, reference.prompt_logprobs)
        return
    assert len(answer.token_ids) == len(reference.token_ids)
    if answer.prompt_logprobs is not None and reference.prompt_logprobs is not None:
        assert len(answer.prompt_logprobs) == len(reference.prompt_logprobs)
        for mine, other in zip(answer.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True):
            assert mine is not None and other is not None and mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=LOGPROB_ERROR)
    for place, (mine, other) in enumerate(zip(answer.logprobs, reference.logprobs, strict=True)):
        if mine.token_id != other.token_id:
            gap = other.top[0][1] - other.top[1][1]
            assert gap < NEAR_TIE, f"token {place} differs although the top two are {gap} nats apart"
            return
        assert mine.logprob == pytest.approx(other.logprob, abs=LOGPROB_ERROR), f"token {place}"


def expect_all_equal(answers: list[list[Answer]], asks: list[Ask], alone: Alone) -> None:
    for samples, ask in zip(answers, asks, strict=True):
        assert (samples[0].prompt_logprobs is not None) == ask.scored
        for answer in samples:
            expect_equal(answer, alone.answer(ask), exact=alone.exact)


def prompt(length: int, family: int = 0) -> list[int]:
    """Return a prompt. Prompts of one family have the same first tokens."""
    draw = random.Random(family)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 200]


@pytest.mark.parametrize("form", [FP8_CACHE, FP8], ids=["FP8 cache", "FP8"], indirect=True)
def test_the_engine_runs_in_fp8(model: Path, alone: Alone) -> None:
    plain = Alone(model)
    ask = Ask(prompt(65), 2)
    found, exact = alone.answer(ask).logprobs[0], plain.answer(ask).logprobs[0]
    plain.close()
    assert 1e-4 < abs(found.logprob - exact.logprob) < 0.3


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_do_not_depend_on_the_batch(build: Build, alone: Alone, overlap: bool) -> None:
    asks = [Ask(prompt(length, length), 12) for length in LENGTHS]
    expect_all_equal(serve(build(overlap=overlap), asks), asks, alone)


@pytest.mark.parametrize("max_num_batched_tokens", [3, 64, 130])
def test_outputs_do_not_depend_on_the_chunk_size(
    build: Build, alone: Alone, max_num_batched_tokens: int
) -> None:
    asks = [Ask(prompt(length, length), 6, scored=length > 64) for length in (65, 129, 200)]
    expect_all_equal(
        serve(build(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3), asks), asks, alone
    )


@pytest.mark.parametrize("hit", [64, 192])
def test_outputs_are_the_same_after_a_prefix_hit(build: Build, alone: Alone, hit: int) -> None:
    engine = build()
    serve(engine, [Ask(prompt(hit + 1), 1)])
    asks = [Ask(prompt(hit) + prompt(length, length), 8) for length in (1, 30, 64)]
    answers = serve(engine, asks)
    assert [samples[0].cached_tokens for samples in answers] == [hit] * 3
    expect_all_equal(answers, asks, alone)


@pytest.mark.parametrize(("overlap", "prefix_cache"), [(False, True), (True, False), (True, True)])
def test_outputs_are_the_same_through_preemptions(
    build: Build, alone: Alone, overlap: bool, prefix_cache: bool
) -> None:
    engine = build(kv_blocks=6, max_num_seqs=4, overlap=overlap, prefix_cache=prefix_cache)
    asks = [Ask(prompt(60, family), 100, priority=family % 2) for family in range(4)]
    answers = serve(engine, asks)
    assert engine.core.gauges().preemptions >= 2
    expect_all_equal(answers, asks, alone)


@pytest.mark.parametrize("length", [1, 64, 130])
def test_samples_that_share_the_prompt_have_the_outputs_of_single_requests(
    build: Build, alone: Alone, length: int
) -> None:
    asks = [Ask(prompt(length, length), 70, n=3), Ask(prompt(40, 1), 30)]
    expect_all_equal(serve(build(), asks), asks, alone)


@pytest.mark.parametrize("seed", [0, 3], ids=["overlap", "no overlap"])
def test_outputs_are_the_same_in_random_traffic(build: Build, alone: Alone, seed: int) -> None:
    draw = random.Random(seed)
    engine = build(
        max_num_seqs=draw.choice([2, 4, 8]),
        max_num_batched_tokens=draw.choice([8, 40, 100, 300]),
        kv_blocks=draw.choice([6, 9, 30]),
        overlap=draw.random() < 0.5,
        prefix_cache=draw.random() < 0.8,
    )
    asks = [
        Ask(
            prompt(draw.choice([10, 64, 70, 128, 150]), draw.randrange(3)),
            draw.choice([1, 5, 40, 90]),
            n=draw.choice([1, 1, 2, 3]),
            priority=draw.randrange(4),
            scored=draw.random() < 0.2,
        )
        for _ in range(12)
    ]
    expect_all_equal(serve(engine, asks, lambda: draw.choice([0, 0, 1, 5])), asks, alone)
