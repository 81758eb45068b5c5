"""Tests that captured passes, in halves and as a whole, give the same logits as eager passes. No GPU is
needed, because "replaying" a captured part simply calls its function again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import halves_graphs, layer_graphs, peer_overlap, sizing
from engine.bench.shapes import write_config
from engine.config import ModelConfig
from engine.families import read_config
from engine.halves_graphs import HalvesGraphs
from engine.launch_enumeration import UnconnectedRanks, _MetaMemory
from engine.layer_graphs import LayerGraphs
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.peer_overlap import OverlapMemory, PeerOverlap
from engine.peer_ranks import PeerRanks
from engine.sizing import overlap_split
from kernels import Residual, select_backend
from kernels.cuda import CudaOps
from kernels.triton.peer_arena import Arena
from tests.engine.model.checkpoints import QWEN2_EXPERTS, QWEN3_EXPERTS, Case, make
from tests.engine.model.driver import Driver, Sequence
from tests.engine.running.thread_ranks import ThreadRank, on_ranks

DENSE = Case(
    "dense", "llama", {"attention_bias": True, "num_hidden_layers": 3, "max_position_embeddings": 1024}
)
EXPERTS = Case(
    "experts",
    "qwen2_moe",
    {**QWEN2_EXPERTS, "mlp_only_layers": [1], "num_hidden_layers": 4, "max_position_embeddings": 1024},
)
"""A mixture-of-experts model with a dense layer between layers that have a shared expert."""
WHOLE = Case("whole", "qwen3_moe", {**QWEN3_EXPERTS, "max_position_embeddings": 1024})
"""A mixture-of-experts model in which each rank has complete experts."""
FULL = 320
"""Number of tokens in a captured pass. It is split into "halves" of 256 and 64 tokens."""


class Replayed:
    """Stands in for a CUDA graph."""

    def __init__(self, part: Callable[[], object], pool: Any) -> None:
        self.replay = part


class HalvingRank(ThreadRank):
    """A rank that computes passes of at least FULL tokens in halves."""

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


def results_of(
    folder: Path, rank: ThreadRank, memory: OverlapMemory | None = None, *, layers: bool = False
) -> list[torch.Tensor]:
    """Return the logits of four passes, and how many of their tokens have chosen each expert. The first pass
    has FULL tokens, and the second has another number of tokens. The last two have decodes and FULL tokens,
    the last one with padding. With `memory`, the passes are computed in halves. With `layers` or `memory`,
    the passes of FULL tokens are captured."""
    ranks = HalvingRank(rank.size, rank.rank, rank._slots, rank._barrier)
    config = read_config(folder)
    if folder.name == WHOLE.name:
        config = config.with_whole_experts()
    decoder = Decoder(config, ranks, select_backend("cpu"), torch.float32, torch.device("cpu"))
    load_dummy(decoder, seed=3)
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
        driver.run([(first, 9)], [(fourth, tokens[67:366])], padding=20),
    ]
    assert len(replays) == (0 if graphs is None else 3)
    choices = decoder.expert_choices()
    if choices is None or config.experts is None:
        return passes
    expected = sum(len(logits) for logits in passes) * config.experts.top_k
    assert choices.counts.sum(dim=1).tolist() == [expected] * len(choices.layers)
    return [*passes, choices.counts]


@pytest.mark.parametrize(
    ("case", "size"),
    [(EXPERTS, 1), (DENSE, 2), (EXPERTS, 2), (WHOLE, 2)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_captured_layers_give_the_results_of_eager_passes(case: Case, size: int, tmp_path: Path) -> None:
    folder = make(case, tmp_path / case.name)
    eager = on_ranks(size, lambda rank: results_of(folder, rank))
    captured = on_ranks(size, lambda rank: results_of(folder, rank, layers=True))
    for rank in range(size):
        for found, wanted in zip(captured[rank], eager[rank], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [DENSE, EXPERTS, WHOLE], ids=lambda case: case.name)
def test_captured_halves_give_the_results_of_whole_passes(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2
    folder = make(case, tmp_path / case.name)
    hidden = read_config(folder).hidden_size
    whole = on_ranks(size, lambda rank: results_of(folder, rank))
    barrier = threading.Barrier(size, timeout=600)
    monkeypatch.setattr(peer_overlap, "all_gather", lambda *_, **__: barrier.wait())
    shapes = OverlapMemory.shapes(size, 256, hidden)
    memory = OverlapMemory(*([torch.full(shape, torch.nan) for _ in range(size)] for shape in shapes))
    captured = on_ranks(size, lambda rank: results_of(folder, rank, memory))
    for rank in range(size):
        for found, other, wanted in zip(captured[rank], captured[0], whole[0], strict=True):
            assert torch.equal(found, other)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_parts_of_a_model_are_not_captured(tmp_path: Path) -> None:
    ranks, config = ThreadRank(1, 0, [], threading.Barrier(1)), read_config(make(DENSE, tmp_path))
    whole = Decoder(config, ranks, select_backend("cpu"), torch.float32, torch.device("cpu"))
    whole.halves_graphs = whole.layer_graphs = object()  # type: ignore[assignment]
    part = whole.with_layers([0, 1])
    assert part.halves_graphs is None and part.layer_graphs is None


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_predicted_memory_contains_all_buffers(shape: str, tmp_path: Path) -> None:
    config = read_config(write_config(shape, tmp_path))
    ranks = PeerRanks(UnconnectedRanks(4, 0), _MetaMemory(4, 0), pdl=True, overlap_from=4096)
    ranks.prepare_overlap(8192, config.hidden_size, torch.bfloat16, torch.device("meta"))
    overlap = ranks.overlap(8192)
    assert overlap is not None
    decoder = Decoder(config, ranks, CudaOps(pdl=True), torch.bfloat16, torch.device("meta"))
    sizes = sizing.layer_capture_sizes(config, 4, 8192)
    layers, halves = LayerGraphs(decoder, sizes), HalvesGraphs(decoder, overlap, [8192])
    buffers = [*buffers_of(layers), halves._qkv, halves._attended, halves._live]
    graphs = (14 + 4) * config.layers * sizing._GRAPH_LAYER_BYTES
    predicted = sizing.captured_bytes(config, "bfloat16", 4, 8192)
    assert (
        predicted
        == sum(buffer.nbytes for buffer in buffers) + (3584 + 4096) * token_bytes(config, 4) + graphs
    )


def test_the_predicted_memory_contains_the_buffers_of_one_gpu_with_experts(tmp_path: Path) -> None:
    config = read_config(write_config("qwen3-30b-a3b", tmp_path))
    ranks = ThreadRank(1, 0, [], threading.Barrier(1))
    decoder = Decoder(config, ranks, CudaOps(pdl=True), torch.bfloat16, torch.device("meta"))
    sizes = sizing.layer_capture_sizes(config, 1, 8192)
    buffers = sum(buffer.nbytes for buffer in buffers_of(LayerGraphs(decoder, sizes)))
    graphs = len(sizes) * config.layers * sizing._GRAPH_LAYER_BYTES
    predicted = sizing.captured_bytes(config, "bfloat16", 1, 8192)
    assert predicted == buffers + 8192 * token_bytes(config, 1) + graphs


def buffers_of(graphs: LayerGraphs) -> list[torch.Tensor]:
    return [graphs._residual, graphs._qkv, graphs._attended, graphs._live]


def token_bytes(config: ModelConfig, ranks: int) -> int:
    """Return the number of bytes that an MLP or a layer of experts needs per token in bfloat16."""
    if config.experts is None:
        return 2 * (3 * config.intermediate_size // ranks + config.hidden_size)
    each = 3 * config.experts.intermediate_size // ranks + 2 * config.hidden_size
    return 2 * config.experts.top_k * each + 4 * config.experts.count


@pytest.mark.parametrize(
    ("shape", "ranks", "largest"),
    [
        ("llama-3.1-8b", 1, 0),
        ("llama-3.1-8b", 2, 3584),
        ("qwen3-30b-a3b", 1, 8192),
        ("qwen3-30b-a3b", 2, 3584),
    ],
)
def test_long_passes_of_experts_are_also_captured_on_one_gpu(
    shape: str, ranks: int, largest: int, tmp_path: Path
) -> None:
    config = read_config(write_config(shape, tmp_path))
    captured = sizing.layer_capture_sizes(config, ranks, 16384)
    assert max(captured, default=0) == largest
    assert sizing.layer_capture_sizes(config, ranks, 1000) == [size for size in captured if size <= 1000]
    padded = sizing.pass_sizes(config, ranks, 16384)
    assert padded == sorted(set(padded)) and padded[: len(captured)] == captured and padded[-1] == 16384
    assert sizing.layer_capture_sizes(config.with_layers([0]), ranks, 16384) == []
    assert (sizing.captured_bytes(config, "bfloat16", ranks, 16384) == 0) == (not captured)
