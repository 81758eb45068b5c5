"""The layers of a decoder on one rank, and how their weights are found in a checkpoint.

A layer is a class of `engine.model.kinds.LAYER_KINDS`: it has its parameters, runs a pass (`run`) and lists
the tensors of a checkpoint that fill it. Compiling, loading and tuning kernels run the layers themselves, so
a new kind needs no entry anywhere else.

Each half of a layer reads the residual through its norm and ends in a linear that is added to the residual.
q, k and v are one fused weight; gate and up are another.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.config import ModelConfig, Shard
from engine.parallel import Ranks
from kernels import Activation, Fp8Weight, KvPool, Ops, Residual, Rotation, Weight
from kernels.reference import quantise_fp8


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The inputs of a layer, besides the residual and its own parameters and cache."""

    ranks: Ranks
    cos_sin: torch.Tensor
    """The rotary table: [positions, head_dim] float32."""
    positions: torch.Tensor
    """Positions of the tokens in their sequences: [tokens] int64."""
    kv_slots: torch.Tensor
    """KV slot indices of the tokens: [tokens] int64, see `ForwardInput.kv_slots`."""
    attention_plan: Any
    """The result of `Ops.plan_attention` for the pass."""
    kept: torch.Tensor | None = None
    """Indices of the only tokens whose result is needed: [rows] int64, as in `attention_plan`. The layer
    computes keys and values of all tokens, and everything else only for these; None: for all tokens."""


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Allocates the parameters of layers."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False
    """Whether the layers' matrices are quantised."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, *shape: int) -> Weight:
        """Return a weight of a layer with undefined values: `[out, in]`, or `[experts, out, in]`."""
        if not self.fp8:
            return self.empty(*shape)
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return Fp8Weight(values, torch.empty(shape[:-1], dtype=torch.float32, device=self.device))


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A tensor of the checkpoint and the part of it that this rank loads."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    target: torch.Tensor | None
    """The view of a parameter that the part fills; None if the part belongs to another rank."""
    dim: int = 0
    """The dimension along which the tensor is split; `target` covers the other dimensions completely."""
    start: int = 0
    """First index of the part along `dim`."""
    scales: torch.Tensor | None = None
    """The view of the scales of `target`'s rows if `target` is e4m3; values of other dtypes are then
    quantised."""

    def part(self, whole: Any) -> Any:
        """Return this rank's part of the tensor, or of anything that is sliced like the tensor."""
        assert self.target is not None
        stop = self.start + self.target.shape[self.dim]
        return whole[self.start : stop] if self.dim == 0 else whole[:, self.start : stop]

    def fill(self, part: torch.Tensor) -> None:
        """Fill the part from values in any floating dtype, on any device."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part)
            return
        values, scales = quantise_fp8(part.to(self.target.device))
        self.target.copy_(values)
        self.scales.copy_(scales.squeeze(1))

    def fill_quantised(self, part: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill the part from e4m3 values and their float32 scales: `[rows]`, one per row, or `[1]`, one for
        all."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part.float() * scales.unsqueeze(1))
            return
        self.target.copy_(part)
        self.scales.copy_(scales)


class Linear:
    """A weight `[out, in]` and an optional bias `[out]` on this rank. Call `pack` once, after loading."""

    def __init__(self, factory: ParameterFactory, inputs: int, outputs: int, bias: bool) -> None:
        self.ops = factory.ops
        self.weight = factory.matrix(outputs, inputs)
        self.bias = factory.empty(outputs) if bias else None

    def __call__(self, x: Activation) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def after_norm(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the linear applied to `rms_norm(x.values)`."""
        return self.ops.norm_linear(x, norm_weight, eps, self.weight, self.bias)

    def add_to(
        self, residual: Residual, x: Activation, next_gain: torch.Tensor | None, eps: float, ranks: Ranks
    ) -> Residual:
        """Return `residual` plus this linear, summed over the ranks. May overwrite `residual`.

        next_gain, eps: of the norm that reads the result; next_gain is None after the last layer.
        """
        if ranks.size == 1:
            return self.ops.linear_add(x, self.weight, self.bias, residual, next_gain)
        return add_sum(self.ops, residual, self(x), self.weight, next_gain, eps, ranks)

    def pack(self) -> None:
        self.weight = self.ops.pack_weight(self.weight)

    def output_shards(self, name: str, whole: int, start: int, first: int, count: int) -> list[WeightShard]:
        """Map rows `[first, first + count)` of this weight (and bias) to the rows from `start` on of the
        checkpoint's tensor, which has `whole` rows."""
        values, scales = values_and_scales(self.weight)
        target = values[first : first + count]
        scales = None if scales is None else scales[first : first + count]
        weight_shards = [WeightShard(f"{name}.weight", (whole, values.shape[1]), target, 0, start, scales)]
        if self.bias is not None:
            weight_shards.append(
                WeightShard(f"{name}.bias", (whole,), self.bias[first : first + count], 0, start)
            )
        return weight_shards

    def input_shards(self, name: str, whole: int, start: int, bias: bool) -> list[WeightShard]:
        """Map all columns of this weight to the columns from `start` on of the checkpoint's tensor, which has
        `whole` columns. Only the first rank has the bias, because the sum over the ranks must contain it
        once."""
        values, scales = values_and_scales(self.weight)
        outputs = values.shape[0]
        weight_shards = [WeightShard(f"{name}.weight", (outputs, whole), values, 1, start, scales)]
        if bias:
            weight_shards.append(WeightShard(f"{name}.bias", (outputs,), self.bias))
        return weight_shards


