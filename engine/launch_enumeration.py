"""Enumerates the kernels that a replica launches by running its warm-up on meta tensors, which hold no data.
`kernels.compiling.record` records each launch. The decoder, tables, graph code and sampler are those used for
serving. Warm-up launches every kernel that serving launches, so no separate list of operations has to be
maintained.
"""

from __future__ import annotations

from typing import Any

import torch

from engine import sizing
from engine.device_tables import Padding, SlotTables
from engine.graphs import DecodeGraphs
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.parallel import Overlap, Ranks, single
from engine.peer_memory import ITEMS
from engine.peer_ranks import PeerRanks
from engine.prompt_graphs import PromptGraphs
from engine.replica_model import ReplicaModel
from engine.sampler import Sampler
from engine.sizing import EXPANSION_BLOCKS, gemm_sizes
from engine.steps import StepExecutor
from engine.warmup import warm_up
from engine.warmup_steps import largest_steps
from kernels import NextNorm, Residual
from kernels.compiling import GpuModel
from kernels.cuda import CudaOps
from kernels.triton import sampling
from kernels.triton.linear_table import Table
from kernels.triton.peer_arena import PROGRAMS, Arena

_META = torch.device("meta")
_MAX_MODEL_LEN = 4096
"""Assumed maximum sequence length in tokens. Longer sequences use the same kernels: above
`kernels.triton.attention_prefill.HOPPER_ABOVE`, the length does not affect the choice of kernel."""
_KV_BLOCKS = 64
"""Assumed number of KV blocks, which does not affect the compiled kernels."""
_MULTIPROCESSORS = 132
"""A Hopper GPU's multiprocessor count, which does not affect the compiled kernels."""
_DIFFERENT_ROWS = 256
"""Largest row count for which the tables in `kernels/tuned` contain a plan. Above this count, only powers of
two and the largest size are enumerated."""
_ALIGNMENT = 16
"""Triton compiles a separate kernel variant for integer arguments that are multiples of this value."""

_HOST_ADDRESS = 1 << 40
"""Placeholder for a host memory address. Like a real one, it needs 64 bits, because Triton compiles a
separate kernel variant for each integer width."""


class UnconnectedRanks(Ranks):
    """One rank of a simulated group, whose collectives return tensors of the correct shape without
    communicating."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.size)


class _MetaMemory:
    """The peer memory of one simulated rank, made of meta tensors."""

    def __init__(self, size: int, rank: int) -> None:
        addresses = torch.empty(size, dtype=torch.int64, device=_META)
        calls = torch.empty(PROGRAMS, dtype=torch.int32, device=_META)
        self.arena = Arena(rank, size, addresses, calls, stop_address=_HOST_ADDRESS, items=ITEMS)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype, device=_META)] * self.arena.world

    def stop(self) -> None:
        return


class _EveryRank(Ranks):
    """Simulates all ranks of a group on meta tensors, from the perspective of `rank`. The first time a
    collective is called with certain shapes, its kernels are launched for every rank, because kernels that
    use peer memory differ between ranks."""

    def __init__(self, size: int, rank: int, pdl: bool) -> None:
        self.size, self.rank = size, rank
        self._each = [
            PeerRanks(
                UnconnectedRanks(size, each),
                _MetaMemory(size, each),
                pdl=pdl,
                overlap_from=sizing.OVERLAP_FROM_TOKENS,
            )
            for each in range(size)
        ]
        self._launched: set[tuple[Any, ...]] = set()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._launch("all_reduce", tensor)

    def add_sum(self, residual: Residual, part: torch.Tensor, norm: NextNorm | None) -> Residual:
        return self._launch("add_sum", residual, part, norm)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._launch("all_gather_last_dim", tensor)

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._launch("all_gather_stack", tensor)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._launch("best", values, ids)

    def prepare_overlap(self, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        for each in self._each:
            each.prepare_overlap(tokens, hidden, dtype, device)

    def overlap(self, tokens: int) -> Overlap | None:
        found = [each.overlap(tokens) for each in self._each]
        for overlap in found:
            if overlap is not None:
                overlap.barrier()
        return found[self.rank]

    def _launch(self, name: str, *arguments: Any) -> Any:
        call = (name, *map(_kind, arguments))
        if call not in self._launched:
            self._launched.add(call)
            for each in self._each:
                getattr(each, name)(*arguments)
        return getattr(self._each[self.rank], name)(*arguments)


def _kind(argument: torch.Tensor | Residual | NextNorm | None) -> tuple[Any, ...]:
    """Return the properties of a collective's argument that determine which kernels are launched."""
    if isinstance(argument, NextNorm):
        return (argument.quantised, *_kind(argument.gain))
    tensor = argument.values if isinstance(argument, Residual) else argument
    return () if tensor is None else (tensor.shape, tensor.dtype)


