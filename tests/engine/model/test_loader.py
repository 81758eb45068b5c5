"""Tests that the loader reads the model's tensors, and that its errors name the refused tensor."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CheckpointError
from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.layers import WeightShard
from engine.model.loader import load, load_dummy
from engine.model.slices import TensorSlice
from engine.model.streaming import stream
from engine.parallel import single
from engine.progress import no_progress
from engine.rank_messages import Progress
from kernels import select_backend
from kernels.reference import quantise_fp8
from tests.engine.model.page_cache import drop

from .checkpoints import EXPERTS, QWEN2_EXPERTS, Case, make

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(Case("plain", "llama"), tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make(Case("plain", "llama", shard_size="100KB"), tmp_path)


@dataclass(frozen=True)
class PlaceOfRank:
    """A rank's number and the size of its group, without collectives."""

    size: int
    rank: int


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def check_weights(pieces: Iterable[WeightShard], tensors: dict[str, torch.Tensor]) -> None:
    """Check that each weight contains its rank's shard of the checkpoint's tensor. The shard is quantised if
    the weight has scales."""
    for piece in pieces:
        assert piece.target is not None
        expected = piece.part(tensors[piece.name])
        if piece.scales is None:
            assert torch.equal(piece.target, expected), piece.name
        else:
            values, scales = quantise_fp8(expected)
            assert torch.equal(piece.target.view(torch.uint8), values.view(torch.uint8)), piece.name
            assert torch.equal(piece.scales, scales.squeeze(1)), piece.name


def _decoder(folder: Path, ranks: Any = None, fp8: bool = False) -> Decoder:
    ranks = ranks or single()
    config, ops = read_config(folder), select_backend("cpu")
    return Decoder(config, ranks, ops, torch.float32, torch.device("cpu"), fp8=fp8)


def _load(folder: Path) -> int:
    return load(_decoder(folder), folder, no_progress)


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = SINGLE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def _refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _load(folder)
    for part in parts:
        assert part in str(caught.value)


def _framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_everything_is_read_once_and_progress_ends_at_one(sharded: Path) -> None:
    seen: list[Progress] = []
    decoder = _decoder(sharded)
    parameters = [piece.target for piece in decoder.weight_shards() if piece.target is not None]
    for target in parameters:
        target.fill_(torch.nan)
    read = load(decoder, sharded, seen.append)
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    assert read == sum(tensor.nbytes for shard in shards for tensor in load_file(shard).values())
    assert not any(target.isnan().any() for target in parameters)
    reading = [progress for progress in seen if progress.stage == "read"]
    assert [progress.done for progress in reading] == sorted(progress.done for progress in reading)
    assert reading[-1].done == reading[-1].total == read
    assert {progress.detail for progress in reading} == {shard.name for shard in shards}
    converting = [progress for progress in seen if progress.stage == "convert"]
    assert [progress.done for progress in converting] == list(range(decoder.config.layers))
    assert seen == [*reading, *converting]


