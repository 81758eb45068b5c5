"""Fills a decoder's weights: streamed from safetensors, or random.

Each rank reads only its own slices (`engine.model.streaming`): the host never holds more than a ring of
buffers beside the model. Conversions, and quantising to FP8, happen on the device.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry, read_entries
from engine.model.decoder import Decoder
from engine.model.layers import WeightShard
from engine.model.slices import Slice
from engine.model.streaming import stream
from engine.model.weight_file import keep_cached

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""

_LOADABLE = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_SCALE = "_scale"
"""What is added to the name of an FP8 weight to find its scales: one, or one for each output."""
_STATIC_SCALES = (".input_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale")
"""Of activations and cache, found beforehand on samples; ours are found for each token."""
_NAMES_SHOWN = 4
_PROGRESS_S = 0.1
"""Between two reports of progress, unless another file is begun."""


def load(decoder: Decoder, folder: str | Path, progress: Progress) -> int:
    """Fills every weight of `decoder` from the checkpoint in `folder`; returns the bytes that were read.

    Raises CheckpointError, with file, tensor and both shapes, before any weight is read when a tensor is
    missing, unknown, of another shape or of a dtype that cannot be loaded, or a file is truncated;
    WeightsTooLarge where a GPU's memory runs out. Rotary frequencies, the copy of a tied output matrix and
    static scales of activations, which some checkpoints carry, are ignored.
    """
    folder = Path(folder)
    entries = read_entries(folder)
    pieces = {piece.name: piece for piece in decoder.weight_shards()}
    _check(entries, pieces, folder, tied=decoder.config.tie_word_embeddings)
    with decoder.fit.explained():
        done = _fill(pieces, entries, decoder, progress)
        _finish(decoder)
    if decoder.ranks.rank == 0:
        keep_cached(sorted({entries[name].file for name in pieces}))
    return done


def load_dummy(decoder: Decoder, seed: int) -> int:
    """Fills every weight with random numbers made on the device; returns their bytes.

    Matrices are normal with variance 1 / columns, norms are one, biases small. A tensor depends only on its
    name, the seed, the dtype and the kind of device, so ranks of any number hold slices of the same model.
    Raises WeightsTooLarge where a GPU's memory runs out.
    """
    done = 0
    with decoder.fit.explained():
        for piece in decoder.weight_shards():
            if piece.target is None:
                continue
            _randomise(piece, decoder, seed)
            done += piece.target.nbytes
        _finish(decoder)
    return done


def _check(entries: dict[str, Entry], pieces: dict[str, WeightShard], folder: Path, tied: bool) -> None:
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


def _fill(
    pieces: dict[str, WeightShard], entries: dict[str, Entry], decoder: Decoder, progress: Progress
) -> int:
    """Streams every piece's numbers into it; returns their bytes. Nothing of the stream outlives the call:
    what still held a buffer would keep `_finish` from giving its memory back."""
    device, ranks = decoder.device, decoder.ranks.size
    scales = _read_scales(pieces, entries, device)
    wanted = [
        _slice(piece, entries[piece.name], ranks) for piece in pieces.values() if piece.target is not None
    ]
    wanted.sort(key=lambda part: (part.entry.file, part.entry.offset))
    total = sum(part.nbytes for part in wanted)
    done = 0
    file, told_at = None, 0.0

    def fill(part: Slice, numbers: torch.Tensor) -> None:
        block = _block(pieces[part.name], part)
        numbers = numbers if block.dim == 0 else block.part(numbers)
        if part.entry.dtype == _FP8:
            each = scales[part.name + _SCALE]
            rows = slice(part.first_row, part.first_row + part.rows)
            block.fill_quantised(numbers, each if len(each) == 1 else each[rows])
        else:
            block.fill(numbers)

    def place(whole: Slice) -> torch.Tensor | None:
        piece = pieces[whole.name]
        assert piece.target is not None
        whole_rows = piece.target.shape[1:] == whole.entry.shape[1:] and piece.target.is_contiguous()
        as_is = piece.scales is None and piece.target.dtype == whole.dtype
        return piece.target if whole_rows and as_is else None

    for part in stream(wanted, device, fill, place):
        done += part.nbytes
        now = time.monotonic()
        if part.entry.file != file or now - told_at >= _PROGRESS_S or done == total:
            file, told_at = part.entry.file, now
            progress(f"loading {file.name}", done / total)
    return done


def _randomise(piece: WeightShard, decoder: Decoder, seed: int) -> None:
    generator = torch.Generator(decoder.device).manual_seed(seed ^ zlib.crc32(piece.name.encode()))
    whole = torch.empty(piece.shape, dtype=decoder.dtype, device=decoder.device)
    if len(piece.shape) == 2:
        whole.normal_(std=piece.shape[1] ** -0.5, generator=generator)
    elif piece.name.endswith(".bias"):
        whole.normal_(std=0.02, generator=generator)
    else:
        whole.fill_(1.0)
    piece.fill(piece.part(whole))


def _slice(piece: WeightShard, entry: Entry, ranks: int) -> Slice:
    """What a rank reads of a piece's tensor: its rows, or whole rows of which it takes some columns."""
    assert piece.target is not None
    rows = piece.target.shape[0]
    shared = ranks > 1 and rows == entry.shape[0]
    return Slice(piece.name, entry, piece.start if piece.dim == 0 else 0, rows, shared)


def _block(piece: WeightShard, part: Slice) -> WeightShard:
    """The rows of a piece that a part of its slice fills."""
    assert piece.target is not None
    first = part.first_row - (piece.start if piece.dim == 0 else 0)
    rows = slice(first, first + part.rows)
    return replace(
        piece, target=piece.target[rows], scales=None if piece.scales is None else piece.scales[rows]
    )


def _read_scales(
    pieces: dict[str, WeightShard], entries: dict[str, Entry], device: torch.device
) -> dict[str, torch.Tensor]:
    """By their names: the float32 scales of all rows of a weight `[rows]`, or the one of all `[1]`."""
    wanted = []
    for piece in pieces.values():
        if piece.target is not None and entries[piece.name].dtype == _FP8:
            name = piece.name + _SCALE
            wanted.append(Slice(name, entries[name], 0, math.prod(entries[name].shape[:1])))
    wanted.sort(key=lambda part: (part.entry.file, part.entry.offset))
    found = {part.name: torch.empty(part.rows, device=device) for part in wanted}

    def fill(part: Slice, numbers: torch.Tensor) -> None:
        found[part.name][part.first_row : part.first_row + part.rows] = numbers.flatten()

    for _ in stream(wanted, device, fill):
        pass
    if not found:
        return {}
    # Asked of the device once, for all.
    sound = torch.stack([(scales.isfinite() & (scales >= 0)).all() for scales in found.values()]).tolist()
    bad = [name for name, good in zip(found, sound, strict=True) if not good]
    if bad:
        raise CheckpointError(
            f"{entries[bad[0]].file}: {_names(bad)} not all finite and at least 0, as scales are; "
            "download it again"
        )
    return found


def _finish(decoder: Decoder) -> None:
    decoder.finish()
    if decoder.device.type == "cuda":
        # What is left in the allocator's cache would be taken for working memory as the KV pool is sized.
        torch.cuda.empty_cache()
