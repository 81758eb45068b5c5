"""Maps the names of experts' tensors in checkpoints to one naming scheme. Published checkpoints have one
tensor for each matrix of each expert; Mixtral's tensors have different names. transformers 5 can store the
matrices of all experts of a layer in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from engine.model.checkpoint import TensorEntry

_MIXTRAL = re.compile(r"\.block_sparse_moe\.(?:experts\.(\d+)\.(w[123])\.)?")
_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""For each tensor that contains all experts, the matrices of one expert, in the order in which they are
stored."""


def split_experts(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors with uniform names for experts: `….mlp.experts.INDEX.gate_proj.weight`,
    and the same with `up_proj` and `down_proj`. A tensor `[experts, rows, columns]` that contains all experts
    is replaced by one entry per matrix."""
    return {
        part: each
        for name, entry in entries.items()
        for part, each in _split(_MIXTRAL.sub(_named, name), entry)
    }


def _named(found: re.Match[str]) -> str:
    expert, part = found.groups()
    return ".mlp." if expert is None else f".mlp.experts.{expert}.{_MIXTRAL_PARTS[part]}."


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
