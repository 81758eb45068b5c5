"""Tests that streamed data of any size equals the files' contents, and that errors name the data that could
not be read."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CheckpointError
from engine.model import fetching
from engine.model.checkpoint import INDEX, TensorEntry, read_entries
from engine.model.slices import TensorSlice
from engine.model.streaming import no_target, stream
from engine.model.weight_file import PAGE, WeightFile
from tests.engine.model.page_cache import cached_pages, drop

CPU = torch.device("cpu")
BLOCK_SIZES = [1, 5000, 1 << 20]


@pytest.fixture(params=["cached", "on disk", "in pieces"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two files that contain odd shapes in several dtypes, many small tensors, and rows that are larger
    than some of the staging buffers."""
    torch.manual_seed(5)
    first = {
        "scalar": torch.randn(()),
        "odd bytes": torch.randn(7).to(torch.float8_e4m3fn),
        "matrix": torch.randn(333, 17).bfloat16(),
        "long rows": torch.randn(3, 3001),
        "nothing": torch.empty(0, 4),
        "experts": torch.randn(5, 3, 7).half(),
    }
    second = {f"small {number}": torch.randn(number % 13 + 1) for number in range(300)}
    save_file(first, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    if request.param == "in pieces":
        monkeypatch.setattr(fetching, "PIECE_BYTES", PAGE)
    if request.param != "cached":
        # The "uncached" case is simulated, because files this small are cached as soon as their headers are
        # read.
        monkeypatch.setattr(WeightFile, "_is_cached", lambda *asked: False)
    return tmp_path


def _whole(name: str, entry: TensorEntry) -> TensorSlice:
    return TensorSlice(name, entry, 0, entry.shape[0] if entry.shape else 1)


def _in_order(folder: Path) -> list[TensorSlice]:
    slices = [_whole(name, entry) for name, entry in read_entries(folder).items()]
    return sorted(slices, key=lambda each: (each.entry.file, each.entry.offset))


def _drain(slices: list[TensorSlice], **sizes: int) -> None:
    for _ in stream(slices, CPU, lambda block, numbers: None, **sizes):
        pass


@pytest.fixture(params=[False, True], ids=["filled in", "as it is"])
def placed(request: pytest.FixtureRequest) -> bool:
    """Whether blocks are copied directly to their final destination."""
    return request.param


def _collect(slices: list[TensorSlice], block_bytes: int, placed: bool) -> dict[str, torch.Tensor]:
    """Concatenate contiguous blocks: each must start where the previous block ends."""
    found = {
        each.name: torch.zeros(each.rows, *each.entry.shape[1:], dtype=each.dtype)
        for each in slices
        if each.nbytes
    }
    first = {each.name: each.first_row for each in slices}
    rows = dict(first)

    def target(block: TensorSlice) -> torch.Tensor:
        start = block.first_row - first[block.name]
        return found[block.name][start : start + block.rows]

    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        assert not placed
        target(block).copy_(numbers)

    for block in stream(slices, CPU, fill, target if placed else no_target, block_bytes=block_bytes):
        assert block.first_row == rows[block.name]
        assert block.nbytes <= max(block_bytes, block.row_bytes)
        rows[block.name] += block.rows
    assert rows == {each.name: each.first_row + each.rows for each in slices}
    return found


def _bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_every_tensor_is_streamed_bitwise_equal(folder: Path, block_bytes: int, placed: bool) -> None:
    found = _collect(_in_order(folder), block_bytes, placed)
    expected = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    del expected["nothing"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == (tensor.shape or (1,)), name
        assert _bytes(found[name]) == _bytes(tensor), name


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_each_tensor_of_a_batch_is_copied_or_filled(folder: Path, block_bytes: int) -> None:
    slices = [each for each in _in_order(folder) if each.name.startswith("small")]
    found = {each.name: torch.zeros(each.rows) for each in slices}

    def target(whole: TensorSlice) -> torch.Tensor | None:
        return found[whole.name] if whole.name.endswith(("0", "3", "7")) else None

    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        assert target(block) is None
        found[block.name][block.first_row : block.first_row + block.rows] = numbers

    streamed = [block.name for block in stream(slices, CPU, fill, target, block_bytes=block_bytes)]
    assert list(dict.fromkeys(streamed)) == [each.name for each in slices]
    for name, tensor in load_file(folder / "b.safetensors").items():
        assert torch.equal(found[name], tensor), name


def test_small_tensors_are_read_in_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    real = fetching.ReaderPool.read

    def read(readers: fetching.ReaderPool, blocks: list[fetching.FileBlock], *into: Any) -> Any:
        batches.append(len(blocks))
        assert blocks[-1].end <= (100 + 2) * PAGE
        return real(readers, blocks, *into)

    monkeypatch.setattr(fetching.ReaderPool, "read", read)
    slices = [each for each in _in_order(folder) if each.name.startswith("small")]
    _drain(slices, block_bytes=100 * PAGE)
    assert sum(batches) == 300 and len(batches) <= 4


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
def test_only_the_requested_rows_are_streamed(folder: Path, block_bytes: int, placed: bool) -> None:
    entries = read_entries(folder)
    asked = {"matrix": (100, 131), "long rows": (1, 1), "experts": (3, 2)}
    slices = [TensorSlice(name, entries[name], *rows) for name, rows in asked.items()]
    tensors = load_file(folder / "a.safetensors")
    for name, found in _collect(slices, block_bytes, placed).items():
        first, count = asked[name]
        assert torch.equal(found, tensors[name][first : first + count]), name


@pytest.mark.parametrize("header_bytes", range(200, 209))
def test_tensors_may_begin_anywhere_in_a_file(tmp_path: Path, header_bytes: int, placed: bool) -> None:
    """The safetensors library aligns tensors to 8 bytes when it writes a file, but the format does not
    require that."""
    numbers = torch.arange(3000, dtype=torch.float32)
    header = {"numbers": {"dtype": "F32", "shape": [30, 100], "data_offsets": [1, 12_001]}}
    encoded = json.dumps(header).encode().ljust(header_bytes)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\xff" + numbers.numpy().tobytes())
    slices = [_whole("numbers", read_entries(tmp_path)["numbers"])]
    drop(file)
    found = _collect(slices, 8000, placed)
    assert torch.equal(found["numbers"].flatten(), numbers)


def test_an_empty_stream_is_not_an_error(folder: Path) -> None:
    _drain([])
    _drain([_whole("nothing", read_entries(folder)["nothing"])])


def test_a_file_that_shrinks_while_it_is_read_is_refused(folder: Path) -> None:
    *_, last = _in_order(folder)
    first = _whole("matrix", read_entries(folder)["matrix"])
    blocks = stream([first, last], CPU, lambda block, numbers: None, block_bytes=64)
    next(blocks)
    needed = last.entry.offset + last.entry.nbytes
    os.truncate(last.entry.file, needed - 4)
    with pytest.raises(CheckpointError) as caught:
        list(blocks)
    assert f"{last.entry.file} is truncated: {last.name} needs {needed} bytes" in str(caught.value)
    assert f"the file has {needed - 4}; download it again" in str(caught.value)


@pytest.mark.parametrize("name", ["a.safetensors", "b.safetensors"])
def test_a_file_modified_after_its_header_was_read_is_refused(folder: Path, name: str) -> None:
    slices = _in_order(folder)
    file = folder / name
    written = file.stat().st_mtime_ns
    os.utime(file, ns=(written, written + 1_000_000))
    with pytest.raises(CheckpointError) as caught:
        _drain(slices)
    assert f"{file} was modified while it was being read; try again" in str(caught.value)


def test_a_file_modified_while_its_last_block_is_used_is_refused(folder: Path) -> None:
    *_, last = _in_order(folder)

    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        os.utime(last.entry.file, ns=(0, 0))

    with pytest.raises(CheckpointError, match="was modified while it was being read"):
        list(stream([last], CPU, fill))


def test_a_file_whose_modification_time_is_unknown_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a stale file handle on a network file system."""
    slices = _in_order(folder)

    def status(file: WeightFile) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(WeightFile, "status", status)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read \(Stale file handle\)"):
        _drain(slices)


def test_all_readers_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader waits in its first read until all readers have started."""
    together = threading.Barrier(fetching.READERS)
    begun: set[int] = set()
    real = WeightFile.read

    def read(file: WeightFile, *asked: Any) -> None:
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            together.wait(timeout=600)
        real(file, *asked)

    monkeypatch.setattr(WeightFile, "read", read)
    save_file({"matrix": torch.randn(50, 1024)}, tmp_path / "model.safetensors")
    _drain(_in_order(tmp_path), block_bytes=4096)
    assert len(begun) == fetching.READERS


def test_a_file_that_was_shorter_when_it_was_opened_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a download that is restarted."""
    whole = _whole("matrix", read_entries(folder)["matrix"])
    size = whole.entry.file.stat().st_size
    os.truncate(whole.entry.file, whole.entry.offset)

    def past_cache(file: WeightFile, *asked: Any) -> bool:
        os.truncate(whole.entry.file, size)
        return real(file, *asked)

    real = WeightFile.past_cache
    monkeypatch.setattr(WeightFile, "past_cache", past_cache)
    with pytest.raises(CheckpointError, match="was modified while it was being read"):
        _drain([whole])


def test_a_failing_disk_is_named_with_the_tensor(folder: Path) -> None:
    # This is a real I/O error: the first page of a process's memory is never mapped.
    entry = replace(read_entries(folder)["matrix"], file=Path("/proc/self/mem"), offset=0)
    with pytest.raises(
        CheckpointError, match=r"/proc/self/mem: matrix cannot be read \(Input/output error\)"
    ):
        _drain([_whole("matrix", entry)])


def test_a_missing_file_is_named(folder: Path) -> None:
    slices = _in_order(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read \(No such file"):
        _drain(slices)


def test_weights_may_be_streamed_in_inference_mode(folder: Path, placed: bool) -> None:
    with torch.inference_mode():
        found = _collect(_in_order(folder), 64, placed)
    assert torch.equal(found["matrix"], load_file(folder / "a.safetensors")["matrix"])


def test_an_exception_of_fill_is_raised_and_leaves_no_thread(folder: Path) -> None:
    def fill(block: TensorSlice, numbers: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        list(stream(_in_order(folder), CPU, fill))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def test_a_stream_closed_early_leaves_no_thread_and_no_open_file(folder: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    blocks = stream(_in_order(folder), CPU, lambda block, numbers: None, block_bytes=64)
    for _ in range(2 * fetching.READERS):
        next(blocks)
    blocks.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]
    assert len(os.listdir("/proc/self/fd")) <= opened


@pytest.mark.parametrize("shared", [False, True])
def test_only_rows_shared_by_ranks_stay_in_the_page_cache(tmp_path: Path, shared: bool) -> None:
    save_file({"matrix": torch.randn(1000, 1000)}, tmp_path / "model.safetensors")
    part = replace(_whole("matrix", read_entries(tmp_path)["matrix"]), shared=shared)
    drop(tmp_path / "model.safetensors")
    _drain([part], block_bytes=1 << 16)
    cached, pages = cached_pages(tmp_path / "model.safetensors"), 4_000_000 // PAGE
    assert cached >= pages if shared else cached < pages // 2
