"""Allocates the KV cache pools of one rank."""

from __future__ import annotations

import math
import mmap

import torch

from engine import memory
from engine.model.decoder import Decoder
from kernels import KvPool


def allocate_kv(decoder: Decoder, blocks: int, bytes_per_block: int, ranks: int) -> list[KvPool]:
    """Return one zero-filled KV pool of `blocks` blocks per layer. Raises PoolTooLarge if the pools do not
    fit into memory."""
    if decoder.device.type != "cpu":
        return _allocate_on_gpu(decoder, blocks, bytes_per_block)
    # Check the available memory first: Linux overcommits memory, and kills a process if memory runs out
    # later.
    available = memory.available_host_bytes()
    if blocks * bytes_per_block * ranks > available:
        raise memory.too_large(blocks, bytes_per_block, ranks, available)

    def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of lazily allocated zero pages. Creating it takes no time, and a page uses no
        memory until it is written."""
        size = math.prod(shape) * dtype.itemsize
        try:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:  # a process limit (ulimit -v), or strict overcommit accounting
            raise memory.PoolTooLarge(
                f"kv_blocks is {blocks}: this process cannot map {size} bytes for the keys of a layer "
                f"({error.strerror}): raise its limits (ulimit -v), or lower kv_blocks"
            ) from error
        return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)

    return decoder.allocate_kv(blocks, zero_pages)


def _allocate_on_gpu(decoder: Decoder, blocks: int, bytes_per_block: int) -> list[KvPool]:
    device = decoder.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return decoder.allocate_kv(blocks)
    except torch.OutOfMemoryError as error:
        raise memory.too_large(blocks, bytes_per_block, 1, free + cached) from error