def values_and_scales(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values of a weight, and its scales if it is FP8."""
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.scales
    return weight, None


def add_sum(
    ops: Ops,
    residual: Residual,
    part: torch.Tensor,
    weight: Weight,
    next_gain: torch.Tensor | None,
    eps: float,
    ranks: Ranks,
) -> Residual:
    """Return `residual` plus the sum of `part` over several ranks. weight: the matrix that computed `part`;
    the others are as in `Linear.add_to`."""
    norm = None if next_gain is None else ops.next_norm(len(part), weight, next_gain, eps)
    return ranks.add_sum(residual, part, norm)


class Summand(Protocol):
    """The last operation of half a layer, whose result is added to the residual: a `Linear`, or experts."""

    def __call__(self, x: Any) -> torch.Tensor:
        """Return this rank's part of the result: `[tokens, hidden]`."""

    def add_to(
        self, residual: Residual, x: Any, next_gain: torch.Tensor | None, eps: float, ranks: Ranks
    ) -> Residual:
        """Return `residual` plus the result, summed over the ranks, as `Linear.add_to`."""


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition to the residual, which a layer yields: the result of a linear or of experts, summed over
    the ranks."""

    residual: Residual
    linear: Summand
    x: Any
    """The input of `linear`."""
    next_gain: torch.Tensor | None
    """The gain of the norm that reads the result; None after the last layer."""
    eps: float
    """The epsilon of that norm."""

    def compute(self, ranks: Ranks) -> Residual:
        """Return the new residual; may overwrite `residual`."""
        return self.linear.add_to(self.residual, self.x, self.next_gain, self.eps, ranks)


LayerRun = Generator[Addition, Residual, Residual]
"""The type of a layer's `run`: it yields additions, receives their results, and returns the residual."""


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, layer: int) -> None:
        self.config = config
        self.shard = shard
        self.ops = factory.ops
        self.window = config.sliding_windows[layer]
        self.scale = config.head_dim**-0.5
        outputs = (shard.heads + 2 * shard.kv_heads) * config.head_dim
        inputs = shard.heads * config.head_dim
        self.qkv = Linear(factory, config.hidden_size, outputs, config.qkv_bias)
        self.o = Linear(factory, inputs, config.hidden_size, config.o_bias and shard.rank == 0)
        self.q_norm = factory.empty(config.head_dim) if config.qk_norm else None
        self.k_norm = factory.empty(config.head_dim) if config.qk_norm else None
        self.qk_norm = None
        """The gains of the norm of all query heads, and of that of all key heads, if the model has them."""
        if config.qk_norm_all_heads:
            self.qk_norm = factory.empty((shard.heads + shard.kv_heads) * config.head_dim)

    def __call__(self, qkv: torch.Tensor, inputs: LayerInput, kv: KvPool) -> torch.Tensor:
        """Return the attention of `qkv [tokens, (heads + 2 kv_heads) × head_dim]`, which is the input of `o`:
        `[rows, heads × head_dim]` for this rank's heads. There is one row per token, or per entry of
        `inputs.kept`."""
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
        )
        return attended.view(len(attended), -1)

    def _normalise(self, qkv: torch.Tensor, gain: torch.Tensor, ranks: Ranks) -> None:
        """Apply the norms of all query heads and of all key heads to `qkv`, in place."""
        q = self.shard.heads * self.config.head_dim
        both = qkv[:, : len(gain)].float()
        # All ranks have equally many numbers, so the mean over all of them is the mean of their means.
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
    """The half of a layer after attention: an MLP, or experts."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory) -> None: ...

    @property
    def down(self) -> Summand:
        """The operation whose result is added to the residual."""

    def activate(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> Any:
        """Return the input of `down`, computed from the residual."""

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Return the tensors of the checkpoint that fill the parameters. Their names begin with `prefix`."""

    def pack(self) -> None:
        """As `Layer.pack`."""


