"""Creates the rank whose layers a tuner times on a single GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.launch_enumeration import UnconnectedRanks
from engine.parallel import Ranks
from engine.peer_limits import limits_of
from engine.peer_memory import ITEMS
from engine.peer_ranks import PeerRanks
from kernels.triton.peer_arena import PROGRAMS, Arena

_NO_HOST_FLAG = 0
"""Address of the flag that stops polling. It is never read, because no words are received."""


def lone_rank(size: int, device: torch.device, *, pdl: bool) -> Ranks:
    """Return one rank of `size` without its peers. Its sums contain only its own part.

    The next GEMM can load weights during an all-reduce, so the plans of GEMMs depend on the kernel between
    them. On a GPU, this rank therefore launches the kernel that a replica launches, but without an exchange.
    The kernel is always the one-shot all-reduce, and a quantised norm is always a separate launch.
    """
    group = UnconnectedRanks(size, 0)
    if size == 1 or device.type == "cpu":
        return group
    limits = limits_of(size)
    limits = replace(limits, two_shot_bytes=limits.group_bytes, quantised_rows=range(0))
    return PeerRanks(group, _LoneMemory(device), pdl=pdl, limits=limits)


class _LoneMemory:
    """Peer memory of a single rank. It holds no words, because the kernels of one rank exchange none.
    Implements `peer_ranks.Memory`."""

    def __init__(self, device: torch.device) -> None:
        addresses = torch.zeros(1, dtype=torch.int64, device=device)
        calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        self.arena = Arena(0, 1, addresses, calls, stop_address=_NO_HOST_FLAG, items=ITEMS)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        raise NotImplementedError("a rank without peers does not overlap sums with computation")

    def stop(self) -> None:
        return
