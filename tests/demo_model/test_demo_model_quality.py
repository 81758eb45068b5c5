"""Tests that FP8 preserves the shipped model's answers and its perplexity on held-out text, as a short
version of `scripts/quality`."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from engine.client import ReplicaGroup
from engine.messages import ReplicaInfo, ReplicaSpec, SamplingParams, Submit, pack_tokens
from engine.rank_messages import RankOutbound, Ready
from tests.demo_model.asking import DEMO, END, questions
from tests.demo_model.quality import BLOCK_FORMS, FORMS, MIN_KEPT, Score, held_out_windows, measure
from tests.engine.streaming_client import StreamingClient
from tests.forked import forked_ranks


def test_the_quality_loss_of_fp8_weights_and_cache_is_within_its_limit() -> None:
    """Uses 30 questions and 6 of 57 windows of text. docs/quantisation.md has the full results."""
    plain, *quantised = measure("cpu", "float32", asked=30, windows=6)
    assert (plain.right, plain.asked, plain.held_out_tokens) == (30, 30, 6 * 1024)
    for score, form in zip(quantised, FORMS[1:], strict=True):
        assert score.form == form.name
        assert score.token_change > 0.01, f"{form.name}: nothing is quantised"
        assert abs(score.perplexity_change) <= form.most_perplexity_change, form.name
        assert score.kept >= MIN_KEPT, form.name
        assert score.passes


def test_the_quality_loss_of_a_checkpoint_with_block_scales_is_within_its_limit() -> None:
    """The checkpoint is tested twice: with its block scales, and converted to one scale per output."""
    _, *blocks = measure("cpu", "float32", asked=20, windows=4, forms=(FORMS[0], *BLOCK_FORMS))
    assert [score.form for score in blocks] == [form.name for form in BLOCK_FORMS]
    for score in blocks:
        assert score.token_change > 0.01, f"{score.form}: nothing is quantised"
        assert score.passes
    assert blocks[0].perplexity != blocks[1].perplexity


def test_the_held_out_text_is_that_of_the_model_card() -> None:
    windows = held_out_windows()
    assert {len(window) for window in windows} == {1025}
    assert len(windows) == 57


def test_a_variant_with_too_much_quality_loss_fails() -> None:
    fine = Score(
        device="cpu",
        dtype="float32",
        form="FP8 weights",
        perplexity=12.6,
        perplexity_change=0.004,
        change_error=0.0005,
        most_perplexity_change=0.005,
        token_change=0.08,
        held_out_tokens=57 * 1024,
        right=199,
        asked=200,
        kept=0.995,
        same=180,
    )
    assert fine.passes
    assert not replace(fine, perplexity_change=0.0051).passes
    assert not replace(fine, perplexity_change=-0.0051).passes
    assert not replace(fine, kept=0.965).passes


@pytest.mark.system
def test_two_ranks_answer_with_fp8_weights_and_cache() -> None:
    """Uses real processes. Each rank has separate scales for its shards of the o and down projections."""
    prompts, expected = questions()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(END,))

    async def answers() -> tuple[ReplicaInfo, list[str]]:
        ready: asyncio.Future[ReplicaInfo] = asyncio.get_running_loop().create_future()

        def hear(rank: int, message: RankOutbound) -> None:
            if isinstance(message, Ready):
                ready.set_result(message.info)

        def ended(reason: str) -> None:
            if not ready.done():
                ready.set_exception(RuntimeError(reason))

        spec = ReplicaSpec(
            replica="demo-0",
            model_path=str(DEMO),
            device="cpu",
            quantization="fp8",
            kv_cache_dtype="fp8",
            tensor_parallel_size=2,
            kv_blocks=256,
            threads=1,
        )
        with forked_ranks():
            group = ReplicaGroup.launch(spec, hear, ended)
        try:
            async with asyncio.timeout(240):
                info = await ready
                client = StreamingClient(
                    socket.socket(fileno=group.attach_front("front-0")), lambda disconnected: None
                )

                async def answer(name: int) -> str:
                    submit = Submit(
                        handle=client.next_handle(),
                        request_id=f"question-{name}",
                        prompt=pack_tokens(prompts[name]),
                        sampling=sampling,
                    )
                    ids = [token async for output in client.generate(submit) for token in output.token_ids]
                    return tokenizer.decode(ids)

                return info, await asyncio.gather(*map(answer, range(0, 200, 20)))
        finally:
            await group.stop()

    info, said = asyncio.run(answers())
    assert (info.weights, info.kv_cache_dtype, info.tensor_parallel_size) == ("fp8", "fp8", 2)
    assert all(text.startswith(line) for text, line in zip(said, expected[::20], strict=True)), said