class MetaReplica:
    """One simulated rank of a replica, made of meta tensors. `table` contains the kernel plans for linear
    layers. `max_model_len` is the maximum sequence length; if None, a length is chosen at which every kernel
    is launched.
    """

    def __init__(
        self, served: ReplicaModel, rank: int, gpu: GpuModel, table: Table, max_model_len: int | None = None
    ) -> None:
        self.served = served
        config = served.config.with_layers(served.config.representative_layers())
        length = max_model_len or min(config.context_limit, _MAX_MODEL_LEN)
        self._decoder = decoder = Decoder(
            config,
            _ranks(served.tensor_parallel_size, rank, gpu),
            CudaOps(
                EXPANSION_BLOCKS,
                table,
                pdl=gpu.pdl,
                hopper_multiprocessors=_MULTIPROCESSORS if gpu.hopper else 0,
            ),
            TORCH_DTYPES[served.dtype],
            _META,
            max_model_len=length,
            fp8=served.fp8,
            fp8_blocks=served.fp8_blocks,
            kv_fp8=served.kv_fp8,
        )
        decoder.ranks.prepare_overlap(served.max_num_batched_tokens, config.hidden_size, decoder.dtype, _META)
        self._sizes = Padding(_sizes(served.max_num_batched_tokens), _sizes(served.max_num_seqs))
        shard = decoder.shard
        self._sampler = Sampler(
            decoder.ranks,
            _META,
            sampling,
            vocab_size=config.vocab_size,
            first_vocab=shard.first_vocab,
            vocab=shard.vocab,
            vocab_real=shard.vocab_real,
        )

    def steps(self) -> StepExecutor:
        """Return a new step executor with its own tables and KV cache."""
        decoder, served = self._decoder, self.served
        blocks = -(-decoder.max_model_len // BLOCK_TOKENS)
        vocab_size = decoder.config.vocab_size
        tables = SlotTables(served.max_num_seqs, blocks, vocab_size, _META, self._sizes)
        return StepExecutor(decoder, decoder.allocate_kv(_KV_BLOCKS), tables, self._sampler)

    def launch_warm_up(self) -> StepExecutor:
        """Launch the kernels that `ModelRunner` launches before the replica is ready. Returns the step
        executor used for serving."""
        decoder, served = self._decoder, self.served
        length, budget = decoder.max_model_len, served.max_num_batched_tokens
        largest = self.steps()
        for plan in largest_steps(length, served.max_num_seqs, budget):
            largest.run(plan)
        steps = self.steps()
        parts = steps.decoder, steps.kv, steps.tables
        DecodeGraphs(*parts, self._sampler, served.max_num_seqs).launch()
        PromptGraphs(*parts, budget).launch()
        warm_up(steps, self.steps(), length, self._sizes)
        return steps


def _ranks(size: int, rank: int, gpu: GpuModel) -> Ranks:
    return single() if size == 1 else _EveryRank(size, rank, gpu.pdl)


def _sizes(most: int) -> list[int]:
    """Return padded sizes, up to `most` rows, that together launch every variant of the Triton kernels. Above
    _DIFFERENT_ROWS rows, the size affects only cuBLAS kernels, which need no compilation, so powers of two
    suffice."""
    return [
        size for size in gemm_sizes(most) if size <= _DIFFERENT_ROWS or size == most or size & (size - 1) == 0
    ]


def _different_ranks(served: ReplicaModel) -> list[int]:
    """Return a subset of ranks that together launch all of the replica's kernels. Ranks differ only in their
    vocabulary shards and in their biases: if a linear layer's results are summed over the ranks, only rank 0
    adds the bias."""
    size, found = served.tensor_parallel_size, dict[tuple[object, ...], int]()
    for rank in range(size):
        shard = served.config.shard(size, rank)
        found.setdefault((rank == 0, shard.vocab_real, shard.first_vocab % _ALIGNMENT), rank)
    return list(found.values())


def launch_all(served: ReplicaModel, gpu: GpuModel, table: Table) -> None:
    """Launch, on meta tensors, every kernel that any rank of a replica launches on a GPU."""
    with torch.inference_mode():
        for rank in _different_ranks(served):
            MetaReplica(served, rank, gpu, table).launch_warm_up()
