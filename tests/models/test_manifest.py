"""Tests of model folder manifests."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from appliance.models.manifest import ManifestError, check_manifest, read_manifest
from store.models import ModelFile

LARGE = 40 << 20
"""Size of a file that is too large to be compared completely."""


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(b"1" * LARGE)
    return path


def test_a_large_file_replaced_by_one_of_the_same_size_is_named(shard: Path) -> None:
    files = read_manifest(str(shard.parent))
    check_manifest(str(shard.parent), files)
    shard.write_bytes(b"2" * LARGE)
    with pytest.raises(ManifestError, match=f"{shard.name} has changed since this version was added"):
        check_manifest(str(shard.parent), files)


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - (2 << 20)])
def test_a_change_of_a_few_megabytes_is_found_anywhere_in_a_large_file(shard: Path, place: int) -> None:
    files = read_manifest(str(shard.parent))
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(b"2" * (2 << 20))
    with pytest.raises(ManifestError, match="has changed since"):
        check_manifest(str(shard.parent), files)


def test_a_manifest_without_samples_still_compares_the_size(shard: Path) -> None:
    [file] = read_manifest(str(shard.parent))
    stored = msgspec.json.encode((file.name, file.bytes, file.sha256))
    old = msgspec.json.decode(stored, type=ModelFile)
    shard.write_bytes(b"2" * LARGE)
    check_manifest(str(shard.parent), (old,))
    shard.write_bytes(b"2" * (LARGE + 1))
    with pytest.raises(ManifestError, match=f"has changed from {LARGE} to {LARGE + 1} bytes"):
        check_manifest(str(shard.parent), (old,))


def test_a_changed_byte_between_two_samples_of_a_large_file_is_found(shard: Path) -> None:
    files = read_manifest(str(shard.parent))
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(1 << 20)  # between the first and the second sample
        file.write(b"2")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ManifestError, match="has changed since"):
        check_manifest(str(shard.parent), files)
    with shard.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"1")
    assert shard.stat().st_mtime_ns != files[0].mtime_ns
    check_manifest(str(shard.parent), files)


def test_a_file_whose_name_is_not_utf_8_is_found_again(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.json"
    with open(path, "wb") as file:
        file.write(b"1")
    files = read_manifest(str(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(files), type=tuple[ModelFile, ...]) == files
    check_manifest(str(tmp_path), files)
    os.rename(path, path.replace(b"\xff", b"\xfe"))
    with pytest.raises(ManifestError, match="has been deleted"):
        check_manifest(str(tmp_path), files)
