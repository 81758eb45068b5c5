"""Defines the chains of layers that the tuner times. A chain contains copies of a decoder's layers or of its
output matrix. Its kernel plans can be replaced. To find the linears to tune, the decoder is run once, and
each linear that looks up a plan in the table is recorded. Each copy of a layer has its own weights, so that
no weight is in the L2 cache when it is read. A linear's cost is the time it adds to the entire layer. This
cost therefore includes effects on neighbouring kernels, which overlap with the linear (programmatic dependent
launch), and the norms that are not fused into the linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.model.loader import load_dummy
from engine.replica_model import ReplicaModel
from engine.tune.operations import TunedOps, WatchedOps
from engine.tune.ranks import lone_rank
from kernels import AttentionInput, KvPool, Ops
from kernels.compiling import GpuModel
from kernels.triton.linear_table import Product, Table
from kernels.tune.graphs import graph_microseconds

_CACHES = 8
"""Total size of a chain's weights, as a multiple of the L2 cache size. Large enough that a weight is no
longer cached when it is read again."""
_CHAIN_BYTES = 5 << 30
"""Minimum number of bytes of weights read by a graph. Large enough that starting a graph (about 10 µs) takes
only a small fraction of the measured time."""
_VOCABULARY = 1024
"""Vocabulary size of a decoder built only to time its layers. It is small because the embeddings and the
output matrix are not timed."""
_SEED = 1


class LayerChain:
    """A chain of copies of a decoder's layers. Each copy has one layer of each kind. Implements
    `kernels.tune.search.Chain`.

    `context` is the number of tokens per sequence that the layers attend to. If it is None, attention is not
    computed, because its time does not depend on the linears' plans.
    """

    def __init__(
        self, served: ReplicaModel, device: torch.device, gpu: GpuModel, context: int | None = None
    ) -> None:
        self.device = device
        self.rows = 0
        self.products: list[Product] = []
        """Linears found in the layers. Those whose results are added to the residual come first."""
        self._context = context
        self._ops = WatchedOps(TunedOps(gpu, attention=context is not None))
        kinds = _kinds(served)
        small = replace(served.config.with_layers(kinds), vocab_size=_VOCABULARY, tie_word_embeddings=True)
        # First build one copy on meta tensors, to get the size of a copy in bytes.
        of_one = _decoder(replace(served, config=small), self._ops, torch.device("meta"), gpu, context)
        size = _layer_bytes(of_one)
        copies = _copies(size, device)
        config = small.with_layers(list(range(len(kinds))) * copies)
        self._decoder = _decoder(replace(served, config=config), self._ops, device, gpu, context)
        if device.type != "meta":
            load_dummy(self._decoder, _SEED)
            _randomise_gains(self._decoder)
        turns = -(-_CHAIN_BYTES // (size * copies)) if device.type == "cuda" else 1
        self._layers = self._decoder.layers * turns
        self._few = 2 * len(kinds)

    def __len__(self) -> int:
        return len(self._layers)

    def set_rows(self, rows: int) -> None:
        """Create the input and the KV cache for `rows` sequences and find the linears."""
        self.rows = rows
        self._kv: list[KvPool] = []  # free the cache before allocating the next one
        self._ops.backend.forget_workspaces()
        self._decoder.layers = self._layers
        blocks = -(-(self._context or 1) // BLOCK_TOKENS)
        self._kv = self._decoder.allocate_kv(rows * blocks)
        if self._context is not None and self.device.type != "meta":
            for pool in self._kv:
                for numbers in (pool.keys, pool.values, pool.k_scales, pool.v_scales):
                    if numbers is not None:
                        numbers.copy_(torch.rand(numbers.shape, device=self.device))
        self._table = torch.randperm(rows * blocks).view(rows, blocks).to(self.device)
        self._inputs = self._make_inputs(rows)
        self.use(Table())
        self.products = self._ops.find(self.run_few)

    def microseconds(self, table: Table, without: Product | None = None) -> float:
        self.use(table, without)
        return graph_microseconds(self.run) / len(self)

    def error(self, table: Table, rows: int) -> float:
        self.use(table)
        return self._ops.compare(lambda: self.run(self._few, rows))

    def use(self, table: Table, without: Product | None = None) -> None:
        """Use the plans from `table` in all later runs. If `without` is given, skip that linear's
        operations."""
        self._ops.backend.use(table)
        self._ops.without = without

    def run(self, layers: int | None = None, rows: int | None = None) -> torch.Tensor:
        """Run the first `rows` sequences through the first `layers` layers and return the hidden states."""
        decoder = self._decoder
        decoder.layers = self._layers[:layers]
        inputs = self._inputs if rows is None else self._make_inputs(rows)
        return decoder.forward(inputs, self._kv[:layers])

    def run_few(self) -> torch.Tensor:
        """Run just enough layers to launch every kernel."""
        return self.run(self._few)

    def _make_inputs(self, rows: int) -> ForwardInput:
        every = torch.arange(rows, device=self.device)
        position = (self._context or 1) - 1
        positions = torch.full((rows,), position, device=self.device)
        slots = self._table[:rows, -1] * BLOCK_TOKENS + position % BLOCK_TOKENS
        attention = AttentionInput(self._table, every, positions + 1, self._table.shape[1], [])
        return ForwardInput(every % _VOCABULARY, positions, slots, attention)


class HeadChain:
    """A chain of copies of the final norm and the output matrix. The output matrix always has the model's
    dtype. Implements `kernels.tune.search.Chain`."""

    def __init__(self, served: ReplicaModel, device: torch.device, gpu: GpuModel) -> None:
        self.device = device
        self.rows = 0
        self._ops = WatchedOps(TunedOps(gpu, attention=False))
        config = replace(served.config.with_layers([]), tie_word_embeddings=True)
        self._decoder = _decoder(replace(served, config=config), self._ops, device, gpu, None)
        if device.type != "meta":
            load_dummy(self._decoder, _SEED)
            _randomise_gains(self._decoder)
        head = self._decoder.head
        size = head.numel() * head.element_size()
        heads = [head, *(head.clone() for _ in range(_copies(size, device) - 1))]
        self._heads = heads * (-(-_CHAIN_BYTES // (size * len(heads))) if device.type == "cuda" else 1)
        self.set_rows(1)
        self.products = self._ops.find(self.run_few)

    def set_rows(self, rows: int) -> None:
        """Create an input with `rows` rows."""
        self.rows = rows
        decoder = self._decoder
        shape = (rows, decoder.config.hidden_size)
        self._hidden = torch.empty(shape, dtype=decoder.dtype, device=self.device).normal_()
        logits = (rows, decoder.shard.vocab)
        self._logits = torch.empty(logits, dtype=decoder.dtype, device=self.device)

    def microseconds(self, table: Table, without: Product | None = None) -> float:
        assert without is None, "this chain has only one linear"
        self.use(table)
        return graph_microseconds(self.run) / len(self._heads)

    def error(self, table: Table, rows: int) -> float:
        self.use(table)
        return self._ops.compare(lambda: self._decoder.logits(self._hidden[:rows]))

    def use(self, table: Table) -> None:
        """Use the plans from `table` in all later runs."""
        self._ops.backend.use(table)

    def run(self) -> None:
        """Compute all rows' logits with each copy of the output matrix."""
        for head in self._heads:
            self._decoder.head = head
            self._decoder.logits(self._hidden, self._logits)

    def run_few(self) -> None:
        """Compute the logits once, to launch every kernel."""
        self._decoder.logits(self._hidden, self._logits)


