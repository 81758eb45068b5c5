"""Tests that weights loaded on a GPU are bitwise equal to weights loaded on the CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.bench.shapes import SHAPES
from engine.families import read_config
from engine.memory import WeightsTooLarge
from engine.model.checkpoint import read_entries
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.model.slices import TensorSlice
from engine.model.streaming import BLOCK_BYTES, no_target, stream
from engine.model.weight_file import WeightFile
from engine.progress import no_progress
from kernels import select_backend
from tests.engine.model.checkpoints import Case, Fp8, make, quantise

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class PlaceOfRank:
    """A rank's number and the size of its group, without collectives."""

    size: int
    rank: int


@pytest.fixture(scope="module", params=[None, Fp8("quantised", per_channel=True)], ids=["bf16", "FP8"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = Case("biased", "llama", {"attention_bias": True}, shard_size="100KB")
    made = make(case, tmp_path_factory.mktemp("made"), torch.bfloat16)
    if request.param is not None:
        quantise(made, request.param)
    return made


def _loaded(folder: Path, device: str, dtype: torch.dtype, ranks: Any, fp8: bool) -> dict[str, torch.Tensor]:
    """Return the bytes of every parameter."""
    ops = select_backend(device, dtype)
    decoder = Decoder(read_config(folder), ranks, ops, dtype, torch.device(device), fp8=fp8)
    found: dict[str, torch.Tensor] = {}
    pieces = decoder.weight_shards()
    with torch.inference_mode():
        load(decoder, folder, no_progress)
    for piece in pieces:
        if piece.target is not None:
            found[piece.name] = piece.target.cpu().contiguous().view(torch.uint8)
        if piece.scales is not None:
            found[f"{piece.name} scales"] = piece.scales.cpu()
    return found


@pytest.fixture(params=["cached", "on disk"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place from which the weights are read. The case "on disk" is simulated, because files this small
    are always cached."""
    if request.param == "on disk":
        monkeypatch.setattr(WeightFile, "_is_cached", lambda *asked: False)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("block_bytes", [5000, 1 << 20], ids=["small blocks", "large blocks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "FP8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_ranks_equal_those_on_the_cpu(
    folder: Path, rank: int, fp8: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.loader.stream", partial(stream, block_bytes=block_bytes))
    expected = _loaded(folder, "cpu", torch.bfloat16, PlaceOfRank(2, rank), fp8)
    found = _loaded(folder, "cuda", torch.bfloat16, PlaceOfRank(2, rank), fp8)
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert torch.equal(found[name], numbers), name


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("placed", [False, True], ids=["filled in", "as it is"])
def test_a_matrix_of_many_blocks_is_loaded_bitwise_equal(tmp_path: Path, placed: bool) -> None:
    """Loads more blocks than fit into the ring at the same time, with the default sizes."""
    rows = 22 * BLOCK_BYTES // 4096 + 77
    expected = torch.arange(rows * 2048, dtype=torch.int32).view(torch.int16)[: rows * 2048].view(rows, 2048)
    expected = expected.view(torch.bfloat16)
    save_file({"matrix": expected}, tmp_path / "model.safetensors")
    whole = TensorSlice("matrix", read_entries(tmp_path)["matrix"], 0, rows)
    found = torch.zeros(rows, 2048, dtype=torch.bfloat16, device="cuda")

    def target(block: TensorSlice) -> torch.Tensor:
        return found[block.first_row : block.first_row + block.rows]

    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        target(block).copy_(numbers)

    blocks = list(stream([whole], found.device, fill, target if placed else no_target))
    assert len(blocks) == 23
    assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("fails", [False, True], ids=["stops", "fails"])
def test_a_stream_that_is_closed_early_releases_its_memory(tmp_path: Path, fails: bool) -> None:
    """Closes a stream while blocks are in flight. All its memory must be unlocked, and another stream must
    still work."""
    expected = torch.arange(64 << 10, dtype=torch.float32).view(64, 1024)
    save_file({"matrix": expected}, tmp_path / "model.safetensors")
    whole = TensorSlice("matrix", read_entries(tmp_path)["matrix"], 0, 64)
    found = torch.zeros(64, 1024, device="cuda")

    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        if fails and block.first_row == 40:
            raise torch.OutOfMemoryError("full")
        found[block.first_row : block.first_row + block.rows] = numbers

    blocks = stream([whole], found.device, fill, block_bytes=4096)
    for _ in range(40):
        next(blocks)
    if fails:
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            next(blocks)
    blocks.close()
    assert torch.equal(found[:40].cpu(), expected[:40])
    fails = False
    assert len(list(stream([whole], found.device, fill, block_bytes=4096))) == 64
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "FP8"])
def test_memory_used_for_loading_is_released(folder: Path, fp8: bool) -> None:
    ops = select_backend("cuda", torch.bfloat16)
    device = torch.device("cuda")
    ranks: Any = PlaceOfRank(1, 0)
    decoder = Decoder(read_config(folder), ranks, ops, torch.bfloat16, device, fp8=fp8)
    before = torch.cuda.memory_reserved()
    load(decoder, folder, no_progress)
    assert torch.cuda.memory_reserved() <= before


def test_weights_too_large_for_the_gpu_are_refused_before_allocation(tmp_path: Path) -> None:
    config = json.dumps(SHAPES["llama-3.1-70b"] | {"num_hidden_layers": 8000})
    (tmp_path / "config.json").write_text(config)
    before = torch.cuda.memory_allocated()
    with pytest.raises(
        WeightsTooLarge, match=r"the weights take .* GiB per rank \(bfloat16\), but NVIDIA .* has"
    ):
        Decoder(
            read_config(tmp_path),
            PlaceOfRank(1, 0),  # type: ignore[arg-type]
            select_backend("cuda", torch.bfloat16),
            torch.bfloat16,
            torch.device("cuda"),
        )
    assert torch.cuda.memory_allocated() == before
