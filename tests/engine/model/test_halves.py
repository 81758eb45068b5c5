"""Tests that passes computed in two halves give the same results as whole passes, and that all-reduces
implemented with copies are exact."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from engine import peer_overlap
from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.halves import split_attention
from engine.model.loader import load_dummy
from engine.parallel import Overlap
from engine.peer_overlap import OverlapMemory, PeerOverlap
from kernels import AttentionInput, ChunkSpan, Residual, select_backend
from kernels.triton.peer_arena import Arena
from tests.engine.running.thread_ranks import ThreadRank, on_ranks

from .checkpoints import OLMOE_EXPERTS, QWEN2_EXPERTS, Case, make
from .driver import Driver, Sequence

CASES = [
    Case("plain", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("windowed", "qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    Case("experts", "qwen2_moe", QWEN2_EXPERTS),
    Case("norms of all heads", "olmoe", OLMOE_EXPERTS),
]


class LateOverlap:
    """A backend that computes each all-reduce as late as the interface allows: in `finish`."""

    def __init__(self, ranks: ThreadRank, split: int) -> None:
        self.split = split
        self._ranks = ranks
        self._started: list[tuple[Residual, torch.Tensor] | None] = [None, None]

    def part(self, half: int, rows: int) -> torch.Tensor | None:
        return None

    def start(self, half: int, residual: Residual, part: torch.Tensor) -> None:
        assert self._started[half] is None
        self._started[half] = (residual, part)

    def finish(self, half: int) -> Residual:
        started, self._started[half] = self._started[half], None
        assert started is not None
        return self._ranks.add_sum(*started, None)


class HalvingRank(ThreadRank):
    """A rank that computes passes of more than `split` tokens in two halves."""

    split: int | None = None
    halved = 0

    def overlap(self, tokens: int) -> Overlap | None:
        if self.split is None or tokens <= self.split:
            return None
        self.halved += 1
        return LateOverlap(self, self.split)


def logits_of(folder: Path, rank: ThreadRank, split: int | None, kv_fp8: bool) -> list[torch.Tensor]:
    """Return the logits of several passes that contain decodes and chunks of both new and continued
    prompts."""
    ranks = HalvingRank(rank.size, rank.rank, rank._slots, rank._barrier)
    ranks.split = split
    config = read_config(folder)
    decoder = Decoder(config, ranks, select_backend("cpu"), torch.float32, torch.device("cpu"), kv_fp8=kv_fp8)
    load_dummy(decoder, seed=3)
    driver = Driver(decoder, blocks=12)
    tokens = [(7 * place) % 150 + 3 for place in range(200)]
    first, second, third = Sequence(), Sequence(), Sequence()
    passes = [
        driver.run([], [(first, tokens[:90]), (second, tokens[:30])]),
        driver.run([(first, 5), (second, 6)], [(third, tokens[:70])]),
        driver.run([(first, 7)], [(third, tokens[70:100]), (second, tokens[40:90])]),
    ]
    assert ranks.halved == (0 if split is None else 3)
    return passes


@pytest.mark.parametrize(
    ("size", "case", "kv_fp8"),
    [(1, CASES[0], False), *((2, case, False) for case in CASES), (2, CASES[0], True)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_passes_in_halves_give_the_logits_of_whole_passes(
    size: int, case: Case, kv_fp8: bool, tmp_path: Path
) -> None:
    folder = make(case, tmp_path)
    whole = on_ranks(size, lambda rank: logits_of(folder, rank, None, kv_fp8))[0]
    # The passes are split inside a prompt, between two prompts (the last pass starts with 1 + 30 tokens), and
    # right after the decodes.
    for split in (40, 31, 2):
        halved = on_ranks(size, lambda rank, split=split: logits_of(folder, rank, split, kv_fp8))[0]  # type: ignore[misc]
        for found, wanted in zip(halved, whole, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_split_keeps_every_token_of_every_chunk_at_its_position() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        decodes = chosen.randint(0, 3)
        chunks, first = [], decodes
        for slot in range(chosen.randint(1, 4)):
            chunks.append(ChunkSpan(first, chosen.randint(1, 9), chosen.randint(0, 5), 10 + slot))
            first += chunks[-1].count
        slots = torch.arange(decodes)
        inputs = AttentionInput(torch.zeros(1), slots, slots + 1, 4, chunks)
        at = chosen.randint(max(decodes, 1), first)
        before, after = split_attention(inputs, at)

        def tokens(spans: list[ChunkSpan], shift: int) -> list[tuple[int, int, int]]:
            return [
                (span.first + shift + i, span.slot, span.context + i)
                for span in spans
                for i in range(span.count)
            ]

        assert tokens(before.chunks, 0) + tokens(after.chunks, at) == tokens(chunks, 0)
        assert all(span.first + span.count <= at for span in before.chunks)
        assert torch.equal(before.slots, slots) and len(after.slots) == len(after.lens) == after.columns == 0


def test_sums_by_copies_are_exact_and_equal_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is a thread. A copy made by one rank becomes visible to the other ranks only after the next
    barrier."""
    size, rows, hidden = 4, 16, 8
    barrier = threading.Barrier(size, timeout=600)
    shapes = OverlapMemory.shapes(size, rows, hidden)
    stages, gathered = ([torch.full(shape, torch.nan) for _ in range(size)] for shape in shapes)
    monkeypatch.setattr(peer_overlap, "all_gather", lambda *_, **__: barrier.wait())

    def sum_parts(
        parts: torch.Tensor, own: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, rank: int
    ) -> None:
        total = torch.zeros_like(own)
        for source in range(size):
            total += own if source == rank else parts[source, : len(own)]
        out.copy_(total + residual)

    monkeypatch.setattr(peer_overlap, "sum_parts", sum_parts)
    counts = [16, 8, 12, 16, 4, 16]
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, 2, count, hidden, generator=generator) for count in counts]
    starts = [torch.randn(2, count, hidden, generator=generator) for count in counts]

    def work(rank: ThreadRank) -> list[torch.Tensor]:
        addresses, calls = torch.empty(size), torch.empty(1)
        arena = Arena(rank.rank, size, addresses, calls, stop_address=0, items=1)
        overlap = PeerOverlap(arena, OverlapMemory(stages, gathered), torch.device("cpu"))
        found = []
        for part, residual in zip(parts, starts, strict=True):
            for half in range(2):
                overlap.start(half, Residual(residual[half].clone()), part[rank.rank, half])
            once = [overlap.finish(half) for half in range(2)]
            for half in range(2):  # the second all-reduce reads the result of the first
                buffer = overlap.part(half, len(part[rank.rank, half]))
                overlap.start(half, once[half], buffer.copy_(part[rank.rank, half]))
            found += [overlap.finish(half).values.clone() for half in range(2)]
        return found

    results = on_ranks(size, work)
    wanted = [
        residual[half] + 2 * part[:, half].sum(0)
        for part, residual in zip(parts, starts, strict=True)
        for half in range(2)
    ]
    for found in results:
        for one, other, right in zip(found, results[0], wanted, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, right)
