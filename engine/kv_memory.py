"""Manages the memory of one rank's KV cache: determines how many blocks fit, and allocates them."""

from __future__ import annotations

import torch

from engine import memory
from engine.messages import BLOCK_TOKENS, ReplicaSpec
from engine.model.decoder import Decoder
from engine.progress import ProgressCallback
from engine.rank_memory import RankMemory
from engine.rank_messages import Progress
from engine.sizing import Sizing
from kernels import KvPool


class RankKvCache:
    """The KV cache of one rank. The ranks agree on the number of blocks, so all ranks must make the same
    calls in the same order. Unless that number is configured, the KV cache on a GPU gets all the memory that
    nothing else needs. That amount is known only after every kind of step has run, but CUDA graphs, which
    contain the cache's addresses, are captured earlier. Therefore, `allocate` only reserves addresses, and
    `grow` provides the memory later. If no maximum sequence length is configured and a sequence of the
    checkpoint's maximum length does not fit, `max_model_len` is lowered to a length that does.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: ReplicaSpec,
        sizes: Sizing,
        rank_memory: RankMemory,
        max_model_len: int,
    ) -> None:
        """Create the cache without allocating memory. `sizes` is the rank's predicted memory use.
        `max_model_len` is the configured length, or the largest possible one if none is configured."""
        self.max_model_len = max_model_len
        self.blocks = 0
        self.pools: list[KvPool] = []
        """KV pools, one per layer. Before `grow`, only block 0 may be accessed."""
        self._decoder, self._spec, self._sizes, self._memory = decoder, spec, sizes, rank_memory
        on_gpu = decoder.device.type == "cuda"
        self._grows = on_gpu and spec.kv_blocks is None and rank_memory.can_grow

    def allocate(self, progress: ProgressCallback) -> None:
        """Allocate the cache, or reserve addresses for the largest cache that could fit. Raises PoolTooSmall
        if the cache cannot hold a sequence of maximum length, and PoolTooLarge if a configured number of
        blocks does not fit."""
        if self._grows:
            most = self._least_over_ranks(self._spare_bytes() // self._sizes.kv_bytes_per_block)
            self._set_blocks(most)
            self.pools = self._decoder.allocate_kv(most, self._memory.growing_kv)
        else:
            configured = self._spec.kv_blocks
            self._set_blocks(self._predicted_blocks() if configured is None else configured)
            self._report_length(progress)
            self.pools = self._allocated()

    def grow(self, progress: ProgressCallback) -> None:
        """Give the GPU's remaining memory to the cache, unless the number of blocks is configured. Every kind
        of step must have run, so that torch's allocator and the CUDA graphs already hold all the memory they
        need. Raises PoolTooSmall if the cache cannot hold a sequence of maximum length."""
        if not self._grows:
            return
        fitting = min(self._memory.blocks_within(self._spare_bytes()), self.blocks)
        self._set_blocks(self._least_over_ranks(fitting))
        self._report_length(progress)
        self._memory.grow_kv(self.blocks)
        self.pools = [pool.first(self.blocks) for pool in self.pools]

    def _set_blocks(self, blocks: int) -> None:
        self.blocks = blocks
        if self._spec.max_model_len is None and blocks > 0:
            self.max_model_len = min(blocks * BLOCK_TOKENS, self.max_model_len)
        per_block, given = self._sizes.kv_bytes_per_block, self._spec.kv_blocks is not None
        memory.check_blocks(blocks, self.max_model_len, per_block, given=given)

    def _report_length(self, progress: ProgressCallback) -> None:
        """Report the maximum sequence length if it is limited by memory."""
        allowed = self._decoder.config.context_length
        if self._spec.max_model_len is None and self.blocks * BLOCK_TOKENS < allowed:
            note = (
                f"memory for the KV cache limits sequences to {self.max_model_len} tokens "
                f"(the checkpoint allows {allowed})"
            )
            progress(Progress("build", detail="sizing the KV pool", note=note))

    def _predicted_blocks(self) -> int:
        """Return the number of blocks that fit according to the predicted memory use."""
        sizes, ranks = self._sizes, self._decoder.ranks.size
        if self._decoder.device.type == "cuda":
            budget = self._spare_bytes() - (sizes.fixed_bytes - sizes.weight_bytes)
        else:
            share = int(memory.available_host_bytes() * self._spec.gpu_memory_utilization) // ranks
            budget = min(share - sizes.activation_bytes, memory.CPU_MAX_KV_BYTES // ranks)
        return self._least_over_ranks(budget // sizes.kv_bytes_per_block)

    def _allocated(self) -> list[KvPool]:
        """Return zero-filled KV pools with memory for all blocks."""
        device, ranks = self._decoder.device, self._decoder.ranks.size
        needed, per_block = self.blocks * self._sizes.kv_bytes_per_block, self._sizes.kv_bytes_per_block
        if device.type != "cpu":
            free, _ = torch.cuda.mem_get_info(device)
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            try:
                return self._decoder.allocate_kv(self.blocks, self._memory.zeroed_kv)
            except torch.OutOfMemoryError as error:
                raise memory.too_large(self.blocks, per_block, 1, free + cached) from error
        # Check the available memory first. Linux overcommits: the allocation would succeed, but a process
        # would be killed once memory ran out.
        available = memory.available_host_bytes()
        if needed * ranks > available:
            raise memory.too_large(self.blocks, per_block, ranks, available)
        try:
            return self._decoder.allocate_kv(self.blocks, self._memory.zeroed_kv)
        except OSError as error:  # the cause is ulimit -v or strict overcommit accounting
            raise memory.PoolTooLarge(
                f"kv_blocks is {self.blocks}: this process cannot map {needed} bytes for the KV cache "
                f"({error.strerror}): raise its limits (ulimit -v), or lower kv_blocks"
            ) from error

    def _spare_bytes(self) -> int:
        """Return how many bytes can still be allocated on this rank's GPU within `gpu_memory_utilization`.
        Negative if the limit is already exceeded."""
        free, total = torch.cuda.mem_get_info(self._decoder.device)
        return int(free - (1 - self._spec.gpu_memory_utilization) * total)

    def _least_over_ranks(self, number: int) -> int:
        mine = torch.tensor([number], device=self._decoder.device)
        return int(self._decoder.ranks.all_gather_stack(mine).min())
