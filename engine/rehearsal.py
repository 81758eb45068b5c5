"""Steps that nobody asked for, before anybody asks: what they take is known then, and what they launch is
loaded."""

from __future__ import annotations

from engine.messages import Chunk, ReplicaSpec, RowSetup, SamplingParams, StepPlan
from engine.sampler import LOGPROB_ROWS

_EVERY_NUMBER = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    logprobs=20,
    allowed_tokens=b"\xff",
    bad_words=((0, 1),),
)
_BIAS = {0: 1.0}
_WAYS_TO_SAMPLE = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, logprobs=1),
    SamplingParams(max_tokens=1, logit_bias=_BIAS),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, logit_bias=_BIAS, min_tokens=9, stop_token_ids=(0,)),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=9),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logit_bias=_BIAS),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, presence_penalty=0.5),
    SamplingParams(max_tokens=1, temperature=1.0, allowed_tokens=b"\xff", bad_words=((0, 1), (2,))),
)
_ROWS = 8
"""That take part in a step of one kind. Products and attention, to whose kernels it matters how many do, are
loaded by themselves (`engine.kernel_loading`)."""
_LENGTH = 8
"""Tokens that these reach at most."""


def largest_steps(max_model_len: int, spec: ReplicaSpec) -> list[StepPlan]:
    """The steps that take most, over blocks of which there need be only one: what they read is nonsense, how
    much is not.

    The whole token budget in prompts, the first of which ends the longest sequence, after which every row
    samples in the full variant; the same from their beginning, where an FP8 cache is read in another way; a
    prompt whose tokens are scored; then steps in which every row takes part, with a chunk, decoding, and both
    beside each other.
    """
    rows = list(range(spec.max_rows))
    setups = [RowSetup(row, _EVERY_NUMBER, 0, 1, [0]) for row in rows]
    longest = max(1, max_model_len - 1)
    deep = _prompts(spec, longest)
    deep[0] = Chunk(0, max(0, longest - len(deep[0].token_ids)), deep[0].token_ids, rows)
    # Decodes share the pool: together they are about as long as the longest sequence or a step's budget.
    length = max(1, min(max_model_len - 2, max(max_model_len, spec.step_tokens) // spec.max_rows))
    chunks = [Chunk(row, length - 1, [0], [row]) for row in rows]
    scored = Chunk(0, 0, [0] * min(longest, spec.step_tokens, LOGPROB_ROWS), [], 20, 0)
    plans = [StepPlan(0, setups, [], [], [], deep)]
    if deep[0].start:
        plans.append(StepPlan(0, [], [], [], [], _prompts(spec, longest)))
    plans += [StepPlan(0, [], [], [], [], [scored]), StepPlan(0, [], [], [], [], chunks)]
    growing = [
        StepPlan(0, [], [], [], rows, []),
        StepPlan(0, [], [], [], rows[1:], [Chunk(0, length - 1, [0], [0])]),
    ]
    return plans + growing[: max_model_len - length]  # as far as a sequence may grow


def every_kind(max_model_len: int, spec: ReplicaSpec) -> list[StepPlan]:
    """A few rows in each kind of step (prompts that end, beside decodes, for several samples, and that go on;
    decodes alone) with each way to sample; prompts whose tokens are scored; copied and cleared blocks; and
    the whole token budget. All over block 0. Empty where no sequence, or no step, is long enough for that."""
    if max_model_len < _LENGTH or spec.step_tokens < 2:
        return []
    # Beside the others' one token, the first may have two.
    rows = list(range(min(spec.max_rows, spec.step_tokens - 1, _ROWS)))
    plans = []
    for params in _WAYS_TO_SAMPLE:
        setups = [RowSetup(row, params, 0, 1, [0]) for row in rows]
        plans += [
            StepPlan(0, setups, [], [], [], [Chunk(row, 0, [0], [row]) for row in rows]),
            StepPlan(0, [], [], [], rows[1:], [Chunk(0, 0, [0, 0], [])]),
            StepPlan(0, [], [], [], rows[2:], [Chunk(0, 2, [0, 0], rows[:2])]),
            StepPlan(0, [], [], [], rows, []),
        ]
    # Of one row alone torch sorts, and takes apart, in other ways.
    for logprobs in (0, 2):
        alone = RowSetup(0, SamplingParams(max_tokens=1, logprobs=logprobs), 0, 1, [])
        plans += [
            StepPlan(0, [alone], [], [], [], [Chunk(0, 0, [0], rows[:1])]),
            StepPlan(0, [], [], [], rows[:1], []),
        ]
    scored = Chunk(0, 0, [0, 0], rows[:1], prompt_logprobs=1)
    plans.append(StepPlan(0, [RowSetup(0, _WAYS_TO_SAMPLE[0], 0, 2, [])], [], [], rows[1:], [scored]))
    plans.append(StepPlan(0, [], [], [(0, 0)], [], _prompts(spec, max_model_len - 1), clears=[0]))
    return plans


def _prompts(spec: ReplicaSpec, longest: int) -> list[Chunk]:
    """Prompts of at most so many tokens that together take a step's budget, or every row; they go on."""
    left, chunks = spec.step_tokens, list[Chunk]()
    while left and len(chunks) < spec.max_rows:
        count = min(left, longest)
        chunks.append(Chunk(len(chunks), 0, [0] * count, []))
        left -= count
    return chunks
