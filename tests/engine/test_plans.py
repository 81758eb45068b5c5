"""Tests that a step's plan fits into a frame."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import UnsupportedError
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.plan_channel import MAX_PLAN_BYTES, check_plan_size, largest_plan_bytes
from engine.scheduling.admission import MAX_SETUP_NUMBERS
from engine.wire import MAX_FRAME_BYTES

LARGE = (1 << 32) - 1
EVERYTHING = SamplingParams(
    max_tokens=LARGE,
    temperature=0.7,
    top_k=LARGE,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={},
    seed=(1 << 63) - 1,
    min_tokens=LARGE,
    ignore_eos=True,
    logprobs=LARGE,
    prompt_logprobs=LARGE,
)


def test_no_plan_exceeds_the_computed_upper_bound() -> None:
    rows, length, tokens, blocks = 1000, 3 * BLOCK_TOKENS, 4000, 50_000
    bound = largest_plan_bytes(
        max_num_seqs=rows, max_model_len=length, max_num_batched_tokens=tokens, kv_blocks=blocks
    )
    lists = MAX_FRAME_BYTES + 5 * length
    plan = StepPlan(
        LARGE,
        [SlotSetup(LARGE, EVERYTHING, LARGE, LARGE, [], [(LARGE, LARGE)])] * rows,
        [(LARGE, LARGE, LARGE)] * (rows * 3),
        [(LARGE, LARGE)] * rows,
        [LARGE] * rows,
        [Chunk(LARGE, LARGE, [LARGE] * (tokens // rows), [LARGE], LARGE, LARGE)] * rows,
        [LARGE] * blocks,
    )
    assert len(msgspec.msgpack.encode(plan)) < bound - lists
    # The bound on the lengths of the lists also holds for a single sequence of any length.
    assert len(msgspec.msgpack.encode([LARGE] * MAX_SETUP_NUMBERS)) < lists


def test_sizes_whose_plans_exceed_a_frame_are_refused_with_a_remedy() -> None:
    check_plan_size(max_num_seqs=1024, max_model_len=131_072, max_num_batched_tokens=8192, kv_blocks=100_000)
    with pytest.raises(
        UnsupportedError, match=rf"max_num_seqs is 4096 and max_model_len is 999999: .* {MAX_PLAN_BYTES} "
    ):
        check_plan_size(
            max_num_seqs=4096, max_model_len=999_999, max_num_batched_tokens=8192, kv_blocks=100_000
        )
