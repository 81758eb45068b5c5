"""The products of a decoder's layer as decode runs them, to be timed.

Some layers with weights of their own, so that none is in cache, run one after another in a CUDA graph: norm
and qkv, RoPE and cache write, o + residual, norm and gate and up with SwiGLU, down + residual. Attention is
left out: it takes its time wherever the products take theirs. A product is judged by what the layer's time
does, since what stands before and after it (and starts early, with PDL) is part of its cost: so are the norms
that it cannot share with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import PAGE_TOKENS, Activation, DeferredNorm, Fp8Weight, KvPool, Residual, Rotation, Weight
from kernels.cuda import CudaOps
from kernels.dimensions import Dimensions
from kernels.reference import quantise_fp8, rms_norm
from kernels.triton import fused
from kernels.triton.linear_table import Product, Table
from kernels.tune.graphs import graph_microseconds

LAYER_PRODUCTS = ("qkv", "o", "gate_up", "down")

_EPS = 1e-5
_CACHES = 8
"""A chain's weights are that many times the L2, so that none is found there."""
_CHAIN_BYTES = 5 << 30
"""Weights that a graph reads, at least: its start, some 10 µs, is then a small part."""


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight


class Layers:
    """A layer's products on a device, for one number of rows. pdl: see `CudaOps`."""

    def __init__(self, dimensions: Dimensions, device: torch.device, *, pdl: bool) -> None:
        self.dimensions = dimensions
        self.device = device
        self._pdl = pdl
        shapes = dimensions.products
        self._shapes = {name: shapes[name] for name in LAYER_PRODUCTS}
        item = 1 if dimensions.fp8 else dimensions.torch_dtype.itemsize
        self.layer_bytes = sum(n * k for n, k in self._shapes.values()) * item
        self._layers = [self._make() for _ in range(_copies(self.layer_bytes, device))]
        self._turns = _turns(self.layer_bytes * len(self._layers))
        self._norm = self._gain()
        self._rows = 0

    def products(self) -> dict[str, Product]:
        dtype = torch.float8_e4m3fn if self.dimensions.fp8 else self.dimensions.torch_dtype
        return {name: Product(dtype, n, k) for name, (n, k) in self._shapes.items()}

    def set_rows(self, rows: int) -> None:
        """Make the inputs of a number of rows."""
        dimensions, self._rows = self.dimensions, rows
        heads, head_dim = dimensions.rank_heads, dimensions.head_dim
        self._x = self._random(rows, dimensions.hidden)
        self._qkv = self._random(rows, self._shapes["qkv"][0])
        self._activated = self._random(rows, self._shapes["down"][1])
        self._positions = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._slots = torch.arange(rows, device=self.device)
        self._rotation = Rotation(torch.rand(1, head_dim, device=self.device))
        pool = (-(-rows // PAGE_TOKENS), dimensions.rank_kv_heads, PAGE_TOKENS, head_dim)
        self._pool = KvPool(
            *(torch.zeros(pool, dtype=dimensions.torch_dtype, device=self.device) for _ in range(2))
        )
        self._heads = heads

    def microseconds(self, table: Table, without: str | None = None) -> float:
        """Of a layer, with the plans of `table`; without one of its products where that is named.

        Raises what a launch raises.
        """
        ops = self._ops(table)

        def chain() -> torch.Tensor:
            residual = Residual(self._x.clone())
            for layer in self._layers * self._turns:
                residual = self._run(ops, layer, residual, without)
            return residual.values

        return graph_microseconds(chain) / (len(self._layers) * self._turns)

    def launch(self, table: Table) -> None:
        """A layer as the first and as one of many, without waiting: to note its kernels, or to warm up."""
        ops, residual = self._ops(table), Residual(self._x.clone())
        for _ in range(2):
            residual = self._run(ops, self._layers[0], residual, None)

    def error(self, name: str, table: Table, rows: int) -> float:
        """Of a product of the first `rows` rows with the plans of `table`: ‖out − ref‖ / ‖ref‖, where ref is
        computed in float32 from the same weights (with FP8 weights, x is quantised alike). NaN if the result
        has any. A norm is shared where the product can."""
        ops, layer = self._ops(table), self._layers[0]
        weight = getattr(layer, name)
        x = self._activated[:rows] if name == "down" else self._random(rows, self._shapes[name][1])
        residual, stream = self._x[:rows], Residual(x)
        normed = x.float()
        if name in ("qkv", "gate_up"):
            stream = Residual(x, self._gained(x))
            normed = ops.rms_norm(x, self._norm, _EPS).float()
        if isinstance(weight, Fp8Weight):
            values, scales = quantise_fp8(normed.to(x.dtype))
            normed = values.float() * scales
        product = normed @ _floats(weight).T
        if name == "qkv":
            wanted, got = product, ops.norm_linear(stream, self._norm, _EPS, weight, None)
        elif name == "gate_up":
            gate, up = product.chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
            gated = ops.norm_gate_up(stream, self._norm, _EPS, weight, None)
            got = gated if isinstance(gated, torch.Tensor) else gated.values.float() * gated.scales
        else:
            wanted = residual.float() + product
            made = ops.linear_add(x, weight, None, Residual(residual.clone()), self._norm)
            got = made.values
            if made.deferred_norm is not None:
                factor = (made.deferred_norm.squares.sum(0) / self.dimensions.hidden + _EPS).rsqrt()
                got = torch.cat((got.float(), made.deferred_norm.values.float() * factor[:, None]), dim=1)
                wanted = torch.cat((wanted, rms_norm(wanted, self._norm.float(), _EPS)), dim=1)
        return float((got.float() - wanted).norm() / wanted.norm())

    def _ops(self, table: Table) -> CudaOps:
        return CudaOps(table=table, pdl=self._pdl)

    def _run(self, ops: CudaOps, layer: _Layer, residual: Residual, without: str | None) -> Residual:
        qkv = self._qkv
        if without != "qkv":
            qkv = ops.norm_linear(residual, self._norm, _EPS, layer.qkv, None)
        where = (self._positions, self._slots, self._rotation, self._pool)
        queries = fused.rope_cache_write(qkv, *where, self._heads, pdl=self._pdl)
        if without != "o":
            residual = ops.linear_add(queries.view(self._rows, -1), layer.o, None, residual, self._norm)
        activated: Activation = self._activated
        if without != "gate_up":
            activated = ops.norm_gate_up(residual, self._norm, _EPS, layer.gate_up, None)
        if without != "down":
            residual = ops.linear_add(activated, layer.down, None, residual, self._norm)
        return residual

    def _make(self) -> _Layer:
        return _Layer(**{name: self._weight(n, k) for name, (n, k) in self._shapes.items()})

    def _weight(self, n: int, k: int) -> Weight:
        weight = self._random(n, k).mul_(k**-0.5)
        return Fp8Weight(*_quantise_rows(weight)) if self.dimensions.fp8 else weight

    def _gain(self) -> torch.Tensor:
        return torch.rand(self.dimensions.hidden, device=self.device).add(0.5).to(self.dimensions.torch_dtype)

    def _gained(self, x: torch.Tensor) -> DeferredNorm:
        """As a product of tiles of 64 outputs writes it."""
        squares = x.float().pow(2).unflatten(1, (-1, 64)).sum(2).T.contiguous()
        return DeferredNorm((x.float() * self._norm.float()).to(x.dtype), squares)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dimensions.torch_dtype, device=self.device)


class Head:
    """Norm and the output matrix, which is in the model's dtype always. pdl: see `CudaOps`."""

    def __init__(self, dimensions: Dimensions, device: torch.device, *, pdl: bool) -> None:
        n, k = dimensions.products["lm_head"]
        self._pdl = pdl
        self.product = Product(dimensions.torch_dtype, n, k)
        self._norm = torch.ones(k, dtype=dimensions.torch_dtype, device=device)
        size = n * k * dimensions.torch_dtype.itemsize
        self._weights = [
            torch.randn((n, k), dtype=dimensions.torch_dtype, device=device).mul_(k**-0.5)
            for _ in range(_copies(size, device))
        ]
        self._turns = _turns(size * len(self._weights))
        self.set_rows(1)

    def set_rows(self, rows: int) -> None:
        weight = self._weights[0]
        self._x = torch.randn((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        self._logits = torch.empty((rows, weight.shape[0]), dtype=weight.dtype, device=weight.device)

    def launch(self, table: Table) -> None:
        """As `Layers.launch`."""
        self._run(self._ops(table), self._weights[0])

    def microseconds(self, table: Table) -> float:
        """Of norm and product."""
        ops = self._ops(table)

        def chain() -> None:
            for weight in self._weights * self._turns:
                self._run(ops, weight)

        return graph_microseconds(chain) / (len(self._weights) * self._turns)

    def error(self, table: Table, rows: int) -> float:
        """As `Layers.error`."""
        ops, x = self._ops(table), self._x[:rows]
        wanted = ops.rms_norm(x, self._norm, _EPS).float() @ self._weights[0].float().T
        got = ops.norm_linear(Residual(x), self._norm, _EPS, self._weights[0], None)
        return float((got.float() - wanted).norm() / wanted.norm())

    def _ops(self, table: Table) -> CudaOps:
        return CudaOps(table=table, pdl=self._pdl)

    def _run(self, ops: CudaOps, weight: torch.Tensor) -> None:
        ops.norm_linear(Residual(self._x), self._norm, _EPS, weight, None, self._logits)


def _copies(size: int, device: torch.device) -> int:
    """Of something of `size` bytes that make a chain."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-_CACHES * cache // size))


def _turns(size: int) -> int:
    """Times that a graph goes through weights of `size` bytes."""
    return -(-_CHAIN_BYTES // size)


def _quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantise_fp8(weight)
    return values, scales.flatten()


def _floats(weight: Weight) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        return weight.values.float() * weight.scales[:, None]
    return weight.float()
