"""Tests that with FP8 weights and an FP8 cache, batching and splitting requests changes no bit of an output.

Activations are quantised per token, and the cache per token and head, so no quantisation depends on the
batch. Only the last bits of sums depend on the shapes of tensors. If a sum lies on the boundary between two
e4m3 values, that difference grows to a step of e4m3. These tests therefore compute sums in float64 and round
them once to float32, which makes them equal for every shape. Every token and every log probability must then
be bitwise equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import reference
from tests.engine.test_engine_equality import LENGTHS, Alone, Answer, Ask, Build, engines_of, prompt, serve
from tests.engine.tiny import TINY

KV = {"kv_cache_dtype": "fp8"}
BOTH = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module", autouse=True)
def sums_in_float64() -> Iterator[None]:
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options).to(q.dtype)

    exact = {"linear": linear, "scaled_dot_product_attention": attention}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "F", SimpleNamespace(**{**vars(F), **exact}))
        patch.setattr(reference, "_has_packed_linear", lambda: False)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module", params=[KV, BOTH], ids=["KV", "weights and KV"])
def held(request: pytest.FixtureRequest) -> dict[str, str]:
    form: dict[str, str] = request.param
    return form


@pytest.fixture(scope="module")
def alone(model: Path, held: dict[str, str]) -> Iterator[Alone]:
    references = Alone(model, **held)
    yield references
    references.close()


@pytest.fixture
def build(model: Path, held: dict[str, str]) -> Iterator[Build]:
    with engines_of(model, **held) as make:
        yield make


def expect_the_same(answers: list[list[Answer]], asks: list[Ask], alone: Alone) -> None:
    for samples, ask in zip(answers, asks, strict=True):
        reference_answer = alone.answer(ask)
        for answer in samples:
            assert answer.token_ids == reference_answer.token_ids
            assert answer.logprobs == reference_answer.logprobs
        if ask.scored:
            assert samples[0].prompt_logprobs is not None
            assert samples[0].prompt_logprobs == reference_answer.prompt_logprobs


def test_the_engine_runs_in_fp8(model: Path, alone: Alone, held: dict[str, str]) -> None:
    plain = Alone(model)
    ask = Ask(prompt(65), 2)
    found, exact = alone.answer(ask).logprobs[0], plain.answer(ask).logprobs[0]
    plain.close()
    assert 1e-4 < abs(found.logprob - exact.logprob) < 0.3


@pytest.mark.parametrize("overlap", [False, True])
def test_fp8_outputs_do_not_depend_on_the_batch(build: Build, alone: Alone, overlap: bool) -> None:
    asks = [Ask(prompt(length, length), 12) for length in LENGTHS]
    expect_the_same(serve(build(overlap=overlap), asks), asks, alone)


@pytest.mark.parametrize("max_num_batched_tokens", [3, 16, 63, 64, 65, 130])
def test_fp8_outputs_do_not_depend_on_the_chunk_size(
    build: Build, alone: Alone, max_num_batched_tokens: int
) -> None:
    asks = [Ask(prompt(length, length), 6, scored=length > 64) for length in (65, 129, 200)]
    expect_the_same(
        serve(build(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3), asks), asks, alone
    )


@pytest.mark.parametrize("hit", [64, 128])
def test_fp8_outputs_are_the_same_after_a_prefix_hit(build: Build, alone: Alone, hit: int) -> None:
    engine = build()
    serve(engine, [Ask(prompt(hit + 1), 1)])
    asks = [Ask(prompt(hit) + prompt(length, length), 8) for length in (1, 30, 64)]
    answers = serve(engine, asks)
    assert [samples[0].cached_tokens for samples in answers] == [hit] * 3
    expect_the_same(answers, asks, alone)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_fp8_outputs_are_the_same_through_preemptions(build: Build, alone: Alone, prefix_cache: bool) -> None:
    engine = build(kv_blocks=6, max_num_seqs=4, prefix_cache=prefix_cache)
    asks = [Ask(prompt(60, family), 100, priority=family % 2) for family in range(4)]
    answers = serve(engine, asks)
    assert engine.core.gauges().preemptions >= 2
    expect_the_same(answers, asks, alone)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_fp8_samples_that_share_the_prompts_blocks_have_the_outputs_of_single_requests(
    build: Build, alone: Alone, length: int
) -> None:
    asks = [Ask(prompt(length, length), 20, n=3), Ask(prompt(40, 1), 10)]
    expect_the_same(serve(build(), asks), asks, alone)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_outputs_are_the_same_in_random_traffic(build: Build, alone: Alone, seed: int) -> None:
    draw = random.Random(seed)
    engine = build(
        max_num_seqs=draw.choice([2, 4, 8]),
        max_num_batched_tokens=draw.choice([8, 40, 100]),
        kv_blocks=draw.choice([6, 9]),
        overlap=draw.random() < 0.5,
    )
    asks = [
        Ask(
            prompt(draw.choice([10, 64, 70, 128]), draw.randrange(3)),
            draw.choice([1, 5, 40]),
            n=draw.choice([1, 1, 2, 3]),
            priority=draw.randrange(4),
            scored=draw.random() < 0.2,
        )
        for _ in range(12)
    ]
    expect_the_same(serve(engine, asks, lambda: draw.choice([0, 0, 1, 5])), asks, alone)
