"""Fills a decoder's weights, either from safetensors files or with random numbers.

On GPUs, each rank reads an equal share of the checkpoint (`engine.model.streaming`, `engine.model.exchange`).
Host memory is needed only for a ring of staging buffers. Conversion and FP8 quantisation run on the device.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.block_scales import dequantised, fill_scales, scale_shape
from engine.model.checkpoint import TensorEntry, read_entries
from engine.model.decoder import Decoder
from engine.model.exchange import ColumnExchange
from engine.model.expert_names import split_experts, with_names_of
from engine.model.layers import WeightShard
from engine.model.slices import TensorSlice
from engine.model.streaming import stream
from engine.model.weight_file import fits_page_cache, keep_cached
from engine.progress import ProgressCallback, no_progress
from engine.rank_messages import Progress

_LOADABLE = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_SCALE = "_scale"
"""Name suffix of a scale tensor with one scale for the whole FP8 weight or one per output."""
_BLOCK_SCALE = "_scale_inv"
"""Name suffix of a scale tensor with one scale per block. Despite the name, values are multiplied by these
scales, not divided."""
_STATIC_SCALES = (".input_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".output_scale")
"""Name suffixes of precomputed activation and KV cache scales, which are ignored because the engine computes
a scale per token."""
_NAMES_SHOWN = 4
_MISMATCH = "use config.json and the weights from the same checkpoint"
_PROGRESS_S = 0.1
"""Minimum interval, in seconds, between progress reports about the same file."""


def load(
    decoder: Decoder,
    folder: str | Path,
    progress: ProgressCallback,
    *,
    exchange: bool = False,
    share_reads: bool = False,
) -> int:
    """Fill every weight of `decoder` from the checkpoint in `folder` and return the number of bytes read.

    With `exchange`, each rank reads only some of the rows of tensors that are split by column, and exchanges
    columns with the other ranks (`engine.model.exchange`); all ranks must call this function. Otherwise,
    every rank reads all rows, which is better on CPUs, where reading the page cache is faster than exchanging
    data. With `share_reads`, files that fit into the page cache are read through it, because other replicas
    may read them at the same time.

    Raises CheckpointError, before reading any weight, if a file is truncated or a tensor is missing, unknown,
    of the wrong shape or of an unsupported dtype. Raises WeightsTooLarge if a GPU runs out of memory. The
    checkpoint's rotary frequencies, static activation scales and copy of a tied output matrix are ignored.
    """
    folder = Path(folder)
    entries = split_experts(read_entries(folder))
    shards = {shard.name: shard for shard in with_names_of(entries, decoder.weight_shards())}
    config = decoder.config
    _check(entries, shards, folder, tied=config.tie_word_embeddings, blocks=config.fp8_blocks)
    files = sorted({entries[name].file for name in shards})
    share_reads = share_reads and fits_page_cache(files)
    with decoder.fit.explained():
        done = _fill(shards, entries, decoder, progress, exchange, share_reads)
        _finish(decoder, progress)
    if decoder.ranks.rank == 0:
        keep_cached(files)
    return done


def load_dummy(decoder: Decoder, seed: int, progress: ProgressCallback = no_progress) -> int:
    """Fill every weight with random numbers generated on the device, and return the weights' size in bytes.

    Matrices are normally distributed with variance 1 / columns, norm gains are 1, and biases are small. A
    tensor depends only on its name, the seed, the dtype and the device type, so the model is the same for any
    number of ranks. Raises WeightsTooLarge if a GPU runs out of memory.
    """
    done, reported_at = 0, 0.0
    with decoder.fit.explained():
        shards = decoder.weight_shards()
        total = sum(shard.target.nbytes for shard in shards if shard.target is not None)
        for shard in shards:
            if shard.target is None:
                continue
            _randomise(shard, decoder, seed)
            done += shard.target.nbytes
            now = time.monotonic()
            if now - reported_at >= _PROGRESS_S or done == total:
                reported_at = now
                progress(Progress("read", done, total, "bytes", "random weights"))
        _finish(decoder, progress)
    return done


def _check(
    entries: dict[str, TensorEntry], shards: dict[str, WeightShard], folder: Path, *, tied: bool, blocks: bool
) -> None:
    # Only matrices have scales, so FP8 tensors of other shapes are not included.
    quantised = {
        name
        for name, shard in shards.items()
        if name in entries and entries[name].dtype == _FP8 and len(shard.shape) == 2
    }
    missing = [name for name in sorted(shards) if name not in entries]
    if missing:
        raise CheckpointError(
            f"{folder}: {_names(missing)} missing, but required by the model in config.json", _MISMATCH
        )
    for name, shard in shards.items():
        _check_dtype(entries[name], name, (*_LOADABLE, _FP8) if len(shard.shape) == 2 else _LOADABLE)
    suffix = _BLOCK_SCALE if blocks else _SCALE
    scales = {name + suffix for name in quantised}
    missing = [name for name in sorted(scales) if name not in entries]
    if missing:
        needs = "scales, one per block" if blocks else "one scale, or one per output"
        raise CheckpointError(f"{folder}: {_names(missing)} missing; an FP8 weight needs {needs}", _MISMATCH)
    wanted = {*shards, *scales}
    unknown = [name for name in entries if name not in wanted and not _is_ignored(name, tied)]
    if unknown:
        raise CheckpointError(
            f"{entries[unknown[0]].file}: {_names(unknown)} not part of the model in config.json",
            _MISMATCH,
        )
    for name, shard in shards.items():
        entry = entries[name]
        if entry.shape != shard.shape:
            raise CheckpointError(
                f"{entry.file}: {name} has shape {list(entry.shape)}, but config.json requires "
                f"{list(shard.shape)}",
                _MISMATCH,
            )
        if name in quantised:
            _check_scales(entries[name + suffix], name + suffix, entry.shape, blocks)
        elif shard.block is not None:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.dtype}; with weight_block_size, every matrix of a "
                f"layer must be {_FP8}",
                'set quantization = "fp8" to convert all of them',
            )


def _check_scales(scale: TensorEntry, name: str, shape: tuple[int, ...], blocks: bool) -> None:
    """Raise CheckpointError if the scales have the wrong dtype or shape for a matrix of this shape."""
    _check_dtype(scale, name, _LOADABLE)
    if blocks:
        allowed: tuple[tuple[int, ...], ...] = (scale_shape(shape),)
        needed = f"it must be {list(scale_shape(shape))}, with one scale per block"
    else:
        allowed = ((), (1,), shape[:1], (shape[0], 1))
        needed = f"it must contain one scale, or {shape[0]} (one per output)"
    if scale.shape not in allowed:
        raise CheckpointError(f"{scale.file}: {name} has shape {list(scale.shape)}; {needed}", _MISMATCH)


def _check_dtype(entry: TensorEntry, name: str, loadable: tuple[str, ...]) -> None:
    if entry.dtype not in loadable:
        expected = f"expected {', '.join(loadable[:-1])} or {loadable[-1]}"
        raise CheckpointError(f"{entry.file}: {name} has dtype {entry.dtype}", expected)


def _is_ignored(name: str, tied: bool) -> bool:
    if tied and name.startswith("lm_head.weight"):
        return True
    return name.endswith((".rotary_emb.inv_freq", *_STATIC_SCALES))


def _names(names: list[str]) -> str:
    """Format names as the beginning of a sentence: "tensor a is" or "tensors a, b and 7 more are"."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    if more > 0:
        shown += f" and {more} more"
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def _fill(
    shards: dict[str, WeightShard],
    entries: dict[str, TensorEntry],
    decoder: Decoder,
    progress: ProgressCallback,
    exchange: bool,
    share_reads: bool,
) -> int:
    """Stream the checkpoint into all shards and return the number of bytes read.

    The stream and its buffers must not outlive this function, because `_finish` must be able to free their
    memory.
    """
    device, ranks = decoder.device, decoder.ranks.size
    blocks = decoder.config.fp8_blocks
    scales = _read_scales(shards, entries, device, _BLOCK_SCALE if blocks else _SCALE)
    for shard in shards.values():
        if shard.block is not None and shard.target is not None:
            fill_scales(shard, scales[shard.name])
    columns = ColumnExchange(ranks, decoder.ranks.rank)
    exchanged = {
        shard.name
        for shard in shards.values()
        if exchange and shard.dim == 1 and columns.can_split(entries[shard.name])
    }
    wanted = [
        columns.part(shard.name, entries[shard.name])
        if shard.name in exchanged
        else _slice(shard, entries[shard.name], ranks)
        for shard in shards.values()
        if shard.target is not None
    ]
    if share_reads:
        wanted = [replace(part, shared=True) for part in wanted]
    # Use the same order on every rank, because columns are exchanged one tensor at a time.
    wanted.sort(key=lambda part: (part.entry.file, part.entry.offset))
    total = sum(part.nbytes for part in wanted)
    done = 0
    file, reported_at = None, 0.0

    def fill(part: TensorSlice, numbers: torch.Tensor) -> None:
        if part.name in exchanged:
            for first_row, mine in columns.add(part, numbers):
                fill_rows(replace(part, first_row=first_row, rows=len(mine)), mine)
            return
        shard = shards[part.name]
        fill_rows(part, numbers if shard.dim == 0 else shard.part(numbers))

    def fill_rows(part: TensorSlice, numbers: torch.Tensor) -> None:
        """Fill rows of a shard from `numbers`, which contains this rank's columns of those rows."""
        shard = shards[part.name]
        rows = _rows_of_shard(shard, part)
        if part.entry.dtype != _FP8:
            rows.fill(numbers)
        elif shard.block is not None:
            assert rows.target is not None
            rows.target.copy_(numbers)
        elif blocks:
            first = part.first_row - (shard.start if shard.dim == 0 else 0)
            rows.fill(dequantised(shard, numbers, first, scales[part.name]))
        else:
            rows.fill_quantised(numbers, scales_of(part))

    def scales_of(part: TensorSlice) -> torch.Tensor:
        each = scales[part.name]
        return each if len(each) == 1 else each[part.first_row : part.first_row + part.rows]

    def find_target(whole: TensorSlice) -> torch.Tensor | None:
        shard = shards[whole.name]
        assert shard.target is not None
        whole_rows = shard.target.shape[1:] == whole.entry.shape[1:] and shard.target.is_contiguous()
        if not whole_rows or shard.target.dtype != whole.dtype:
            return None
        if shard.scales is not None and shard.block is None:
            if blocks:
                return None
            shard.scales.copy_(scales_of(whole))
        return shard.target

    for part in stream(wanted, device, fill, find_target):
        done += part.nbytes
        now = time.monotonic()
        if part.entry.file != file or now - reported_at >= _PROGRESS_S or done == total:
            file, reported_at = part.entry.file, now
            progress(Progress("read", done, total, "bytes", file.name))
    return done


