"""Tests that captured passes, in halves and as a whole, give the logits of eager passes. No GPU is needed: a
captured part is a function that is called again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import halves_graphs, layer_graphs, peer_overlap, sizing
from engine.bench.shapes import write_config
from engine.families import read_config
from engine.halves_graphs import HalvesGraphs
from engine.launch_enumeration import UnconnectedRanks, _MetaMemory
from engine.layer_graphs import LayerGraphs, captures
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.peer_overlap import OverlapMemory, PeerOverlap
from engine.peer_ranks import PeerRanks
from engine.sizing import overlap_split
from kernels import Residual, select_backend
from kernels.cuda import CudaOps
from kernels.triton.peer_arena import Arena
from tests.engine.model.checkpoints import QWEN2_EXPERTS, Case, make
from tests.engine.model.driver import Driver, Sequence
from tests.engine.running.thread_ranks import ThreadRank, on_ranks

DENSE = Case(
    "dense", "llama", {"attention_bias": True, "num_hidden_layers": 3, "max_position_embeddings": 1024}
)
FULL = 320
"""Number of tokens of a captured pass: halves of 256 and 64."""


class Replayed:
    """Stands for a CUDA graph."""

    def __init__(self, part: Callable[[], object], pool: Any) -> None:
        self.replay = part


class HalvingRank(ThreadRank):
    """A rank whose passes of FULL and of more tokens are computed in halves."""

    made: PeerOverlap | None = None

    def overlap(self, tokens: int) -> PeerOverlap | None:
        if self.made is None or tokens < FULL:
            return None
        self.made.split = overlap_split(tokens)
        return self.made


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_parts(
        parts: torch.Tensor, own: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, rank: int
    ) -> None:
        total = torch.zeros_like(own)
        for source in range(len(parts)):
            total += own if source == rank else parts[source, : len(own)]
        out.copy_(total + residual)

    monkeypatch.setattr(peer_overlap, "sum_parts", sum_parts)
    monkeypatch.setattr(halves_graphs, "captured", Replayed)
    monkeypatch.setattr(layer_graphs, "captured", Replayed)


def logits_of(
    folder: Path, rank: ThreadRank, memory: OverlapMemory | None = None, *, layers: bool = False
) -> list[torch.Tensor]:
    """Return the logits of four passes: one with FULL tokens, one with another number of tokens, and two with
    decodes and FULL tokens. With `memory`, they are computed in halves. With `layers` or `memory`, the passes
    of FULL tokens are captured."""
    ranks = HalvingRank(rank.size, rank.rank, rank._slots, rank._barrier)
    decoder = Decoder(read_config(folder), ranks, select_backend("cpu"), torch.float32, torch.device("cpu"))
    load_dummy(decoder, seed=3)
    assert captures(decoder)
    replays: list[int] = []
    graphs: LayerGraphs | HalvesGraphs | None = None
    if layers:
        graphs = decoder.layer_graphs = LayerGraphs(decoder, [FULL])
    if memory is not None:
        arena = Arena(rank.rank, rank.size, torch.empty(1), torch.empty(1), stop_address=0, items=1)
        ranks.made = PeerOverlap(arena, memory, torch.device("cpu"))
        graphs = decoder.halves_graphs = HalvesGraphs(decoder, ranks.made, [FULL])
    if graphs is not None:
        graphs._capture_size(FULL, None)
        run: Any = graphs.run

        def counted(*arguments: Any) -> Residual:
            replays.append(1)
            result: Residual = run(*arguments)
            return result

        graphs.run = counted  # type: ignore[method-assign, assignment]
    driver = Driver(decoder, blocks=40)
    tokens = [(7 * place) % 150 + 3 for place in range(900)]
    first, second, third, fourth = (Sequence() for _ in range(4))
    passes = [
        driver.run([], [(first, tokens[:200]), (second, tokens[:120])]),
        driver.run([(first, 5)], [(third, tokens[:349])]),
        driver.run([(first, 7), (second, 8)], [(third, tokens[349:600]), (fourth, tokens[:67])]),
        driver.run([(first, 9)], [(fourth, tokens[67:386])]),
    ]
    assert len(replays) == (0 if graphs is None else 3)
    return passes


@pytest.mark.parametrize("size", [1, 2])
def test_captured_layers_give_the_logits_of_eager_passes(size: int, tmp_path: Path) -> None:
    folder = make(DENSE, tmp_path)
    eager = on_ranks(size, lambda rank: logits_of(folder, rank))
    captured = on_ranks(size, lambda rank: logits_of(folder, rank, layers=True))
    for rank in range(size):
        for found, wanted in zip(captured[rank], eager[rank], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_captured_halves_give_the_logits_of_whole_passes(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(DENSE, tmp_path)
    hidden = read_config(folder).hidden_size
    whole = on_ranks(size, lambda rank: logits_of(folder, rank))
    barrier = threading.Barrier(size, timeout=60)
    monkeypatch.setattr(peer_overlap, "all_gather", lambda *_, **__: barrier.wait())
    shapes = OverlapMemory.shapes(size, 256, hidden)
    memory = OverlapMemory(*([torch.full(shape, torch.nan) for _ in range(size)] for shape in shapes))
    captured = on_ranks(size, lambda rank: logits_of(folder, rank, memory))
    for rank in range(size):
        for found, other, wanted in zip(captured[rank], captured[0], whole[0], strict=True):
            assert torch.equal(found, other)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_models_with_experts_and_parts_of_a_model_are_not_captured(tmp_path: Path) -> None:
    def decoder(case: Case) -> Decoder:
        config = read_config(make(case, tmp_path / case.name))
        return Decoder(
            config,
            ThreadRank(1, 0, [], threading.Barrier(1)),
            select_backend("cpu"),
            torch.float32,
            torch.device("cpu"),
        )

    assert not captures(decoder(Case("experts", "qwen2_moe", QWEN2_EXPERTS)))
    dense = decoder(DENSE)
    dense.halves_graphs = object()  # type: ignore[assignment]
    assert dense.with_layers([0, 1]).halves_graphs is None
    assert not captures(dense.with_layers([0]))


def test_the_predicted_memory_contains_all_buffers(tmp_path: Path) -> None:
    config = read_config(write_config("llama-3.1-8b", tmp_path))
    ranks = PeerRanks(UnconnectedRanks(4, 0), _MetaMemory(4, 0), pdl=True, overlap_from=4096)
    ranks.prepare_overlap(8192, config.hidden_size, torch.bfloat16, torch.device("meta"))
    overlap = ranks.overlap(8192)
    assert overlap is not None
    decoder = Decoder(config, ranks, CudaOps(pdl=True), torch.bfloat16, torch.device("meta"))
    layers, halves = (
        LayerGraphs(decoder, sizing.layer_capture_sizes(8192)),
        HalvesGraphs(decoder, overlap, [8192]),
    )
    buffers = [layers._residual, layers._qkv, layers._attended, halves._qkv, halves._attended]
    width, rows = 3 * config.intermediate_size // 4 + config.hidden_size, 3584 + 4096
    graphs = (14 + 4) * config.layers * sizing._GRAPH_LAYER_BYTES
    predicted = sizing.captured_bytes(config, "bfloat16", 4, 8192)
    assert predicted == sum(buffer.nbytes for buffer in buffers) + 2 * rows * width + graphs
    assert sizing.captured_bytes(config, "bfloat16", 1, 8192) == 0
