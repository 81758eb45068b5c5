"""Collective operations for ranks on GPUs that can map each other's memory. Small messages go through this
memory (`kernels.triton.peer_arena`), and large messages through another group, which uses NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.parallel import Ranks
from engine.peer_limits import AllReduceLimits, limits_of
from engine.peer_overlap import PeerOverlap, make_overlap
from engine.sizing import overlap_split
from kernels import DeferredNorm, Fp8Activation, NextNorm, Residual
from kernels.triton import all_gather, all_reduce, all_reduce_norm
from kernels.triton.peer_arena import Arena

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be gathered through peer memory. Gathering preserves every value, but not the sign of
zero."""


class Memory(Protocol):
    """The peer memory used by `PeerRanks`. Implemented by `engine.peer_memory.PeerMemory`."""

    arena: Arena

    def stop(self) -> None: ...

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[torch.Tensor]: ...


class PeerRanks(Ranks):
    """A rank that exchanges messages through peer memory if they fit, otherwise through `group`. `pdl` says
    whether the GPU supports programmatic dependent launch; if it is None, the constructor detects this. In
    passes of at least `overlap_from` tokens, sums overlap with computation; None disables the overlap.
    `limits` determines which all-reduce a message uses; None selects the limits for this number of ranks.
    """

    def __init__(
        self,
        group: Ranks,
        memory: Memory,
        *,
        pdl: bool | None = None,
        overlap_from: int | None = None,
        limits: AllReduceLimits | None = None,
    ) -> None:
        self.size, self.rank = group.size, group.rank
        self.limits = limits_of(group.size) if limits is None else limits
        self.collectives = f"peer memory, {group.collectives} for long messages"
        self._group = group
        self._memory = memory
        self._arena = memory.arena
        self.overlap_from = overlap_from
        self._overlap: PeerOverlap | None = None
        self.pdl = torch.cuda.get_device_capability() >= (9, 0) if pdl is None else pdl

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._sums(tensor):
            return self._group.all_reduce(tensor)
        total = torch.empty_like(tensor)
        for piece, summed in zip(self._pieces(tensor), self._pieces(total), strict=True):
            two_shot = self._uses_two_shot(piece)
            all_reduce.all_reduce_add(piece, summed, self._arena, two_shot=two_shot, add=False, pdl=self.pdl)
        return total

    def add_sum(self, residual: Residual, part: torch.Tensor, norm: NextNorm | None) -> Residual:
        if not self._sums(part):
            return self._group.add_sum(residual, part, None)
        values, two_shot = residual.values, self._uses_two_shot(part)
        if len(part) > all_reduce.max_rows(part.shape[1], self._arena):
            for piece, summed in zip(self._pieces(part), self._pieces(values), strict=True):
                self.add_sum(Residual(summed), piece, None)
            return Residual(values)
        if norm is not None and norm.quantised:
            if len(part) in self.limits.quantised_rows and not two_shot and self._fits_norm(part):
                gain, eps = norm.gain, norm.eps
                normed = all_reduce_norm.all_reduce_norm_fp8(
                    part, values, gain, eps, self._arena, pdl=self.pdl
                )
                return Residual(values, normed=Fp8Activation(*normed, part.dtype))
            norm = None
        deferred = None
        if norm is not None:
            parts = all_reduce.squares_parts(part.shape[1])
            squares = torch.empty((parts, len(part)), dtype=torch.float32, device=part.device)
            deferred = DeferredNorm(torch.empty_like(part), squares)
        all_reduce.all_reduce_add(
            part,
            values,
            self._arena,
            two_shot=two_shot,
            gain=None if norm is None else norm.gain,
            scaled=None if deferred is None else deferred.values,
            squares=None if deferred is None else deferred.squares,
            pdl=self.pdl,
        )
        return Residual(values, deferred)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        width, odd = divmod(tensor.shape[-1] * tensor.element_size(), 4)
        rows = self._arena.max_words // max(1, width)
        if tensor.dtype not in _FLOATS or odd or not tensor.numel() or not rows:
            return self._group.all_gather_last_dim(tensor)
        words = tensor.contiguous().view(torch.int32).view(-1, width)
        gathered = words.new_empty((len(words), self.size, width))
        # Rows that do not fit into the arena together are sent in pieces. Gathering them through `group`
        # instead would need twice as much memory as the result.
        for piece, result in zip(words.split(rows), gathered.split(rows), strict=True):
            all_gather.all_gather(piece.view(-1), width, self._arena, out=result, pdl=self.pdl)
        return gathered.view(tensor.dtype).view(*tensor.shape[:-1], -1)

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or not self._gathers(tensor):
            return self._group.all_gather_stack(tensor)
        words = tensor.contiguous().view(-1).view(torch.int32)
        gathered = all_gather.all_gather(words, len(words), self._arena, pdl=self.pdl)
        return gathered.view(torch.float32).view(self.size, *tensor.shape)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not all_gather.best_fits(len(values)):
            return self._group.best(values, ids)
        return all_gather.best_of_ranks(values, ids, self._arena, pdl=self.pdl)

    def prepare_overlap(self, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        rows = overlap_split(tokens)
        if self.overlap_from is None or tokens < self.overlap_from or rows % self.size:
            return
        self._overlap = make_overlap(self._arena, rows, hidden, dtype, device, self._memory.allocate)

    def overlap(self, tokens: int) -> PeerOverlap | None:
        overlap = self._overlap
        if overlap is None or self.overlap_from is None or tokens < self.overlap_from:
            return None
        split = overlap_split(tokens)
        if split > overlap.max_half_tokens or (tokens - split) % self.size:
            return None
        overlap.split = split
        return overlap

    def abandon(self, reason: str) -> None:
        super().abandon(reason)
        self._memory.stop()
        self._group.abandon(reason)

    def close(self) -> None:
        self._overlap = None
        self._group.close()

    def _sums(self, part: torch.Tensor) -> bool:
        """Return whether `part` is summed through peer memory."""
        return (
            part.dtype in (torch.bfloat16, torch.float16)
            and part.dim() == 2
            and len(part) > 0
            and part.is_contiguous()
            and part.numel() * part.element_size() < self.limits.group_bytes
            and all_reduce.max_rows(part.shape[1], self._arena) > 0
        )

    def _pieces(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a tensor into pieces that fit into the arena and have about the same number of rows."""
        count = -(-len(tensor) // all_reduce.max_rows(tensor.shape[1], self._arena))
        return tensor.split(-(-len(tensor) // count))

    def _fits_norm(self, part: torch.Tensor) -> bool:
        return all_reduce_norm.fits(part.shape[0], part.shape[1], self._arena)

    def _uses_two_shot(self, part: torch.Tensor) -> bool:
        return part.numel() * part.element_size() >= self.limits.two_shot_bytes

    def _gathers(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is gathered through peer memory. Its size in bytes must be a multiple of
        4."""
        return all_gather.fits(tensor.numel() * tensor.element_size() // 4, self._arena)
