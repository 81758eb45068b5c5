"""The steps of warm-up: the largest steps, which show how much memory steps take, and one step of every kind,
which loads the kernels that steps launch."""

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
"""Number of sequences in a step of one kind. The kernels that depend on this number are loaded by passes of
every size (`engine.warmup.run_padded_passes`)."""
_LENGTH = 8
"""Maximum length of these sequences in tokens."""


def largest_steps(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[StepPlan]:
    """Return the steps that take most memory. They need only one block of KV cache: they read meaningless
    values, but the right number of them.

    In order: prompts that fill the token budget, of which the first completes a sequence of maximum length,
    and after which every sequence samples in the full variant; the same prompts from their beginning, because
    an FP8 cache is then read in another way; a prompt whose tokens are scored; then steps in which every
    sequence takes part: each with a chunk; each with a decode; and one with a chunk while the others decode.
    """
    rows = list(range(max_num_seqs))
    setups = [SlotSetup(row, _EVERY_NUMBER, 0, 1, [0]) for row in rows]
    longest = max(1, max_model_len - 1)
    deep = _prompts(max_num_seqs, max_num_batched_tokens, longest)
    deep[0] = Chunk(0, max(0, longest - len(deep[0].token_ids)), deep[0].token_ids, rows)
    # Decodes share the pool: their total length is about that of the longest sequence or of a step's budget.
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
    return plans + growing[: max_model_len - length]  # the longest that a sequence may grow


def every_kind(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> list[StepPlan]:
    """Return one step of every kind, with a few sequences each, all using block 0. The kinds are: prompts
    that end, alone, together with decodes, and with several samples; prompts that continue; decodes alone;
    each of these with every sampling variant; prompts whose tokens are scored; copied and cleared blocks; and
    the full token budget. Returns no steps if no sequence, or no step, may be long enough."""
    if max_model_len < _LENGTH or max_num_batched_tokens < 2:
        return []
    # The first sequence may have two tokens, because each of the others has only one.
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
    # For a single row, torch uses other kernels to sort and to split tensors.
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
    """Return the first chunks of prompts, of at most `longest` tokens each, until they fill the token budget
    or take every sequence. The prompts continue after these chunks."""
    left, chunks = max_num_batched_tokens, list[Chunk]()
    while left and len(chunks) < max_num_seqs:
        count = min(left, longest)
        chunks.append(Chunk(len(chunks), 0, [0] * count, []))
        left -= count
    return chunks
