"""A decoder's layers on one rank, and how their weights map to a checkpoint's tensors.

Each kind of layer is a class in `engine.model.kinds.LAYER_KINDS`. A layer owns its parameters, computes its
part of a forward pass (`run`), and lists the checkpoint tensors it needs. Weight loading, kernel compilation
and kernel tuning all work on these classes, so for them a new kind of layer needs only a class and an entry
in LAYER_KINDS.

Each half of a layer (attention, and the MLP or experts) begins by normalising the residual and ends with a
linear layer whose result is added to the residual. The q, k and v weights are fused into one matrix, and the
gate and up weights into another.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import torch

from engine.config import ModelConfig, Shard, fp8_block
from engine.parallel import Ranks
from engine.rank_memory import RankMemory
from kernels import Activation, Fp8Weight, KvPool, Ops, Residual, Rotation, Weight
from kernels.reference import quantise_blocks, quantise_fp8


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Inputs shared by every layer of a forward pass. The residual, the parameters and the KV pool differ
    between layers and are not included."""

    ranks: Ranks
    cos_sin: torch.Tensor
    """Rotary table: [positions, head_dim] float32."""
    positions: torch.Tensor
    """Position of each token in its sequence: [tokens] int64."""
    kv_slots: torch.Tensor
    """KV slot index of each token: [tokens] int64 (see `ForwardInput.kv_slots`)."""
    attention_plan: Any
    """The result of `Ops.plan_attention` for this forward pass."""
    kept: torch.Tensor | None = None
    """Indices of the tokens whose results are needed: [rows] int64, the same tokens as in `attention_plan`.
    For all other tokens, the layer computes only keys and values. None if all results are needed."""
    live: torch.Tensor | None = None
    """One number per row of the layer's result: [rows] int64. A negative number marks a padding row. Expert
    choices are not counted for padding rows, or at all if this is None."""


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Allocates layer parameters."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False
    """Whether the layers' matrices are quantised."""
    fp8_blocks: bool = False
    """Whether quantised matrices have one scale per block instead of one scale per output."""
    memory: RankMemory | None = None
    """Allocates the parameters. If None, torch allocates them."""

    def empty(self, *shape: int) -> torch.Tensor:
        return self._empty(shape, self.dtype)

    def matrix(self, *shape: int, row_part: int = 0, column_part: int = 0) -> Weight:
        """Allocate a layer's weight `[outputs, inputs]`, or `[experts, outputs, inputs]`, with undefined
        values.

        The matrix may consist of several tensors or of a slice of one. Each tensor or slice begins at a
        multiple of `row_part` rows and `column_part` columns, both in the matrix and in the checkpoint. A
        value of 0 means that, along that dimension, the matrix is one complete tensor.
        """
        if not self.fp8:
            return self.empty(*shape)
        values = self._empty(shape, torch.float8_e4m3fn)
        if not self.fp8_blocks:
            return Fp8Weight(values, self._empty(shape[:-1], torch.float32))
        # Boundaries between ranks, or between tensors fused into one weight, may split one of a checkpoint's
        # quantisation blocks, which is then stored as several smaller blocks with the same scale.
        block = fp8_block(row_part), fp8_block(column_part)
        blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        return Fp8Weight(values, self._empty(blocks, torch.float32), block)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.memory is not None:
            return self.memory.empty_weights(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A checkpoint tensor, and the part of it that this rank loads."""

    name: str
    shape: tuple[int, ...]
    """Shape of the complete tensor in the checkpoint."""
    target: torch.Tensor | None
    """View of the parameter into which this rank's part is loaded, or None if another rank loads the
    tensor."""
    dim: int = 0
    """Dimension along which the tensor is split. Along all other dimensions, `target` has the tensor's full
    size."""
    start: int = 0
    """Index along `dim` at which this rank's part begins."""
    scales: torch.Tensor | None = None
    """View of the row or block scales of `target` if it is e4m3, otherwise None. Values that are not e4m3 in
    the checkpoint are quantised on loading."""
    block: tuple[int, int] | None = None
    """Block size of `target`, in rows and columns, if it has one scale per block (`kernels.Fp8Weight.block`),
    otherwise None."""

    @staticmethod
    def of(name: str, shape: tuple[int, ...], weight: Weight, dim: int, start: int) -> WeightShard:
        """Return a shard that takes rows or columns of a tensor and fills the whole of `weight` with them."""
        if isinstance(weight, Fp8Weight):
            return WeightShard(name, shape, weight.values, dim, start, weight.scales, weight.block)
        return WeightShard(name, shape, weight, dim, start)

    def part(self, whole: Any) -> Any:
        """Return this rank's part of `whole`, which is a tensor or can be sliced like one."""
        assert self.target is not None
        stop = self.start + self.target.shape[self.dim]
        return whole[self.start : stop] if self.dim == 0 else whole[:, self.start : stop]

    def fill(self, part: torch.Tensor) -> None:
        """Fill this rank's part with values of any floating-point dtype on any device."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part)
            return
        if self.block is not None:
            values, scales = quantise_blocks(part, self.block)
            self.target.copy_(values)
            self.scales.copy_(scales)
            return
        values, scales = quantise_fp8(part.to(self.target.device))
        self.target.copy_(values)
        self.scales.copy_(scales.squeeze(1))

    def fill_quantised(self, part: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill this rank's part with e4m3 values and their float32 scales: one per row (`[rows]`), or one for
        all rows (`[1]`)."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part.float() * scales.unsqueeze(1))
            return
        self.target.copy_(part)
        self.scales.copy_(scales)


class Linear:
    """A linear layer on this rank, with a weight `[out, in]` and an optional bias `[out]`. Call `pack` once,
    after loading.

    row_part, column_part: see `ParameterFactory.matrix`.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        inputs: int,
        outputs: int,
        bias: bool,
        *,
        row_part: int = 0,
        column_part: int = 0,
    ) -> None:
        self.ops = factory.ops
        self.weight = factory.matrix(outputs, inputs, row_part=row_part, column_part=column_part)
        self.bias = factory.empty(outputs) if bias else None

    def __call__(self, x: Activation, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias, out)

    def after_norm(
        self, x: Residual, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply `rms_norm`, then this linear layer, to `x.values`, and return the result. If `out` is given,
        the result is written to it."""
        return self.ops.norm_linear(x, norm_weight, eps, self.weight, self.bias, out)

    def add_to(
        self, residual: Residual, x: Activation, next_gain: torch.Tensor | None, eps: float, ranks: Ranks
    ) -> Residual:
        """Apply this linear layer to `x`, sum the results over the ranks, and return `residual` plus the sum.
        May overwrite `residual`.

        `next_gain` and `eps` are the gain and epsilon of the next norm applied to the result; `next_gain` is
        None after the last layer.
        """
        if ranks.size == 1:
            return self.ops.linear_add(x, self.weight, self.bias, residual, next_gain)
        return add_sum(self.ops, residual, self(x), self.weight, next_gain, eps, ranks)

    def pack(self) -> None:
        self.weight = self.ops.pack_weight(self.weight)

    def output_shards(self, name: str, whole: int, start: int, first: int, count: int) -> list[WeightShard]:
        """Return the shards that fill rows `[first, first + count)` of this weight (and bias) from a
        checkpoint tensor that has `whole` rows in total, beginning at row `start` of that tensor."""
        part = rows_of(self.weight, first, count)
        inputs = part.values.shape[1] if isinstance(part, Fp8Weight) else part.shape[1]
        weight_shards = [WeightShard.of(f"{name}.weight", (whole, inputs), part, 0, start)]
        if self.bias is not None:
            weight_shards.append(
                WeightShard(f"{name}.bias", (whole,), self.bias[first : first + count], 0, start)
            )
        return weight_shards

    def input_shards(self, name: str, whole: int, start: int, bias: bool) -> list[WeightShard]:
        """Return the shards that fill all columns of this weight from a checkpoint tensor that has `whole`
        columns in total, beginning at column `start` of that tensor. Only the first rank loads the bias,
        because the sum over the ranks must include it only once."""
        weight = self.weight
        outputs = len(weight.values if isinstance(weight, Fp8Weight) else weight)
        weight_shards = [WeightShard.of(f"{name}.weight", (outputs, whole), weight, 1, start)]
        if bias:
            weight_shards.append(WeightShard(f"{name}.bias", (outputs,), self.bias))
        return weight_shards


def rows_of(weight: Weight, first: int, count: int) -> Weight:
    """Return rows `[first, first + count)` of a weight `[out, in]`. If the weight has one scale per block,
    `first` must be the first row of a block."""
    if not isinstance(weight, Fp8Weight):
        return weight[first : first + count]
    rows = 1 if weight.block is None else weight.block[0]
    scales = weight.scales[first // rows : -(-(first + count) // rows)]
    return Fp8Weight(weight.values[first : first + count], scales, weight.block)


def add_sum(
    ops: Ops,
    residual: Residual,
    part: torch.Tensor,
    weight: Weight,
    next_gain: torch.Tensor | None,
    eps: float,
    ranks: Ranks,
) -> Residual:
    """Sum `part`, which was computed with the matrix `weight`, over the ranks. Returns `residual` plus the
    sum. For the other arguments, see `Linear.add_to`."""
    norm = None if next_gain is None else ops.next_norm(len(part), weight, next_gain, eps)
    return ranks.add_sum(residual, part, norm)


class Summand(Protocol):
    """The last operation in one half of a layer: a `Linear` or experts. Its result is added to the
    residual."""

    def __call__(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of the result: `[tokens, hidden]`. If `out` is given, the part may be
        written to it."""

    def add_to(
        self, residual: Residual, x: Any, next_gain: torch.Tensor | None, eps: float, ranks: Ranks
    ) -> Residual:
        """Return `residual` plus the result summed over the ranks, as `Linear.add_to` does."""


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition to the residual, yielded by a layer. The addend is the result of a linear layer or of
    experts, summed over the ranks."""

    residual: Residual
    linear: Summand
    x: Any
    """The input of `linear`."""
    next_gain: torch.Tensor | None
    """Gain of the norm applied to the result, or None after the last layer."""
    eps: float
    """Epsilon of the norm applied to the result."""

    def compute(self, ranks: Ranks) -> Residual:
        """Return the new residual. May overwrite `residual`."""
        return self.linear.add_to(self.residual, self.x, self.next_gain, self.eps, ranks)


LayerRun = Generator[Addition, Residual, Residual]
"""Type of a layer's `run`: a generator that yields additions, receives their results and returns the
residual."""


class Attention:
    """Grouped-query attention with rotary position embeddings and a paged KV cache."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, layer: int) -> None:
        self.config = config
        self.shard = shard
        self.ops = factory.ops
        self.window = config.sliding_windows[layer]
        self.scale = config.head_dim**-0.5
        q, kv = shard.heads * config.head_dim, shard.kv_heads * config.head_dim
        self.qkv = Linear(factory, config.hidden_size, q + 2 * kv, config.qkv_bias, row_part=gcd(q, kv))
        o_bias = config.o_bias and shard.rank == 0
        self.o = Linear(factory, q, config.hidden_size, o_bias, column_part=shard.cut(q))
        self.q_norm = factory.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = factory.empty(config.head_dim) if config.qk_norm else None
        self.qk_norm = None
        """Gains of the norms over all query heads and over all key heads, if the model has such norms."""
        if config.qk_norm_all_heads:
            self.qk_norm = factory.empty((shard.heads + shard.kv_heads) * config.head_dim)

    def __call__(
        self, qkv: torch.Tensor, inputs: LayerInput, kv: KvPool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention on this rank's heads and return the input of the output projection `o`:
        `[rows, heads × head_dim]`.

        `qkv` is `[tokens, (heads + 2 kv_heads) × head_dim]`. The result has one row per token, or per entry
        of `inputs.kept` if given. If `out` is given, the result is written to it.
        """
        if self.qk_norm is not None:
            self._normalise(qkv, self.qk_norm, inputs.ranks)
        attended = self.ops.attend(
            qkv,
            inputs.positions,
            inputs.kv_slots,
            Rotation(inputs.cos_sin, self.q_norm, self.k_norm, self.config.rms_norm_eps),
            kv,
            self.shard.heads,
            inputs.attention_plan,
            self.scale,
            self.window,
            None if out is None else out.view(len(out), self.shard.heads, -1),
        )
        return attended.view(len(attended), -1)

    def _normalise(self, qkv: torch.Tensor, gain: torch.Tensor, ranks: Ranks) -> None:
        """Apply the norms over all query heads and over all key heads to `qkv`, in place."""
        q = self.shard.heads * self.config.head_dim
        both = qkv[:, : len(gain)].float()
        # All ranks have the same number of elements, so the overall mean equals the mean of the ranks' means.
        means = [part.square().mean(dim=1) for part in (both[:, :q], both[:, q:])]
        mean = ranks.all_reduce(torch.stack(means)).div(ranks.size).unsqueeze(-1)
        scale_q, scale_k = torch.rsqrt(mean + self.config.rms_norm_eps)
        qkv[:, :q] = both[:, :q] * scale_q * gain[:q]
        qkv[:, q : len(gain)] = both[:, q:] * scale_k * gain[q:]

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        config, shard, size = self.config, self.shard, self.config.head_dim
        q, kv = shard.heads * size, shard.kv_heads * size
        whole_q, whole_kv = config.heads * size, config.kv_heads * size
        q_start, kv_start = shard.first_head * size, shard.first_kv_head * size
        weight_shards = [
            *self.qkv.output_shards(f"{prefix}.q_proj", whole_q, q_start, 0, q),
            *self.qkv.output_shards(f"{prefix}.k_proj", whole_kv, kv_start, q, kv),
            *self.qkv.output_shards(f"{prefix}.v_proj", whole_kv, kv_start, q + kv, kv),
            *self.o.input_shards(f"{prefix}.o_proj", whole_q, q_start, config.o_bias),
        ]
        if config.qk_norm:
            weight_shards.append(WeightShard(f"{prefix}.q_norm.weight", (size,), self.q_norm))
            weight_shards.append(WeightShard(f"{prefix}.k_norm.weight", (size,), self.k_norm))
        if self.qk_norm is not None:
            q_gain, k_gain = self.qk_norm.split((q, kv))
            weight_shards.append(WeightShard(f"{prefix}.q_norm.weight", (whole_q,), q_gain, 0, q_start))
            weight_shards.append(WeightShard(f"{prefix}.k_norm.weight", (whole_kv,), k_gain, 0, kv_start))
        return weight_shards

    def pack(self) -> None:
        self.qkv.pack()
        self.o.pack()


class FeedForward(Protocol):
    """The second half of a layer, after attention: an MLP or experts."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory) -> None: ...

    @property
    def down(self) -> Summand:
        """The last operation of this half of the layer, whose result is added to the residual."""

    def activate(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> Any:
        """Return the input of `down`, computed from the residual."""

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Return the checkpoint tensors that fill the parameters. Tensor names begin with `prefix`."""

    def pack(self) -> None:
        """Convert the filled weights to the backend's layout, as `Layer.pack` does."""


class Mlp:
    """The MLP `down(silu(gate x) × up x)`. `activate` computes the input of `down`, whose result is added to
    the residual.

    width: width of the complete MLP; defaults to the model's `intermediate_size`.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, factory: ParameterFactory, width: int | None = None
    ) -> None:
        self.config = config
        self.shard = shard
        self.ops = factory.ops
        self.width = config.intermediate_size if width is None else width
        self.part = shard.part(self.width)
        bias, hidden, part = config.mlp_bias, config.hidden_size, self.part
        self.gate_up = Linear(factory, hidden, 2 * part, bias, row_part=part)
        self.down = Linear(factory, part, hidden, bias and shard.rank == 0, column_part=shard.cut(part))

    def activate(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> Activation:
        """Compute the input of `down` from the residual: `[tokens, intermediate on this rank]`."""
        up = self.gate_up
        return self.ops.norm_gate_up(x, norm_weight, eps, up.weight, up.bias)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        whole, count = self.width, self.part
        start = self.shard.rank * count
        return [
            *self.gate_up.output_shards(f"{prefix}.gate_proj", whole, start, 0, count),
            *self.gate_up.output_shards(f"{prefix}.up_proj", whole, start, count, count),
            *self.down.input_shards(f"{prefix}.down_proj", whole, start, self.config.mlp_bias),
        ]

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()


class Layer:
    """The dense layer: a norm, attention, a second norm and an MLP."""

    feed_forward_type: type[FeedForward] = Mlp
    """Class of the layer's second half, which follows attention."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, index: int) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = factory.empty(config.hidden_size)
        """Gain of the layer's first norm, which may be fused with the previous layer's last operation."""
        self.attention = Attention(config, shard, factory, index)
        self.post_norm = factory.empty(config.hidden_size)
        self.mlp = self.feed_forward_type(config, shard, factory)

    def run(
        self, residual: Residual, inputs: LayerInput, kv: KvPool, next_gain: torch.Tensor | None
    ) -> LayerRun:
        """Run the layer as a generator that yields each addition to the residual, receives the new residual
        from the caller, and returns the final one. The pass's keys and values are written to `kv`. May
        overwrite `residual`. `next_gain` is the gain of the norm applied to the result, or None after the
        last layer.
        """
        attention, mlp = self.attention, self.mlp
        qkv = attention.qkv.after_norm(residual, self.input_norm, self.eps)
        if inputs.kept is not None:
            residual = Residual(residual.values.index_select(0, inputs.kept))
        attended = attention(qkv, inputs, kv)
        residual = yield Addition(residual, attention.o, attended, self.post_norm, self.eps)
        activated = self.activate(residual, inputs.live)
        return (yield Addition(residual, mlp.down, activated, next_gain, self.eps))

    def activate(self, residual: Residual, live: torch.Tensor | None) -> Any:
        """Compute the layer's second half up to, but not including, its last operation, and return that
        operation's input. `live` is `LayerInput.live`."""
        return self.mlp.activate(residual, self.post_norm, self.eps)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Return this layer's shards of checkpoint tensors whose names begin with `prefix`."""
        hidden = tuple(self.input_norm.shape)
        return [
            WeightShard(f"{prefix}.input_layernorm.weight", hidden, self.input_norm),
            *self.attention.weight_shards(f"{prefix}.self_attn"),
            WeightShard(f"{prefix}.post_attention_layernorm.weight", hidden, self.post_norm),
            *self.mlp.weight_shards(f"{prefix}.mlp"),
        ]

    def pack(self) -> None:
        """Convert the filled weights to the layout that is fastest for the backend."""
        self.attention.pack()
        self.mlp.pack()


def run_layer(layer_run: LayerRun, ranks: Ranks) -> Residual:
    """Run a layer, compute every addition it yields, and return the final residual."""
    try:
        addition = next(layer_run)
        while True:
            addition = layer_run.send(addition.compute(ranks))
    except StopIteration as end:
        residual: Residual = end.value
        return residual
