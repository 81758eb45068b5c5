"""Tests of messages sent through peer memory. No GPU is needed, because kernel calls are only recorded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import parallel, peer_ranks
from engine.bench.shapes import write_config
from engine.families import read_config
from engine.launch_enumeration import UnconnectedRanks, _MetaMemory
from engine.parallel import RankFailureError
from engine.peer_limits import AllReduceLimits, limits_of
from engine.peer_memory import ITEMS
from engine.peer_ranks import PeerRanks
from engine.sizing import overlap_bytes, peer_bytes
from kernels import NextNorm, Residual
from kernels.triton import all_gather, all_reduce
from kernels.triton.peer_arena import arena_words
from tests.engine.running.thread_ranks import on_ranks


class WatchedGroup(UnconnectedRanks):
    """The fallback group, which carries the messages that do not use peer memory. It records its calls."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 0)
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_gather_stack")
        return super().all_gather_stack(tensor)


class Kernels:
    """A stand-in for the kernels that records their calls instead of running them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        monkeypatch.setattr(peer_ranks.all_reduce, "all_reduce_add", self._add)
        monkeypatch.setattr(peer_ranks.all_reduce_norm, "all_reduce_norm_fp8", self._add_norm)
        monkeypatch.setattr(peer_ranks.all_gather, "all_gather", self._gather)
        monkeypatch.setattr(peer_ranks.all_gather, "best_of_ranks", self._best)

    def _add(self, x: torch.Tensor, residual: torch.Tensor, arena: Any, **options: Any) -> None:
        self.calls.append(("add", {**options, "rows": len(x)}))

    def _add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        arena: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(("add norm", {"gain": gain, "eps": eps, **options}))
        return x.to(torch.float8_e4m3fn), torch.empty((len(x), 1), device="meta")

    def _gather(
        self, x: torch.Tensor, width: int, arena: Any, out: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        self.calls.append(("gather", {"width": width, "words": len(x), **options}))
        assert all_gather.fits(len(x), arena)
        result = x.view(-1, 1, width).expand(-1, arena.world, -1)
        return result.contiguous() if out is None else out.copy_(result)

    def _best(self, values: torch.Tensor, ids: torch.Tensor, arena: Any, **options: Any) -> torch.Tensor:
        self.calls.append(("best", options))
        return ids


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def made(size: int = 2) -> tuple[PeerRanks, WatchedGroup]:
    group = WatchedGroup(size)
    return PeerRanks(group, _MetaMemory(size, 0), pdl=True), group


def part(rows: int, hidden: int = 8192, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((rows, hidden), dtype=dtype, device="meta")


@pytest.mark.parametrize(("size", "rows"), [(2, 256), (4, 8), (8, 8)])
def test_sums_switch_to_two_shot_at_a_size_that_falls_with_the_number_of_ranks(
    size: int, rows: int, kernels: Kernels
) -> None:
    ranks, group = made(size)
    for count in (1, rows - 1, rows, 1024):
        ranks.add_sum(Residual(part(count)), part(count), None)
    assert [options["two_shot"] for _, options in kernels.calls] == [False, False, True, True]
    assert group.calls == []
    assert limits_of(size).two_shot_bytes == rows * 8192 * 2


def test_given_limits_replace_those_of_the_number_of_ranks(kernels: Kernels) -> None:
    ranks, group = made(4)
    ranks.limits = AllReduceLimits(two_shot_bytes=2 * 16384, group_bytes=3 * 16384, quantised_rows=range(0))
    gain = torch.empty(8192, dtype=torch.bfloat16, device="meta")
    for rows in (1, 2, 3):
        ranks.add_sum(Residual(part(rows)), part(rows), NextNorm(gain, 1e-5, quantised=True))
    assert [(name, options["two_shot"]) for name, options in kernels.calls] == [("add", False), ("add", True)]
    assert group.calls == ["all_reduce"]


def test_messages_that_exceed_the_arena_are_sent_in_equal_pieces(kernels: Kernels) -> None:
    ranks, group = made(4)
    gain = torch.empty(8192, dtype=torch.bfloat16, device="meta")
    for rows, expected in ((1056, [1056]), (1057, [529, 528]), (3000, [1000, 1000, 1000])):
        for run in (
            lambda rows=rows: ranks.add_sum(Residual(part(rows)), part(rows), NextNorm(gain, 1e-5, True)),
            lambda rows=rows: ranks.all_reduce(part(rows)),
        ):
            kernels.calls.clear()
            run()
            assert [options["rows"] for _, options in kernels.calls] == expected
            assert all(options["two_shot"] for _, options in kernels.calls)
    assert group.calls == []


@pytest.mark.parametrize(
    "message",
    [part(4096), part(3, 8200), part(3, dtype=torch.float32), part(0), part(3, 16384)[:, ::2]],
    ids=["too many rows", "width", "dtype", "no rows", "strided"],
)
def test_other_sums_go_through_the_group(message: torch.Tensor, kernels: Kernels) -> None:
    ranks, group = made()
    values = torch.empty_like(message)
    gain = torch.empty(message.shape[1], dtype=message.dtype, device="meta")
    for quantised in (False, True):
        found = ranks.add_sum(Residual(values), message, NextNorm(gain, 1e-5, quantised))
        assert found.deferred_norm is None and found.normed is None
    ranks.all_reduce(message)
    assert group.calls == ["all_reduce"] * 3
    assert kernels.calls == []


def test_a_sum_carries_the_requested_deferred_norm(kernels: Kernels) -> None:
    ranks, _ = made()
    gain = torch.empty(8192, dtype=torch.bfloat16, device="meta")
    norm = ranks.add_sum(Residual(part(3)), part(3), NextNorm(gain, 1e-5, quantised=False)).deferred_norm
    assert norm is not None
    assert norm.values.shape == (3, 8192)
    assert norm.squares.shape == (all_reduce.squares_parts(8192), 3)
    options = kernels.calls[0][1]
    assert options["gain"] is gain and options["scaled"] is norm.values and options["squares"] is norm.squares
    assert ranks.add_sum(Residual(part(3)), part(3), None).deferred_norm is None


@pytest.mark.parametrize(("size", "most"), [(2, 64), (4, 7), (8, 7)])
def test_a_sum_of_few_rows_carries_the_requested_quantised_norm(
    size: int, most: int, kernels: Kernels
) -> None:
    ranks, _ = made(size)
    gain = torch.empty(8192, dtype=torch.bfloat16, device="meta")
    norm = NextNorm(gain, 1e-5, quantised=True)
    found = ranks.add_sum(Residual(part(most)), part(most), norm)
    assert found.normed is not None and found.deferred_norm is None
    assert found.normed.values.dtype == torch.float8_e4m3fn and found.normed.dtype == torch.bfloat16
    assert kernels.calls == [("add norm", {"gain": gain, "eps": 1e-5, "pdl": True})]
    more = ranks.add_sum(Residual(part(most + 1)), part(most + 1), norm)
    assert more.normed is None and more.deferred_norm is None
    name, options = kernels.calls[1]
    assert name == "add" and options["gain"] is None


def test_an_embedding_is_summed_without_a_residual(kernels: Kernels) -> None:
    ranks, group = made()
    assert ranks.all_reduce(part(3)).shape == (3, 8192)
    assert [(name, options["add"]) for name, options in kernels.calls] == [("add", False)]
    assert group.calls == []


def test_logits_and_scores_are_gathered_through_peer_memory_as_words(kernels: Kernels) -> None:
    ranks, group = made(4)
    logits = torch.randn(3, 10).bfloat16()
    assert torch.equal(ranks.all_gather_last_dim(logits), torch.cat([logits] * 4, dim=-1))
    scores = torch.randn(3, 5)
    assert torch.equal(ranks.all_gather_stack(scores), torch.stack([scores] * 4))
    assert [options["width"] for _, options in kernels.calls] == [5, 15]
    assert ranks.best(torch.randn(3), torch.arange(3)).tolist() == [0, 1, 2]
    assert kernels.calls[-1][0] == "best"
    assert group.calls == []


def test_logits_that_do_not_fit_into_the_arena_are_gathered_in_pieces(kernels: Kernels) -> None:
    ranks, group = made(2)
    logits = torch.randn(300, 64128).bfloat16()
    assert torch.equal(ranks.all_gather_last_dim(logits), torch.cat([logits] * 2, dim=-1))
    rows = _MetaMemory(2, 0).arena.max_words // 32064
    assert [options["words"] for _, options in kernels.calls] == [
        32064 * count for count in (rows, rows, 300 - 2 * rows)
    ]
    assert group.calls == []


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(0, 4)],
    ids=["half a word", "integers", "empty"],
)
def test_other_gathers_go_through_the_group(tensor: torch.Tensor, kernels: Kernels) -> None:
    ranks, group = made()
    assert ranks.all_gather_last_dim(tensor).shape == (len(tensor), 2 * tensor.shape[1])
    assert ranks.all_gather_stack(tensor).shape == (2, *tensor.shape)
    assert group.calls == ["all_gather_stack"] * 2
    assert kernels.calls == []


def test_a_lost_peer_ends_the_waiting_of_kernels_and_every_later_check_raises() -> None:
    stopped = []
    memory = _MetaMemory(2, 0)
    memory.stop = lambda: stopped.append(True)  # type: ignore[method-assign]
    group = WatchedGroup(2)
    ranks = PeerRanks(group, memory, pdl=True)
    ranks.check()
    ranks.abandon("rank 1 has exited")
    ranks.abandon("a consequence")
    assert stopped
    for each in (ranks, group):
        with pytest.raises(
            RankFailureError, match="rank 0 of 2: rank 1 has exited; restart the whole replica"
        ):
            each.check()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_predicted_memory_of_an_arena_is_its_size(size: int) -> None:
    assert peer_bytes(size) == 4 * arena_words(size, ITEMS)
    assert peer_bytes(1) == 0


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("tokens", [4096, 5000, 8192])
def test_the_predicted_bytes_of_the_overlap_are_those_of_its_buffers(
    size: int, tokens: int, tmp_path: Path
) -> None:
    config = read_config(write_config("llama-3.1-70b", tmp_path))
    ranks = PeerRanks(UnconnectedRanks(size, 0), _MetaMemory(size, 0), pdl=True, overlap_from=tokens)
    ranks.prepare_overlap(tokens, config.hidden_size, torch.bfloat16, torch.device("meta"))
    overlap = ranks.overlap(tokens)
    assert overlap is not None
    buffers = overlap._memory.stages[0], overlap._memory.gathered[0], overlap._parts
    assert overlap_bytes(config, "bfloat16", size, tokens) == sum(buffer.nbytes for buffer in buffers)
    assert overlap_bytes(config, "bfloat16", 1, tokens) == overlap_bytes(config, "bfloat16", size, 4095) == 0


def test_the_collectives_of_a_group_are_aborted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    aborts: list[bool] = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(parallel._Group, "_abort", lambda group: aborts.append(True))
    group = parallel._Group(2, 0)
    for reason in ("rank 1 has exited", "a consequence"):
        group.abandon(reason)
    for thread in threading.enumerate():
        if thread.name == "abort-collectives":
            thread.join()
    assert len(aborts) == 1


def test_messages_larger_than_the_arena_are_refused() -> None:
    arena = _MetaMemory(2, 0).arena
    assert all_gather.fits(arena.max_words, arena)
    assert not all_gather.fits(arena.max_words + 1, arena)
    with pytest.raises(ValueError, match=r"a message of \d+ words does not fit into an arena of \d+ words"):
        all_gather.all_gather(torch.empty(arena.max_words + 1, dtype=torch.int32, device="meta"), 1, arena)


@pytest.mark.parametrize(
    ("tokens", "split"), [(4095, None), (4096, 2048), (4352, 2304), (8192, 4096), (8193, None), (4097, None)]
)
def test_long_passes_are_split_so_that_every_rank_owns_the_same_number_of_rows(
    tokens: int, split: int | None
) -> None:
    ranks = PeerRanks(WatchedGroup(2), _MetaMemory(2, 0), pdl=True, overlap_from=4096)
    assert ranks.overlap(tokens) is None, "no memory was reserved"
    ranks.prepare_overlap(8192, 1024, torch.bfloat16, torch.device("meta"))
    overlap = ranks.overlap(tokens)
    assert (None if overlap is None else overlap.split) == split


def test_passes_are_not_split_unless_asked_for() -> None:
    ranks, _ = made()
    ranks.prepare_overlap(8192, 1024, torch.bfloat16, torch.device("meta"))
    assert ranks.overlap(8192) is None


class FakeMemory(_MetaMemory):
    """Simulated peer memory. If `broken` is true, it fails to initialise on rank 1."""

    broken = False

    def __init__(self, rank: int, world: int) -> None:
        if self.broken and rank == 1:
            raise RuntimeError("cuMemImportFromShareableHandle failed\nwith details")
        super().__init__(world, rank)


@pytest.mark.parametrize(
    ("reached", "broken", "reason"),
    [(True, False, None), (False, False, "no NVLink, and no PCIe peer access"), (True, True, "cuMemImport")],
    ids=["peer access", "no peer access", "no mapping"],
)
def test_ranks_use_nccl_on_every_rank_if_one_gpu_cannot_map_the_memory_of_another(
    reached: bool,
    broken: bool,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.peer_memory.PeerMemory", FakeMemory)
    monkeypatch.setattr(FakeMemory, "broken", broken)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    # Rank 1 can access rank 0, but rank 0 may not access rank 1.
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: mine == 1 or reached)
    found = on_ranks(2, lambda rank: parallel._connect(rank, torch.device("cpu", rank.rank), None))
    assert [isinstance(ranks, PeerRanks) for ranks in found] == [reason is None] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if reason is None else 2)
    assert reason is None or any(
        f"({reason}" in line and "use NCCL for every message" in line for line in lines
    )
