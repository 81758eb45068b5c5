"""Fills a decoder's weights: streamed from safetensors, or random.

Each rank reads only its own slices, tensor by tensor, from memory-mapped files: the host never holds more
than one tensor's slice beside the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.config import CheckpointError
from engine.model.checkpoint import Entry, read_entries
from engine.model.decoder import Decoder
from engine.model.layers import Piece

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

_LOADABLE = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_SCALE = "_scale"
"""What is added to the name of an FP8 weight to find its scales: one, or one for each output."""
_STATIC_SCALES = (".input_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale")
"""Of activations and cache, found beforehand on samples; ours are found for each token."""
_NAMES_SHOWN = 4


def load(decoder: Decoder, folder: str | Path, progress: Progress) -> int:
    """Fills every weight of `decoder` from the checkpoint in `folder`; returns the bytes that were read.

    Raises CheckpointError, with file, tensor and both shapes, before any weight is read when a tensor is
    missing, unknown, of another shape or of a dtype that cannot be loaded, or a file is truncated. Rotary
    frequencies, the copy of a tied output matrix and static scales of activations, which some checkpoints
    carry, are ignored.
    """
    folder = Path(folder)
    entries = read_entries(folder)
    pieces = {piece.name: piece for piece in decoder.pieces()}
    _check(entries, pieces, folder, tied=decoder.config.tie_word_embeddings)
    by_file: dict[Path, list[Piece]] = {}
    for name, piece in pieces.items():
        if piece.target is not None:
            by_file.setdefault(entries[name].file, []).append(piece)
    total = max(1, sum(_bytes_wanted(piece, entries[piece.name]) for piece in pieces.values()))
    done = 0
    for file in sorted(by_file):
        try:
            with safe_open(file, framework="pt") as shard:
                for piece in by_file[file]:
                    part = piece.part(shard.get_slice(piece.name))
                    if entries[piece.name].dtype == _FP8:
                        piece.fill_quantised(part, _scales(piece, entries, shard))
                    else:
                        piece.fill(part)
                    done += _bytes_wanted(piece, entries[piece.name])
                    progress(f"loading {file.name}", done / total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from error
    decoder.finish()
    return done


def load_dummy(decoder: Decoder, seed: int) -> int:
    """Fills every weight with random numbers made on the device; returns their bytes.

    Matrices are normal with variance 1 / columns, norms are one, biases small. A tensor depends only on its
    name, the seed, the dtype and the kind of device, so ranks of any number hold slices of the same model.
    """
    done = 0
    for piece in decoder.pieces():
        if piece.target is None:
            continue
        generator = torch.Generator(decoder.device).manual_seed(seed ^ zlib.crc32(piece.name.encode()))
        whole = torch.empty(piece.shape, dtype=decoder.dtype, device=decoder.device)
        if len(piece.shape) == 2:
            whole.normal_(std=piece.shape[1] ** -0.5, generator=generator)
        elif piece.name.endswith(".bias"):
            whole.normal_(std=0.02, generator=generator)
        else:
            whole.fill_(1.0)
        piece.fill(piece.part(whole))
        done += piece.target.nbytes
    decoder.finish()
    return done


def _check(entries: dict[str, Entry], pieces: dict[str, Piece], folder: Path, tied: bool) -> None:
    # Only matrices have scales: a vector of FP8 is as unloadable as one of integers.
    quantised = {
        name
        for name, piece in pieces.items()
        if name in entries and entries[name].dtype == _FP8 and len(piece.shape) == 2
    }
    missing = [name for name in sorted(pieces) if name not in entries]
    if missing:
        raise CheckpointError(f"{folder}: {_names(missing)} missing; the model of config.json needs them")
    for name, piece in pieces.items():
        _check_dtype(entries[name], name, (*_LOADABLE, _FP8) if len(piece.shape) == 2 else _LOADABLE)
    scales = {name + _SCALE for name in quantised}
    missing = [name for name in sorted(scales) if name not in entries]
    if missing:
        raise CheckpointError(
            f"{folder}: {_names(missing)} missing; an FP8 weight needs one scale, or one for each output"
        )
    wanted = {*pieces, *scales}
    unknown = [name for name in entries if name not in wanted and not _harmless(name, tied)]
    if unknown:
        raise CheckpointError(
            f"{entries[unknown[0]].file}: {_names(unknown)} unknown; config.json describes a model without"
        )
    for name, piece in pieces.items():
        entry = entries[name]
        if entry.shape != piece.shape:
            raise CheckpointError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, config.json needs {list(piece.shape)}"
            )
        if name in quantised:
            scale = entries[name + _SCALE]
            _check_dtype(scale, name + _SCALE, _LOADABLE)
            if scale.shape not in ((), (1,), entry.shape[:1], (entry.shape[0], 1)):
                raise CheckpointError(
                    f"{scale.file}: {name + _SCALE} has shape {list(scale.shape)}; one scale, or one for "
                    f"each of {entry.shape[0]} outputs, can be loaded"
                )


def _check_dtype(entry: Entry, name: str, loadable: tuple[str, ...]) -> None:
    if entry.dtype not in loadable:
        raise CheckpointError(
            f"{entry.file}: {name} has dtype {entry.dtype}; {', '.join(loadable)} can be loaded"
        )


def _harmless(name: str, tied: bool) -> bool:
    if tied and name.startswith("lm_head.weight"):
        return True
    return name.endswith((".rotary_emb.inv_freq", *_STATIC_SCALES))


def _names(names: list[str]) -> str:
    """ "tensor a is", "tensors a, b and 7 more are"."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    if more > 0:
        shown += f" and {more} more"
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def _bytes_wanted(piece: Piece, entry: Entry) -> int:
    if piece.target is None or not piece.target.numel():
        return 0
    whole = 1
    for length in piece.shape:
        whole *= length
    return entry.nbytes * piece.target.numel() // whole


def _scales(piece: Piece, entries: dict[str, Entry], shard: Any) -> torch.Tensor:
    """The float32 scales of a piece's rows, or the one of all, from the same file or another."""
    name = piece.name + _SCALE
    if name in shard.keys():  # noqa: SIM118 - it is no mapping
        scales = shard.get_tensor(name)
    else:
        with safe_open(entries[name].file, framework="pt") as other:
            scales = other.get_tensor(name)
    scales = scales.float().flatten()
    whole = len(scales) == 1 or piece.dim != 0
    return scales if whole else piece.part(scales)