def _decoder(
    served: ReplicaModel, ops: WatchedOps, device: torch.device, gpu: GpuModel, context: int | None
) -> Decoder:
    return Decoder(
        served.config,
        lone_rank(served.tensor_parallel_size, device, pdl=gpu.pdl),
        cast(Ops, ops),
        TORCH_DTYPES[served.dtype],
        device,
        max_model_len=context or 1,
        fp8=served.fp8,
        kv_fp8=served.kv_fp8,
    )


def _kinds(served: ReplicaModel) -> list[int]:
    """For each layer kind, return the index of the first layer of that kind."""
    config = served.config
    kinds = list(zip(config.layer_kinds, config.sliding_windows, strict=True))
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _layer_bytes(decoder: Decoder) -> int:
    """Return the total size of all layers' matrices in bytes."""
    targets = [piece.target for piece in decoder.weight_shards() if ".layers." in piece.name]
    return sum(one.numel() * one.element_size() for one in targets if one is not None and one.dim() == 2)


def _randomise_gains(decoder: Decoder) -> None:
    """Set the norms' gains to random values, so that a kernel that does not apply a gain gives wrong
    results."""
    for piece in decoder.weight_shards():
        if piece.target is not None and piece.target.dim() == 1 and "norm" in piece.name:
            piece.target.uniform_(0.5, 1.5)


def _copies(size: int, device: torch.device) -> int:
    """Return the number of copies in a chain. Each copy has `size` bytes of weights. There are at least two,
    so that a layer's first kernel follows the last kernel of a different layer."""
    if device.type != "cuda":
        return 2
    return max(2, -(-_CACHES * torch.cuda.get_device_properties(device).L2_cache_size // size))
