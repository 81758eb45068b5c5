"""Defines a step's plan, which rank 0 sends to every rank, and the tokens that the step samples.

All structs contain only plain data, which `engine.wire` encodes as msgpack. This module does not load torch.
"""

from __future__ import annotations

import msgspec

from engine.messages import SamplingParams, TokenLogprob


class SlotSetup(msgspec.Struct, array_like=True, frozen=True):
    """Assigns slots in the device tables to a new sequence and its forks. The slots' previous contents become
    invalid."""

    slot: int
    sampling: SamplingParams
    sample: int
    """The sample's index within its request. It is part of the key for the sampling noise."""
    prompt_tokens: int
    history: list[int]
    """The prompt and the output tokens known so far, if penalties need their counts, otherwise empty."""
    forks: list[tuple[int, int]] = []
    """(slot, sample) of each fork. Forks share all other fields of the setup, which are therefore sent only
    once."""

    recent: list[int] = []
    """The latest output tokens (at most MAX_BAD_WORD_TOKENS - 1) if the request has bad words, otherwise
    empty."""

    @property
    def members(self) -> list[tuple[int, int]]:
        """The (slot, sample) pairs of the sequence and its forks."""
        return [(self.slot, self.sample), *self.forks]


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A prefill chunk: consecutive tokens of a prompt, or of a preempted sequence being recomputed."""

    slot: int
    start: int
    """Position of the chunk's first token in the sequence."""
    token_ids: list[int]
    sample_slots: list[int]
    """Slots that sample from the logits of the chunk's last token: the sequence's slot and, with n > 1, those
    of its forks. Empty if the prompt continues after the chunk."""
    prompt_logprobs: int | None = None
    """Number of most likely alternatives whose log probabilities are returned for each prompt token that
    follows a token in the chunk. None disables prompt log probabilities."""
    next_token: int | None = None
    """The prompt token that follows the chunk. Set only if there is one and `prompt_logprobs` is set."""


class StepPlan(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """The complete plan of one step. Ranks that execute the same plans in the same order have identical
    device tables.

    A step applies `setups`, `blocks`, `shares`, `clears` and `copies`, in this order. Then it runs the
    forward pass over `decodes` and `chunks`. Finally, it samples a token for each slot in `decodes`, and then
    for each chunk's `sample_slots`. The input of a decode is the slot's last sampled token, at the slot's
    next position. Both values are stored in the device tables, and the step updates them.
    """

    step: int
    setups: list[SlotSetup]
    """Slots assigned in this step. Each slot occurs at most once."""
    blocks: list[tuple[int, int, int]]
    """New block table entries: (slot, index in the slot's block table, block id)."""
    copies: list[tuple[int, int]]
    """Blocks to copy before the forward pass writes to them (copy-on-write): (source, destination)."""
    decodes: list[int]
    """Slots of the decoding sequences."""
    chunks: list[Chunk]
    clears: list[int] = []
    """Blocks to fill with zeros, because a previous sequence left NaN or infinity in them: attention
    multiplies masked values by zero, and zero times NaN is NaN."""
    shares: list[tuple[int, int, list[int]]] = []
    """Block table entries that a prompt's samples share: (source slot, number of leading entries, slots to
    copy them to). A step applies `shares` after `blocks`, because `blocks` may contain entries of the source
    slot."""


class MemoryPlan(msgspec.Struct, tag="memory", array_like=True, frozen=True):
    """Instructs the other ranks to release or restore the memory of their weights and KV caches."""

    step: int
    """Number of the last step before the memory is released or restored."""
    asleep: bool
    """True to release the memory, False to restore it."""


RankPlan = StepPlan | MemoryPlan
"""Messages from rank 0 to the other ranks."""

LOWEST_LOGPROB = -9999.0
"""Lowest log probability that is reported. Lower and non-finite values are replaced with it."""

BAD_TOKEN = -1
"""Token id reported in place of a sampled token if the logits have no finite maximum, e.g. because the
weights are damaged or a value overflowed."""


class StepTokens(msgspec.Struct, array_like=True):
    """A step's results. Tokens and log probabilities have one entry per sampling slot, in plan order: decodes
    first, then chunks."""

    token_ids: list[int]
    """Sampled tokens, with BAD_TOKEN where no token could be sampled."""
    logprobs: list[TokenLogprob | None] | None
    """Log probabilities of the sampled tokens, or None if no slot requested them."""
    prompt_logprobs: dict[int, list[TokenLogprob]]
    """For each slot, one entry per token in the slot's chunk: the log probability of the next prompt
    token."""
    non_finite: list[int] = []
    """Slots whose chunk does not sample and has non-finite hidden states. A slot that samples reports
    BAD_TOKEN instead."""
    expert_choices: dict[int, list[int]] | None = None
    """For each layer, how often each expert has been chosen since the replica started. None if the step does
    not report the counts, or the model has no experts."""
