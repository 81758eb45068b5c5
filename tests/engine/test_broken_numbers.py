"""Tests of non-finite values, with a real engine on the CPU. The affected sequence ends with an error.
Neither other sequences in the batch nor sequences that later reuse its blocks are affected."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams, Submit, pack_tokens
from tests.engine.tiny import TINY

POISON = 99
"""A token whose embedding is NaN."""
GREEDY = SamplingParams(max_tokens=20)
PROMPTS = [[(5 * place + family) % 90 + 3 for place in range(70)] for family in range(4)]


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    made = LocalEngine(
        ReplicaSpec(
            replica="tiny-0",
            model_path=str(tmp_path),
            load_format="dummy",
            device="cpu",
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_model_len=128,
            kv_blocks=10,
            threads=1,
        )
    )
    with torch.inference_mode():
        made.runner.decoder.embedding[POISON] = float("nan")
    return made


def test_a_non_finite_sequence_ends_with_an_error_and_no_other_is_affected(engine: LocalEngine) -> None:
    expected = [engine.generate([prompt], GREEDY)[0][0].token_ids for prompt in PROMPTS]
    # The non-finite value is near the end of the second block. The next sequence in this block reads that
    # position before it writes to the position.
    poisoned = [*PROMPTS[0], *PROMPTS[3][:50], POISON, 4]
    for _ in range(5):
        answers = engine.generate([PROMPTS[1], poisoned, PROMPTS[2]], GREEDY)
        assert answers[1][0].finish_reason == "error"
        assert "computed NaN or infinity" in (answers[1][0].error or "")
        assert [answers[0][0].token_ids, answers[2][0].token_ids] == [expected[1], expected[2]]
        engine.scheduler.check()
        # The pool has only ten blocks, so these requests reuse the blocks of the poisoned prompt.
        again = engine.generate(PROMPTS, GREEDY)
        assert [answer[0].token_ids for answer in again] == expected
    assert engine.core.gauges().blocks_used == 0
    assert sum(entry.finish_reason == ["error"] for entry in engine.finished) == 5
    engine.close()


def test_only_an_invalid_submission_is_refused_and_a_non_finite_one_is_a_failure(engine: LocalEngine) -> None:
    """A client must not repeat an invalid request, but may repeat a request that failed in the engine."""
    prompts = {1: [*PROMPTS[0][:8], POISON, 4], 2: [*PROMPTS[0][:8], engine.runner.spec.max_model_len * 10]}
    for handle, prompt in prompts.items():
        submit = Submit(handle=handle, request_id=f"r{handle}", prompt=pack_tokens(prompt), sampling=GREEDY)
        engine.scheduler.add("front", submit)
    last = {}
    while engine.scheduler.has_work:
        last |= {output.handle: output for output in engine.core.step().outputs.get("front", [])}
    assert {handle: (one.finish_reason, one.token_ids) for handle, one in last.items()} == {
        1: ("error", []),
        2: ("error", []),
    }
    assert {handle: one.refused for handle, one in last.items()} == {1: False, 2: True}
    assert "NaN or infinity" in (last[1].error or "") and "prompt contains 1280" in (last[2].error or "")
    engine.close()


def test_a_long_prompt_ends_at_its_first_non_finite_chunk_and_leaves_the_prefix_cache(
    engine: LocalEngine,
) -> None:
    """A NaN can reach earlier tokens of the same chunk, although those tokens do not attend to the token that
    produced the NaN: masked values are multiplied by zero, and zero times NaN is NaN."""
    short = LocalEngine(msgspec.structs.replace(engine.runner.spec, max_num_batched_tokens=80))
    with torch.inference_mode():
        short.runner.decoder.embedding[POISON] = float("nan")
    prompt = PROMPTS[0][:70]
    (expected,) = engine.generate([prompt], GREEDY)
    # The first chunk has 80 tokens: the first block, and the following tokens up to the poison token.
    broken = [*prompt, POISON, *PROMPTS[1][:40]]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for salt, n, asked in (("a", 1, GREEDY), ("b", 3, GREEDY), ("c", 1, scored)):
        first = Submit(
            handle=1, request_id="b", prompt=pack_tokens(broken), sampling=asked, n=n, cache_salt=salt
        )
        short.scheduler.add("front", first)
        told = [output for _ in range(3) for output in short.core.step().outputs.get("front", [])]
        assert [output.finish_reason for output in told] == ["error"] * n
        assert "NaN or infinity at position 80" in (told[0].error or "")
        (found,) = short.generate([prompt], GREEDY, cache_salt=salt)
        assert found[0].token_ids == expected[0].token_ids
        short.scheduler.check()
    short.close()


def test_scoring_a_non_finite_prompt_is_an_error_that_does_not_affect_the_next_owners_of_its_blocks(
    engine: LocalEngine,
) -> None:
    expected = [engine.generate([prompt], GREEDY)[0][0].token_ids for prompt in PROMPTS]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    poisoned = [*PROMPTS[0], *PROMPTS[3][:50], POISON, 4]
    for salt in ("a", "b"):
        short = SamplingParams(max_tokens=2)
        answers = engine.generate(
            [poisoned, PROMPTS[1][:60], poisoned], [scored, short, scored], cache_salt=salt
        )
        assert [answer[0].finish_reason for answer in answers] == ["error", "length", "error"]
        assert "computed NaN or infinity" in (answers[0][0].error or "")
        again = engine.generate(PROMPTS, GREEDY, cache_salt=salt)
        assert [answer[0].token_ids for answer in again] == expected
    engine.close()


def test_a_bias_that_bans_every_token_ends_the_sequence_with_an_error(engine: LocalEngine) -> None:
    banned = SamplingParams(max_tokens=5, logit_bias=dict.fromkeys(range(157), float("-inf")))
    engine.generate([PROMPTS[0]], GREEDY)
    (answer,) = engine.generate([PROMPTS[0]], banned)
    assert (answer[0].finish_reason, answer[0].token_ids) == ("error", [])
    # The blocks that the sequence shares with other requests are finite, and stay in the prefix cache.
    (answer,) = engine.generate([PROMPTS[0]], GREEDY)
    assert (answer[0].finish_reason, answer[0].cached_tokens) == ("length", 64)
    engine.close()


def test_blocks_of_a_cancelled_non_finite_prompt_do_not_affect_their_next_owners(engine: LocalEngine) -> None:
    """The engine never detects the NaN, because the prompt is cancelled during prefill or before a sampled
    token is read."""
    expected = [engine.generate([prompt], GREEDY)[0][0].token_ids for prompt in PROMPTS]
    poisoned = [*PROMPTS[0], *PROMPTS[3][:50], POISON, 4]
    for steps in (1, 2):
        for handle in range(2):
            request = Submit(
                handle=handle,
                request_id=f"cancelled-{handle}",
                prompt=pack_tokens(poisoned),
                sampling=GREEDY,
                cache_salt=f"cancelled-{handle}",
            )
            engine.scheduler.add("front", request)
        for _ in range(steps):
            engine.core.step()
        engine.scheduler.cancel_origin("front")
        again = engine.generate(PROMPTS, GREEDY)
        assert [answer[0].token_ids for answer in again] == expected
    engine.close()
