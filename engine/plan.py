"""A step's plan, from rank 0 to every rank, and the tokens that the step sampled.

The structs are plain data, encoded as msgpack by `engine.wire`. This module does not load torch.
"""

from __future__ import annotations

import msgspec

from engine.messages import SamplingParams, TokenLogprob


class SlotSetup(msgspec.Struct, array_like=True, frozen=True):
    """A sequence, and the forks that start with it, take slots of the device tables. The slots' previous
    contents become invalid."""

    slot: int
    sampling: SamplingParams
    sample: int
    """The sample's index in its request: part of the noise key."""
    prompt_tokens: int
    history: list[int]
    """Prompt and output tokens known so far if penalties need their counts; otherwise empty."""
    forks: list[tuple[int, int]] = []
    """(slot, sample) of each fork. The other fields apply to all forks and are sent once."""

    recent: list[int] = []
    """The last output tokens known so far (at most MAX_BAD_WORD_TOKENS - 1) if bad words need them; otherwise
    empty."""

    @property
    def members(self) -> list[tuple[int, int]]:
        """(slot, sample) of the sequence and of each fork."""
        return [(self.slot, self.sample), *self.forks]


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A slice of a prompt, or of a preempted sequence that is recomputed, with its tokens."""

    slot: int
    start: int
    """Position of the first token of the chunk."""
    token_ids: list[int]
    sample_slots: list[int]
    """Slots that sample from the last token's logits: none in the middle of a prompt; at its end the
    sequence's own slot and, with n > 1, those of its forks."""
    prompt_logprobs: int | None = None
    """k: return log probabilities, with the k best alternatives, of the prompt tokens that follow the
    chunk's."""
    next_token: int | None = None
    """With prompt_logprobs: the prompt token after the chunk, if there is one."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One complete step. Ranks that execute the same plans in the same order hold equal device tables.

    The step applies `setups`, `blocks`, `shares`, `clears` and `copies`, in this order. Then it runs the
    forward pass over `decodes` and `chunks`, and samples for `decodes` followed by each chunk's
    `sample_slots`. A decode feeds the slot's last sampled token at the slot's next position. Both are in the
    device tables, and the step updates them.
    """

    step: int
    setups: list[SlotSetup]
    """The setups of the step; each slot occurs at most once."""
    blocks: list[tuple[int, int, int]]
    """New entries of block tables: (slot, index in the slot's block table, block id)."""
    copies: list[tuple[int, int]]
    """Copy-on-write: (source, destination) blocks, copied before the forward pass writes."""
    decodes: list[int]
    """Slots that decode."""
    chunks: list[Chunk]
    clears: list[int] = []
    """Blocks to zero, because a previous sequence left NaN or infinity in them: attention multiplies masked
    values by zero, and zero times NaN is NaN."""
    shares: list[tuple[int, int, list[int]]] = []
    """Block table entries that samples of one prompt share: (source slot, number of leading entries, slots to
    which these entries are copied). Applied after `blocks`, which may contain entries of the source."""


LOWEST_LOGPROB = -9999.0
"""Reported in place of log probabilities that are lower or not finite."""

BAD_TOKEN = -1
"""Reported in place of a sampled token if the logits had no finite maximum (damaged weights or an
overflow)."""


class StepTokens(msgspec.Struct, array_like=True):
    """The results of a step: one entry per sampling slot of its plan, in the plan's order (decodes, then
    chunks)."""

    token_ids: list[int]
    """BAD_TOKEN if no token could be sampled."""
    logprobs: list[TokenLogprob | None] | None
    """None if no slot requested log probabilities."""
    prompt_logprobs: dict[int, list[TokenLogprob]]
    """By slot: log probabilities of the prompt tokens that follow a chunk's tokens."""
    non_finite: list[int] = []
    """Slots of chunks without sampling whose hidden states are not finite. Sampling chunks report BAD_TOKEN
    instead."""
