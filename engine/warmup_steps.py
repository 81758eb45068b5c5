"""Creates the steps run by warm-up: the largest ones, to reserve their memory, and one of every kind, to load
the kernels."""

from __future__ import annotations

from engine.messages import SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
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
"""Number of sequences in each step that `every_kind` returns. Kernels that depend on this number are loaded
by `engine.warmup.run_padded_passes`, which runs passes of all sizes."""
_LENGTH = 8
"""Maximum length, in tokens, of the sequences in the steps that `every_kind` returns."""


def largest_steps(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[StepPlan]:
    """Return the steps that use the most memory. They need only one KV block, because memory use depends on
    the number of values read, not on the values themselves.

    In order, the steps contain:

    1. prompts that fill the token budget; the first prompt completes a sequence of maximum length, and every
      sequence samples with the full variant
    2. the same prompts from their beginning, for which another kernel reads an FP8 cache
    3. a prompt with prompt log probabilities
    4. a chunk of every sequence
    5. a decode of every sequence
    6. a chunk of one sequence and a decode of every other sequence
    """
    rows = list(range(max_num_seqs))
    setups = [SlotSetup(row, _EVERY_NUMBER, 0, 1, [0]) for row in rows]
    longest = max(1, max_model_len - 1)
    deep = _prompts(max_num_seqs, max_num_batched_tokens, longest)
    deep[0] = Chunk(0, max(0, longest - len(deep[0].token_ids)), deep[0].token_ids, rows)
    # All decodes share the KV pool. Limit their total length to about that of the longest sequence or of a
    # step's token budget.
    together = max(max_model_len, max_num_batched_tokens)
    length = max(1, min(max_model_len - 2, together // max_num_seqs))
    chunks = [Chunk(row, length - 1, [0], [row]) for row in rows]
    scored = Chunk(0, 0, [0] * min(longest, max_num_batched_tokens, LOGPROB_ROWS), [], 20, 0)
    plans = [StepPlan(0, setups, [], [], [], deep)]
    if deep[0].start:
        plans.append(StepPlan(0, [], [], [], [], _prompts(max_num_seqs, max_num_batched_tokens, longest)))
    plans += [StepPlan(0, [], [], [], [], [scored]), StepPlan(0, [], [], [], [], chunks)]
    growing = [
        StepPlan(0, [], [], [], rows, []),
        StepPlan(0, [], [], [], rows[1:], [Chunk(0, length - 1, [0], [0])]),
    ]
    # Drop steps that would exceed the maximum sequence length.
    return plans + growing[: max_model_len - length]


def every_kind(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[StepPlan]:
    """Return one step of every kind, each with a few sequences that all use block 0. For every sampling
    variant, the steps include prompts that are completed (alone, together with decodes, and with several
    samples), prompts that continue, and decodes alone. Other steps compute prompt log probabilities, copy and
    clear blocks, and use the full token budget. The list is empty if the maximum sequence length or the token
    budget is too small for these steps.
    """
    if max_model_len < _LENGTH or max_num_batched_tokens < 2:
        return []
    # Reserve one token of the budget, so that the first sequence can have two tokens and every other sequence
    # one.
    rows = list(range(min(max_num_seqs, max_num_batched_tokens - 1, _ROWS)))
    plans = []
    for params in _WAYS_TO_SAMPLE:
        setups = [SlotSetup(row, params, 0, 1, [0]) for row in rows]
        plans += [
            StepPlan(0, setups, [], [], [], [Chunk(row, 0, [0], [row]) for row in rows]),
            StepPlan(0, [], [], [], rows[1:], [Chunk(0, 0, [0, 0], [])]),
            StepPlan(0, [], [], [], rows[2:], [Chunk(0, 2, [0, 0], rows[:2])]),
            StepPlan(0, [], [], [], rows, []),
        ]
    # Use both several rows and a single row, because torch sorts and splits tensors with different kernels
    # for a single row.
    for logprobs in (0, 2):
        alone = SlotSetup(0, SamplingParams(max_tokens=1, logprobs=logprobs), 0, 1, [])
        plans += [
            StepPlan(0, [alone], [], [], [], [Chunk(0, 0, [0], rows[:1])]),
            StepPlan(0, [], [], [], rows[:1], []),
        ]
    scored = Chunk(0, 0, [0, 0], rows[:1], prompt_logprobs=1)
    plans.append(StepPlan(0, [SlotSetup(0, _WAYS_TO_SAMPLE[0], 0, 2, [])], [], [], rows[1:], [scored]))
    budget = _prompts(max_num_seqs, max_num_batched_tokens, max_model_len - 1)
    plans.append(StepPlan(0, [], [], [(0, 0)], [], budget, clears=[0]))
    return plans


def _prompts(max_num_seqs: int, max_num_batched_tokens: int, longest: int) -> list[Chunk]:
    """Return the first chunks of several prompts, with at most `longest` tokens each. They fill the token
    budget, unless every sequence gets a chunk before the budget is used up. All prompts continue after these
    chunks."""
    left, chunks = max_num_batched_tokens, list[Chunk]()
    while left and len(chunks) < max_num_seqs:
        count = min(left, longest)
        chunks.append(Chunk(len(chunks), 0, [0] * count, []))
        left -= count
    return chunks
