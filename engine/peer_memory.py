"""Allocates memory that all of a replica's GPUs can access. The ranks exchange small messages through this
memory."""

from __future__ import annotations

from typing import Any

import torch

from kernels.triton.peer_arena import EMPTY_WORD, PROGRAMS, Arena, arena_words, stop_words

ITEMS = 16
"""Number of arena items per GPU program (`Arena.items`). This value allows messages of up to 16 MiB, e.g.
1,024 rows of 8,192 16-bit numbers."""


class PeerMemory:
    """One rank's arena in GPU memory, and the addresses of its peers' arenas. All ranks of
    torch.distributed's default group must construct their instances at the same time, with the rank's GPU as
    the current device and NCCL as the group's backend. A rank may use its instance only after all ranks have
    constructed theirs. NVLink multicast is not used. Raises RuntimeError if the GPUs cannot map each other's
    memory.
    """

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symmetric.empty(arena_words(world, ITEMS), dtype=torch.int32, device=device)
        self._memory.fill_(EMPTY_WORD)
        assert dist.group.WORLD is not None
        self._handle: Any = symmetric.rendezvous(self._memory, dist.group.WORLD)
        # Page-locked host memory has the same address on the host and on the device.
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._stop_words = stop_words(self._stop.data_ptr(), device)
        self.arena = Arena(
            rank=rank,
            world=world,
            addresses=torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device),
            calls=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
            stop_address=self._stop_words.data_ptr(),
            items=ITEMS,
        )
        self._allocated: list[tuple[torch.Tensor, Any]] = []
        torch.cuda.synchronize()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Allocate a buffer on every rank and return all ranks' buffers, mapped on this rank's device. All
        ranks must call this method at the same time."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        own = symmetric.empty(shape, dtype=dtype, device=device)
        assert dist.group.WORLD is not None
        handle = symmetric.rendezvous(own, dist.group.WORLD)
        self._allocated.append((own, handle))
        return [handle.get_buffer(peer, shape, dtype) for peer in range(self.arena.world)]

    def stop(self) -> None:
        """Abort all current and future waits for peers on this rank's GPU. Called when a peer is lost. The
        aborted calls return undefined results. May be called from any thread."""
        self._stop[0] = 1