def test_progress_is_reported_for_each_file_and_at_an_interval(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [shard.name for shard in sorted(sharded.glob("*.safetensors"))]
    seen: list[str] = []
    monkeypatch.setattr("engine.model.loader.time.monotonic", lambda: 0.0)
    load(_decoder(sharded), sharded, lambda progress: seen.append(progress.detail))
    assert [name for name in seen if name] == [*shards, shards[-1]]
    hours = iter(range(10_000))
    monkeypatch.setattr("engine.model.loader.time.monotonic", lambda: float(next(hours)))
    load(_decoder(sharded), sharded, lambda progress: seen.append(progress.detail))
    assert len(seen) > 2 * len(shards) + 10


@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_exactly_its_slices(
    sharded: Path, rank: int, fp8: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.loader.stream", partial(stream, block_bytes=block_bytes))
    tensors = tensors_of(sharded)
    decoder = _decoder(sharded, ranks=PlaceOfRank(2, rank), fp8=fp8)
    pieces = decoder.weight_shards()
    load(decoder, sharded, no_progress)
    check_weights(pieces, tensors)


def test_unconverted_tensors_are_read_directly_into_the_weights(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[str] = []
    monkeypatch.setattr(WeightShard, "fill", lambda piece, part: filled.append(piece.name))
    load(_decoder(sharded), sharded, no_progress)
    assert not filled
    load(_decoder(sharded, ranks=PlaceOfRank(2, 0)), sharded, no_progress)
    # A rank has only some columns of each row of these weights.
    assert {name.split(".")[-2] for name in filled} == {"o_proj", "down_proj"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_every_rank_reads_whole_are_shared(
    sharded: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TensorSlice] = []

    def recorded(slices: list[TensorSlice], *arguments: Any) -> Iterator[TensorSlice]:
        asked.extend(slices)
        return stream(slices, *arguments)

    monkeypatch.setattr("engine.model.loader.stream", recorded)
    decoder = _decoder(sharded, ranks=PlaceOfRank(ranks, 0))
    load(decoder, sharded, no_progress)
    shared = {part.name for part in asked if part.shared}
    if ranks == 1:
        assert not shared
    else:
        assert any("o_proj" in name for name in shared)
        assert any("norm" in name for name in shared)
        assert not any(word in name for name in shared for word in ("q_proj", "gate_proj", "embed"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_has_every_file_kept_in_the_page_cache(
    sharded: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []
    monkeypatch.setattr("engine.model.loader.keep_cached", kept.extend)
    load(_decoder(sharded, ranks=PlaceOfRank(2, rank)), sharded, no_progress)
    assert kept == ([] if rank else sorted(sharded.glob("*.safetensors")))


def test_shards_cover_every_parameter_exactly_once(folder: Path) -> None:
    decoder = _decoder(folder)
    for piece in decoder.weight_shards():
        assert piece.target is not None
        piece.target.fill_(0)
    for piece in decoder.weight_shards():
        assert piece.target is not None
        piece.target.add_(1)
    layer = decoder.layers[0]
    for whole in (layer.attention.qkv.weight, layer.mlp.gate_up.weight, decoder.embedding, decoder.head):
        assert (whole == 1).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_shards_cover_every_parameter_of_experts_exactly_once(fp8: bool, tmp_path: Path) -> None:
    folder = make(Case("experts", "qwen2_moe", QWEN2_EXPERTS), tmp_path)
    decoder = _decoder(folder, fp8=fp8)
    filled = [each for piece in decoder.weight_shards() for each in (piece.target, piece.scales)]
    for part in filled:
        if part is not None:
            part.copy_(torch.zeros(part.shape))
    for part in filled:
        if part is not None:
            part.copy_(part.float() + 1)
    mixture = decoder.layers[0].mlp
    for weight in (mixture.experts.gate_up, mixture.experts.down, mixture.shared.gate_up.weight):
        for whole in (weight.values, weight.scales) if fp8 else (weight,):
            assert (whole.float() == 1).all()
    assert (mixture.experts.router == 1).all() and (mixture.shared_gate == 1).all()


def test_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = make(Case("experts", "mixtral", EXPERTS, fused_experts=True), tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    _rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:, :, :32].contiguous()}))
    part = "model.layers.1.mlp.experts.0.gate_proj.weight"
    _refused(folder, f"{folder / SINGLE}: {part} has shape [96, 32], but config.json requires [96, 64]")
    _rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:7].contiguous()}))
    _refused(folder, "model.layers.1.mlp.experts.7.gate_proj.weight", "missing")


def test_tensors_of_experts_are_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    folder = make(Case("experts", "mixtral", EXPERTS), tmp_path)
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    up, down = (f"model.layers.1.block_sparse_moe.experts.3.{part}.weight" for part in ("w3", "w2"))
    tensors = load_file(folder / SINGLE)
    _rewrite(folder, lambda tensors: tensors.update({up: tensors[up][:5].contiguous()}))
    _refused(folder, f"{up} has shape [5, 64], but config.json requires [96, 64]")
    _rewrite(folder, lambda found: found.update({up: tensors[up].int()}))
    _refused(folder, f"{up} has dtype I32")
    _rewrite(folder, lambda found: [found.pop(name) for name in (gate, down)])
    _refused(folder, f"tensors {down}, {gate} are missing")
    plain = make(Case("experts", "qwen2_moe", QWEN2_EXPERTS), tmp_path / "plain")
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    _rewrite(plain, lambda tensors: tensors.pop(down))
    _refused(plain, f"tensor {down} is missing")


def test_rotary_frequencies_and_the_copy_of_a_tied_matrix_are_ignored(tmp_path: Path) -> None:
    folder = make(Case("tied", "llama", {"tie_word_embeddings": True}), tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _rewrite(folder, add)
    assert _load(folder) > 0


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
    _refused(folder, str(folder), "tensor model.layers.1.mlp.up_proj.weight is missing", "config.json")


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 5}))
    _refused(folder, "tensors model.layers.3.input_layernorm.weight, ", "and 14 more are missing")


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(2)}))
    _refused(folder, f"{folder / SINGLE}: tensor model.layers.0.mlp.gate.weight is not part of the model")


def test_a_wrong_shape_is_refused_with_both_shapes(folder: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.ones(48, 64)}))
    _refused(folder, f"{folder / SINGLE}: {name} has shape [48, 64], but config.json requires [32, 64]")


def test_a_dtype_that_cannot_be_loaded_is_refused(folder: Path) -> None:
    name = "model.norm.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}))
    _refused(folder, f"{folder / SINGLE}: {name} has dtype I8; expected F32, BF16 or F16")


