"""The interface of sampling: its inputs, its constants and the operations (`SamplingOps`) that a backend
implements.

`kernels.sampling` is the reference implementation in plain torch, used on CPUs and as the oracle;
`kernels.triton.sampling` samples on GPUs without a sort. Both use the noise of `kernels.sampling`. Logits
processors run first (`edit`): penalties, then bias, then bans. Rows that draw then apply temperature, top-k,
top-p and min-p, each of which keeps tokens tied with the last kept token. Among tokens with equal scores, the
lowest id wins. The result of a row does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

BAD_TOKEN = -1
"""Token id returned for a row whose largest logit is not a finite number."""

TEMPERATURE, NOISE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(7)
"""Column indices of `Draws.floats`."""

Biases = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Biased tokens: edited row (int64), token id (int64) and bias (float32) of each."""
Bans = tuple[torch.Tensor, torch.Tensor]
"""Banned tokens: edited row and token id (int64) of each."""


class Variant(IntEnum):
    """Variants of the sampling graph; each variant also serves the rows of the variants before it."""

    GREEDY = 0
    """Take the largest logit."""
    PLAIN = 1
    """Draw with noise at a temperature."""
    FULL = 2
    """Draw among the tokens that top-k, top-p and min-p keep."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The sampling rows of a step, and the device tables of sampling parameters by sequence slot."""

    slots: torch.Tensor
    """Sequence slot of each sampling row: [sampling rows] integers. -1 marks padding, which reads nothing and
    gives BAD_TOKEN."""
    positions: torch.Tensor
    """Position of each sampled token in its sequence: [sampling rows] int64."""
    noise_base: torch.Tensor
    """Noise base of each slot: [slots] int64, see `kernels.sampling.noise_base`."""
    floats: torch.Tensor
    """Sampling parameters of each slot: [slots, at least 7] float32, in the order 1 / temperature (greedy:
    1), noise factor (greedy: 0, else 1), top_p, min_p, repetition, frequency and presence penalty."""
    top_k: torch.Tensor
    """Top-k of each slot: [slots] int64; 0 keeps all tokens."""


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits to sample from. Columns from `columns` on are padding and are not read."""

    values: torch.Tensor
    """Logits: [logit rows, at least `columns`] bfloat16, float16 or float32; the columns of a row are
    contiguous."""
    columns: int
    first: int = 0
    """Token id of the first column."""
    hashes: torch.Tensor | None = None
    """Token hashes `kernels.sampling.token_hashes(first, columns)`: [columns] int32, computed once. `greedy`
    does not need hashes."""
    index: torch.Tensor | None = None
    """Logit row of each sampling row: [sampling rows] int64. None: sampling row i is logit row i."""
    edited: torch.Tensor | None = None
    """Edited logits from `edit`: [edited rows, columns] float32. They replace a row's logits where
    `edited_index` is not -1."""
    edited_index: torch.Tensor | None = None
    """Row of `edited` for each sampling row: [sampling rows] int64; -1: the row is not edited."""


class SamplingOps(Protocol):
    """The sampling operations that a backend implements. `greedy`, `plain` and `full` return, for each
    sampling row, the best score [rows] float32 and its token id [rows] int64. A score that is not finite
    marks a bad row (BAD_TOKEN)."""

    def greedy(self, logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row; the lowest id on ties."""

    def plain(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value of logits / temperature + noise. Greedy and plain rows may be mixed."""

    def full(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest value of logits / temperature + noise among the tokens that top-k, top-p and
        min-p keep. Rows of every variant may be mixed.

        `logits` must hold the whole vocabulary: with tensor parallelism, gather the shards first.
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
        """Return copies of some rows' logits with penalties, then bias, then bans applied:
        `[edited rows, columns]` float32, for `Logits.edited`. The logits themselves stay unchanged, because
        log probabilities are computed from the model's own logits.

        index: [edited rows] int64, the sampling row of each edited row; -1 marks padding. counts:
        [count slots, vocabulary] int32, 2 × (occurrences in the output) + (1 if the token is in the prompt).
        count_slots: [edited rows] int64, the row of `counts` for each edited row; -1: no penalties. bias,
        banned: a pair of row and token occurs at most once in each; row -1 marks padding. Token ids are of
        the whole vocabulary (`first` must be 0).
        """
