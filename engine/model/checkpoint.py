"""Finds a checkpoint's tensors by reading the headers of its safetensors files. Weights are not read here."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import CheckpointError, unreadable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER_BYTES = 100_000_000  # maximum header size in the safetensors format
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
"""Element size, in bytes, of each loadable dtype."""
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised for invalid JSON or for data in an unexpected format."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    """Dtype in safetensors notation, e.g. "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """File offset of the tensor's first byte."""
    nbytes: int
    modified_ns: int
    """The file's modification time, in nanoseconds, when the header was read."""


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors in a checkpoint folder, keyed by name. The tensors are in `model.safetensors` or in
    the files listed in the folder's index.

    Raises CheckpointError if a file is missing, unreadable, malformed or truncated.
    """
    index = folder / INDEX
    if not index.exists():
        return _read_header(_single_file(folder))
    weight_map = _read_index(index)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        file = folder / shard
        if not file.exists():
            raise CheckpointError(f"{file}: no such file, but {INDEX} lists it", "download the missing shard")
        for name, entry in _read_header(file).items():
            if weight_map.get(name, shard) == shard:
                entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(
                f"{folder / shard} contains no tensor {name}, but {INDEX} lists it; the shards and "
                "the index belong to different checkpoints",
                "download them again",
            )
    return entries


def _single_file(folder: Path) -> Path:
    file = folder / SINGLE
    if file.exists():
        return file
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pth"))
    raise CheckpointError(
        f"{file}: no such file, and no {INDEX}; found {', '.join(found) or 'no weights'} instead",
        "save the model with save_pretrained(safe_serialization=True)",
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, *_MALFORMED) as error:
        raise CheckpointError(
            f"{index} has no readable weight_map ({error!r})", "download it again"
        ) from None
    for name, shard in weight_map.items() if isinstance(weight_map, dict) else [("weight_map", weight_map)]:
        # Accept only plain file names, so that the index cannot refer to files outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{index}: {name} is {shard!r}", "it must be the name of a file in the folder"
            )
    return weight_map


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            size = status.st_size
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > _LARGEST_HEADER_BYTES:
                raise CheckpointError(f"{file} is not a safetensors file", "download it again")
            if 8 + header_bytes > size:
                raise CheckpointError(
                    f"{file} is truncated: its header needs {8 + header_bytes} bytes, but the file has "
                    f"{size}",
                    "download it again",
                )
            header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        data = 8 + header_bytes
        entries = {name: _entry(file, value, data, status.st_mtime_ns) for name, value in header.items()}
        expected = max((entry.offset + entry.nbytes for entry in entries.values()), default=data)
    except OSError as error:
        raise unreadable(file, error) from None
    except _MALFORMED as error:
        raise CheckpointError(
            f"{file} has an invalid safetensors header ({error!r})", "download it again"
        ) from None
    if size < expected:
        raise CheckpointError(
            f"{file} is truncated: expected {expected} bytes, found {size}", "download it again"
        )
    return entries


def _entry(file: Path, value: dict[str, Any], data: int, modified_ns: int) -> TensorEntry:
    """Parse a header's entry for one tensor. Offsets in the header are relative to the file offset `data`."""
    dtype, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
    first, last = (int(n) for n in value["data_offsets"])
    if first < 0 or last < first or min(shape, default=0) < 0:
        raise ValueError(f"a tensor of shape {list(shape)} cannot span bytes {first} to {last}")
    if dtype in _DTYPE_BYTES and last - first != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise ValueError(f"a {dtype} tensor of shape {list(shape)} cannot have {last - first} bytes")
    return TensorEntry(file, dtype, shape, data + first, last - first, modified_ns)