def test_a_truncated_file_is_refused_with_both_sizes(folder: Path) -> None:
    file = folder / SINGLE
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1000])
    _refused(folder, f"{file} is truncated: expected {size} bytes, found {size - 1000}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 100, "is not a safetensors file"),
        (b"\x40\0\0\0\0\0\0\0{}", "is truncated: its header needs 72 bytes, but the file has 10"),
        (b"\x02\0\0\0\0\0\0\0[]", "has an invalid safetensors header"),
        (b"\x02\0\0\0\0\0\0\0{{", "has an invalid safetensors header"),
        (_framed(b"[" * 100_000), "has an invalid safetensors header"),
        (
            _framed(b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}'),
            "has an invalid safetensors header",
        ),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
    ],
    ids=["empty", "noise", "cut header", "list", "no JSON", "deep", "infinite", "Git LFS pointer"],
)
def test_a_file_that_is_not_safetensors_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / SINGLE).write_bytes(content)
    _refused(folder, f"{folder / SINGLE} {message}", "download it again")


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    _refused(sharded, f"{shard}: no such file, but {INDEX} lists it")


def test_a_shard_without_its_tensor_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    name = sorted(load_file(shard))[0]
    _rewrite(sharded, lambda tensors: tensors.__delitem__(name), shard.name)
    _refused(sharded, f"{shard} contains no tensor {name}, but {INDEX} lists it")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"{}",
        b'{"weight_map": [1]}',
        b'{"weight_map": {"a": "../b"}}',
        b'{"weight_map": {"a": ".."}}',
        b'{"weight_map": {"a": ""}}',
        b"[" * 100_000,
    ],
    ids=["cut", "empty", "list", "path", "parent", "no name", "deep"],
)
def test_a_bad_index_is_refused(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    _refused(sharded, str(sharded / INDEX))


def test_a_folder_without_safetensors_says_what_it_found(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    _refused(folder, f"{folder / SINGLE}: no such file", "found pytorch_model.bin", "safe_serialization=True")


def test_no_weight_is_read_before_everything_is_checked(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-4])
    seen: list[str] = []
    with pytest.raises(CheckpointError):
        load(_decoder(sharded), sharded, lambda progress: seen.append(progress.detail))
    assert seen == []


def test_dummy_weights_are_the_same_for_a_seed_and_keep_activations_sane(folder: Path) -> None:
    def embedding(seed: int) -> torch.Tensor:
        decoder = _decoder(folder)
        assert load_dummy(decoder, seed) == sum(p.numel() for p in _targets(folder)) * 4
        return decoder.embedding

    assert torch.equal(embedding(1), embedding(1))
    assert not torch.equal(embedding(1), embedding(2))
    decoder = _decoder(folder)
    load_dummy(decoder, 0)
    logits = decoder.logits(torch.randn(50, 64))
    assert 0.3 < logits.std() < 3


def _targets(folder: Path) -> list[torch.Tensor]:
    return [piece.target for piece in _decoder(folder).weight_shards() if piece.target is not None]


class Exchanges:
    """Two ranks that run as threads. They implement `all_to_all` with a barrier."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=600)
        self.sent: dict[str, torch.Tensor] = {}

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = threading.current_thread().name
        self.sent[mine] = tensor
        self.barrier.wait()
        received = torch.stack([self.sent[name][int(mine)] for name in ("0", "1")])
        self.barrier.wait()
        return received


@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
def test_ranks_that_exchange_columns_read_every_byte_once(
    sharded: Path, fp8: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = Exchanges()
    monkeypatch.setattr("engine.model.exchange.all_to_all", exchanges.all_to_all)
    monkeypatch.setattr("engine.model.loader.stream", partial(stream, block_bytes=block_bytes))
    decoders = [_decoder(sharded, ranks=PlaceOfRank(2, rank), fp8=fp8) for rank in range(2)]
    pieces = [decoder.weight_shards() for decoder in decoders]
    read = [0, 0]

    def run(rank: int) -> None:
        read[rank] = load(decoders[rank], sharded, no_progress, exchange=True)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tensors = tensors_of(sharded)
    check_weights((*pieces[0], *pieces[1]), tensors)
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if tensor.dim() == 1)
    assert sum(read) == sum(tensor.nbytes for tensor in tensors.values()) + norms, "each rank reads all norms"


def test_replicas_that_load_together_read_the_disk_once(folder: Path) -> None:
    """Loads that do not share reads read the disk twice unless one of them is delayed, which shows that the
    test can fail."""
    limit = 1.5 * (folder / SINGLE).stat().st_size
    assert read_by_two(folder, share_reads=True) < limit
    assert any(read_by_two(folder, share_reads=False) > limit for _ in range(20))


def read_by_two(folder: Path, *, share_reads: bool) -> int:
    """Load the weights twice at the same time. Return the number of bytes that were read from disk."""
    together = threading.Barrier(2)
    decoders = [_decoder(folder), _decoder(folder)]
    weights = decoders[1].weight_shards()
    drop(folder / SINGLE)
    before = disk_reads()

    def run(decoder: Decoder) -> None:
        together.wait()
        load(decoder, folder, no_progress, share_reads=share_reads)

    threads = [threading.Thread(target=run, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = disk_reads() - before
    check_weights(weights, tensors_of(folder))
    return read


def disk_reads() -> int:
    """Return the number of bytes that this process has read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])