class Mlp:
    """`down(silu(gate x) × up x)`. `activate` stops before `down`, whose result is added to the residual.

    width: of the whole MLP; None: the model's `intermediate_size`.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, factory: ParameterFactory, width: int | None = None
    ) -> None:
        self.config = config
        self.shard = shard
        self.ops = factory.ops
        self.width = config.intermediate_size if width is None else width
        self.part = shard.part(self.width)
        self.gate_up = Linear(factory, config.hidden_size, 2 * self.part, config.mlp_bias)
        self.down = Linear(factory, self.part, config.hidden_size, config.mlp_bias and shard.rank == 0)

    def activate(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> Activation:
        """Return the input of `down`: `[tokens, intermediate on this rank]`, computed from the residual."""
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
    """The dense layer: norm, attention, norm, MLP."""

    feed_forward_type: type[FeedForward] = Mlp
    """The class of the half after attention."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, index: int) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = factory.empty(config.hidden_size)
        """The gain of the norm that reads the residual first. The previous layer may fuse this norm."""
        self.attention = Attention(config, shard, factory, index)
        self.post_norm = factory.empty(config.hidden_size)
        self.mlp = self.feed_forward_type(config, shard, factory)

    def run(
        self, residual: Residual, inputs: LayerInput, kv: KvPool, next_gain: torch.Tensor | None
    ) -> LayerRun:
        """Run the layer: yield each addition to the residual, receive its result from the caller, and return
        the residual after the layer. Writes the keys and values of the pass into `kv`. May overwrite
        `residual`.

        next_gain: the gain of the norm that reads the result; None after the last layer.
        """
        attention, mlp = self.attention, self.mlp
        qkv = attention.qkv.after_norm(residual, self.input_norm, self.eps)
        if inputs.kept is not None:
            residual = Residual(residual.values.index_select(0, inputs.kept))
        attended = attention(qkv, inputs, kv)
        residual = yield Addition(residual, attention.o, attended, self.post_norm, self.eps)
        activated = mlp.activate(residual, self.post_norm, self.eps)
        return (yield Addition(residual, mlp.down, activated, next_gain, self.eps))

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Return the tensors of the checkpoint that fill this layer. Their names begin with `prefix`."""
        hidden = tuple(self.input_norm.shape)
        return [
            WeightShard(f"{prefix}.input_layernorm.weight", hidden, self.input_norm),
            *self.attention.weight_shards(f"{prefix}.self_attn"),
            WeightShard(f"{prefix}.post_attention_layernorm.weight", hidden, self.post_norm),
            *self.mlp.weight_shards(f"{prefix}.mlp"),
        ]

    def pack(self) -> None:
        """Convert the weights, once they are filled, into the layout that the backend reads fastest."""
        self.attention.pack()
        self.mlp.pack()


def run_layer(layer_run: LayerRun, ranks: Ranks) -> Residual:
    """Run a layer, and compute each addition to the residual that it yields."""
    try:
        addition = next(layer_run)
        while True:
            addition = layer_run.send(addition.compute(ranks))
    except StopIteration as end:
        residual: Residual = end.value
        return residual
