"""What sampling reads and what it offers: the seam between the engine's sampler and the kernels.

`kernels.sampling` is plain torch, for CPUs and as the oracle; `kernels.triton.sampling` needs no sort. Both
mean the same: the noise of `kernels.sampling`; penalties, then bias, then bans (`edit`); then, in rows that
draw, temperature, top-k, top-p, min-p, with ties with the last token that any of them keeps kept; the lowest
id on ties of the score. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

BAD_TOKEN = -1
"""Of a row whose largest logit is not a finite number."""

TEMPERATURE, NOISE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(7)
"""Columns of `Draws.floats`."""

Biases = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Edited row, token id (int64) and value (float32) of each biased token."""
Bans = tuple[torch.Tensor, torch.Tensor]
"""Edited row and token id (int64) of each banned token."""


class Variant(IntEnum):
    """Ways to sample, each of which serves the rows of those before it as well."""

    GREEDY = 0
    """The largest logit."""
    PLAIN = 1
    """Noise at a temperature."""
    FULL = 2
    """Among what top-k, top-p and min-p keep."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that sample now, and the tables where their parameters stand, all on the device."""

    slots: torch.Tensor
    """[sampling rows] integers: rows of the tables; -1: padding, which reads nothing and gives BAD_TOKEN."""
    positions: torch.Tensor
    """[sampling rows] int64: where the sampled tokens will stand in their sequences."""
    noise_base: torch.Tensor
    """[table rows] int64, see `kernels.sampling.noise_base`."""
    floats: torch.Tensor
    """[table rows, at least 7] float32: 1 / temperature (greedy: 1), noise factor (greedy: 0, else 1), top_p,
    min_p, repetition, frequency and presence penalty."""
    top_k: torch.Tensor
    """[table rows] int64; 0: all."""


@dataclass(frozen=True, slots=True)
class Logits:
    """What is sampled from. Columns beyond `columns` (padding) are not read."""

    values: torch.Tensor
    """[logit rows, at least `columns`] bfloat16, float16 or float32; columns side by side."""
    columns: int
    first: int = 0
    """Token id of the first column."""
    hashes: torch.Tensor | None = None
    """[columns] int32: `kernels.sampling.token_hashes(first, columns)`, made once; `greedy` needs none."""
    index: torch.Tensor | None = None
    """[sampling rows] int64: the logit row of each; None: the same."""
    edited: torch.Tensor | None = None
    """[edited rows, columns] float32 of `edit`, read in place of a row's logits where `edited_index` says
    so."""
    edited_index: torch.Tensor | None = None
    """[sampling rows] int64: row of `edited`; -1: none."""


class SamplingOps(Protocol):
    """What a backend offers. The first three return, for each sampling row, its best score [rows] float32 and
    that token's id [rows] int64; a score that is not finite marks a bad row (BAD_TOKEN)."""

    def greedy(self, logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit; the lowest id on ties."""

    def plain(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """As `greedy`, of logits / temperature + noise: greedy and plain rows in any mixture."""

    def full(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """As `plain`, among what top-k, top-p and min-p keep: rows of every kind in any mixture.

        The whole vocabulary must be in `logits`: with tensor parallelism, gather it first.
        """

    def edit(
        self,
        logits: Logits,
        draws: Draws,
        index: torch.Tensor,
        counts: torch.Tensor | None = None,
        count_slots: torch.Tensor | None = None,
        bias: Biases | None = None,
        banned: Bans | None = None,
    ) -> torch.Tensor:
        """Copies of some rows' logits with penalties, then bias, then bans applied: `[edited rows, columns]`
        float32, for `Logits.edited`. The logits stay as they are: log probabilities are of the model's own.

        index: [edited rows] int64, which sampling row each is; -1: padding. counts: [slots, vocabulary]
        int32, 2 × (times in the output) + (1 if in the prompt). count_slots: [edited rows] int64; -1: no penalties.
        bias, banned: no pair of row and token twice within one of them; a row of -1 is padding. Token ids are
        of the whole vocabulary (`first` must be 0).
        """