def _randomise(shard: WeightShard, decoder: Decoder, seed: int) -> None:
    generator = torch.Generator(decoder.device).manual_seed(seed ^ zlib.crc32(shard.name.encode()))
    whole = torch.empty(shard.shape, dtype=decoder.dtype, device=decoder.device)
    if len(shard.shape) == 2:
        whole.normal_(std=shard.shape[1] ** -0.5, generator=generator)
    elif shard.name.endswith(".bias"):
        whole.normal_(std=0.02, generator=generator)
    else:
        whole.fill_(1.0)
    shard.fill(shard.part(whole))


def _slice(shard: WeightShard, entry: TensorEntry, ranks: int) -> TensorSlice:
    """Return the rows that this rank must read from the checkpoint's tensor. A column shard needs all
    rows."""
    assert shard.target is not None
    rows = shard.target.shape[0]
    shared = ranks > 1 and rows == entry.shape[0]
    return TensorSlice(shard.name, entry, shard.start if shard.dim == 0 else 0, rows, shared)


def _rows_of_shard(shard: WeightShard, part: TensorSlice) -> WeightShard:
    """Return a shard that covers only the rows in `part`."""
    assert shard.target is not None
    first = part.first_row - (shard.start if shard.dim == 0 else 0)
    rows = slice(first, first + part.rows)
    scales = None if shard.scales is None or shard.block is not None else shard.scales[rows]
    return replace(shard, target=shard.target[rows], scales=scales)


