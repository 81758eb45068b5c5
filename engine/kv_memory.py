"""Allocates the KV cache pools of one rank."""

from __future__ import annotations

import torch

from engine import memory
from engine.model.decoder import Decoder
from engine.rank_memory import RankMemory
from kernels import KvPool


def allocate_kv(
    decoder: Decoder, blocks: int, bytes_per_block: int, ranks: int, rank_memory: RankMemory
) -> list[KvPool]:
    """Return one zero-filled KV pool of `blocks` blocks per layer, allocated by `rank_memory`. Raises
    PoolTooLarge if the pools do not fit into memory."""
    if decoder.device.type != "cpu":
        return _allocate_on_gpu(decoder, blocks, bytes_per_block, rank_memory)
    # Check the available memory first: Linux overcommits memory, and kills a process if memory runs out
    # later.
    available = memory.available_host_bytes()
    if blocks * bytes_per_block * ranks > available:
        raise memory.too_large(blocks, bytes_per_block, ranks, available)
    try:
        return decoder.allocate_kv(blocks, rank_memory.zeroed_kv)
    except OSError as error:  # a process limit (ulimit -v), or strict overcommit accounting
        raise memory.PoolTooLarge(
            f"kv_blocks is {blocks}: this process cannot map {blocks * bytes_per_block} bytes for the KV "
            f"cache ({error.strerror}): raise its limits (ulimit -v), or lower kv_blocks"
        ) from error


def _allocate_on_gpu(
    decoder: Decoder, blocks: int, bytes_per_block: int, rank_memory: RankMemory
) -> list[KvPool]:
    device = decoder.device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return decoder.allocate_kv(blocks, rank_memory.zeroed_kv)
    except torch.OutOfMemoryError as error:
        raise memory.too_large(blocks, bytes_per_block, 1, free + cached) from error
