"""Finds the experts' tensors in checkpoints. Published checkpoints have a separate tensor for each matrix of
each expert; Mixtral's names differ from those of other model families. transformers 5 can store all of a
layer's expert matrices in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.model.checkpoint import TensorEntry
from engine.model.layers import WeightShard

_MIXTRAL = ".block_sparse_moe."
_MIXTRAL_NAMES = {".mlp.": _MIXTRAL, ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}
"""Parts of tensor names, mapped to their counterparts in Mixtral's published checkpoints."""
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Names of tensors that contain all experts of a layer, each mapped to the matrices that the tensor stores
per expert, in storage order."""


def with_names_of(entries: dict[str, TensorEntry], shards: Iterable[WeightShard]) -> list[WeightShard]:
    """Return the shards, renamed to match the tensor names in the checkpoint (`entries`)."""
    if not any(_MIXTRAL in name for name in entries):
        return list(shards)
    return [replace(shard, name=_mixtral_name(shard.name)) for shard in shards]


def _mixtral_name(name: str) -> str:
    for part, theirs in _MIXTRAL_NAMES.items():
        name = name.replace(part, theirs)
    return name


def split_experts(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the checkpoint's tensors, with each tensor that contains all experts, `[experts, rows,
    columns]`, replaced by one entry per expert matrix: `….mlp.experts.INDEX.gate_proj.weight`, and likewise
    for `up_proj` and `down_proj`."""
    return {part: each for name, entry in entries.items() for part, each in _split(name, entry)}


def _split(name: str, entry: TensorEntry) -> Iterator[tuple[str, TensorEntry]]:
    prefix, _, last = name.rpartition(".")
    parts = _FUSED.get(last, ()) if prefix.endswith(".mlp.experts") else ()
    if not parts or len(entry.shape) != 3 or not entry.nbytes or entry.shape[1] % len(parts):
        yield name, entry
        return
    experts, rows, columns = entry.shape
    shape, nbytes = (rows // len(parts), columns), entry.nbytes // (experts * len(parts))
    for expert in range(experts):
        for index, part in enumerate(parts):
            offset = entry.offset + (expert * len(parts) + index) * nbytes
            each = replace(entry, shape=shape, offset=offset, nbytes=nbytes)
            yield f"{prefix}.{expert}.{part}.weight", each