def _read_scales(
    shards: dict[str, WeightShard], entries: dict[str, TensorEntry], device: torch.device, suffix: str
) -> dict[str, torch.Tensor]:
    """Return the float32 scales of all FP8 weights, keyed by weight name. A weight has one scale per row
    (`[rows]`), one for all rows (`[1]`), or one per block (`scale_shape`). `suffix` is the name suffix of the
    scales."""
    wanted = []
    for shard in shards.values():
        if shard.target is not None and entries[shard.name].dtype == _FP8:
            name = shard.name + suffix
            wanted.append(TensorSlice(name, entries[name], 0, math.prod(entries[name].shape[:1])))
    wanted.sort(key=lambda part: (part.entry.file, part.entry.offset))
    if not wanted:
        return {}
    # Keep all scales in one tensor, so that they are allocated and checked together.
    sizes = [math.prod(part.entry.shape) for part in wanted]
    whole = torch.empty(sum(sizes), device=device)
    found = {part.name: scales for part, scales in zip(wanted, whole.split(sizes), strict=True)}

    def fill(part: TensorSlice, numbers: torch.Tensor) -> None:
        numbers = numbers.flatten()
        first = part.first_row * (len(numbers) // part.rows)
        found[part.name][first : first + len(numbers)] = numbers

    for _ in stream(wanted, device, fill):
        pass
    sound = whole.isfinite() & (whole >= 0)
    if not sound.all():
        bad = [name for name, good in zip(found, sound.split(sizes), strict=True) if not good.all()]
        raise CheckpointError(
            f"{entries[bad[0]].file}: {_names(bad)} invalid: scales must be finite and not negative",
            "download it again",
        )
    if suffix == _BLOCK_SCALE:
        found = {name: scales.view(entries[name].shape) for name, scales in found.items()}
    return {name.removesuffix(suffix): scales for name, scales in found.items()}


def _finish(decoder: Decoder, progress: ProgressCallback) -> None:
    decoder.finish(progress)
    if decoder.device.type == "cuda":
        # Release the allocator's cached memory. Otherwise, it would be counted as activation memory when the
        # KV pool is sized.
        torch.cuda.empty_cache()
