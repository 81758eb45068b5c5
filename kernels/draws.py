"""Defines the sampling interface: its inputs, its constants and the operations (`SamplingOps`) that a backend
implements.

`kernels.sampling` is the reference implementation in plain torch, used on CPUs and for testing the GPU
kernels. `kernels.triton.sampling` is used on GPUs and needs no sort. Both use the random noise defined in
`kernels.sampling`.

Logits processors (`edit`) run first: penalties, then biases, then bans. For rows that are not greedy, the
temperature is applied next, followed by top-k, top-p and min-p. These three filters also keep every token
that ties with the last one kept. Among tokens with equal scores, the lowest id wins. A row's result does not
depend on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch

BAD_TOKEN = -1
"""Token id returned for a row whose largest logit is not finite."""

TEMPERATURE, NOISE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(7)
"""Column indices in `Draws.floats`."""

Biases = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token biases as three parallel tensors: edited row (int64), token id (int64) and bias (float32)."""
Bans = tuple[torch.Tensor, torch.Tensor]
"""Banned tokens as two parallel int64 tensors: edited row and token id."""


class Variant(IntEnum):
    """Variants of the sampling graph, from the simplest to the most general. Each variant can also sample
    rows for which a simpler variant would suffice."""

    GREEDY = 0
    """Select the token with the largest logit."""
    PLAIN = 1
    """Sample a token at the row's temperature."""
    FULL = 2
    """Sample, at the row's temperature, from the tokens kept by top-k, top-p and min-p."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows to sample in one step, and the device tables with every sequence slot's sampling
    parameters."""

    slots: torch.Tensor
    """Each sampling row's sequence slot: [sampling rows] integers. A padding row has slot -1, and its result
    is BAD_TOKEN."""
    positions: torch.Tensor
    """Position of each sampled token in its sequence: [sampling rows] int64."""
    noise_base: torch.Tensor
    """Each slot's noise base: [slots] int64, from `kernels.sampling.noise_base`."""
    floats: torch.Tensor
    """Each slot's sampling parameters: [slots, at least 7] float32. The columns are 1 / temperature (1 for
    greedy), noise factor (0 for greedy, otherwise 1), top_p, min_p, and the repetition, frequency and
    presence penalties."""
    top_k: torch.Tensor
    """Each slot's top-k: [slots] int64. 0 keeps all tokens."""


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits to sample from. Columns from index `columns` onwards are padding and are never read."""

    values: torch.Tensor
    """The logits: [logit rows, at least `columns`] bfloat16, float16 or float32. Each row is contiguous."""
    columns: int
    first: int = 0
    """Token id of the first column."""
    hashes: torch.Tensor | None = None
    """Token hashes, [columns] int32, computed once by `kernels.sampling.token_hashes`. Not needed by
    `greedy`."""
    index: torch.Tensor | None = None
    """For each sampling row, the index of its row in `values`: [sampling rows] int64. None means that
    sampling row i uses row i of `values`."""
    edited: torch.Tensor | None = None
    """The result of `edit`: [edited rows, columns] float32. A sampling row with an `edited_index` of i ≥ 0
    uses row i of `edited` instead of its logits."""
    edited_index: torch.Tensor | None = None
    """For each sampling row, the index of its row in `edited`, or -1 if its logits were not edited: [sampling
    rows] int64."""


class SamplingOps(Protocol):
    """The sampling operations that a backend implements. For each sampling row, `greedy`, `plain` and `full`
    return the best score, [rows] float32, and its token id, [rows] int64, which is BAD_TOKEN if the score is
    not finite."""

    def greedy(self, logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit and its token id. The lowest id wins a tie."""

    def plain(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row, return the largest value of logits / temperature + noise, and its token id. Supports
        only greedy rows and rows whose only sampling parameter is the temperature."""

    def full(self, logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row, return the largest value of logits / temperature + noise among the tokens kept by
        top-k, top-p and min-p, and its token id. Supports all rows.

        `logits` must contain the whole vocabulary. With tensor parallelism, the caller first gathers the
        shards.
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
        """Copy some rows' logits, apply penalties, biases and bans to the copies, in this order, and return
        the copies: `[edited rows, columns]` float32, for `Logits.edited`. The original logits stay unchanged,
        because log probabilities are computed from them.

        index: [edited rows] int64. For each edited row, the index of its sampling row; -1 marks padding.
        counts: [count slots, vocabulary] int32, 2 × (occurrences in the output) + (1 if the token is in the
          prompt).
        count_slots: [edited rows] int64. For each edited row, the index of its row in `counts`, or -1 for no
          penalties.
        bias, banned: no (row, token id) pair may occur twice; row -1 marks padding. `logits.first` must be 0,
          because token ids index the whole vocabulary.
        """
