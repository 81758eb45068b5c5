"""The layers of a decoder on one rank, and how their weights are found in a checkpoint.

A layer is a class of LAYER_KINDS: it has its parameters, runs a pass (`run`) and lists the tensors of a
checkpoint that fill it. Compiling, loading and tuning kernels run the layers themselves, so a new kind needs
no entry anywhere else.

Each half of a layer reads the residual through its norm and ends in a linear that is added to the residual.
q, k and v are one fused weight; gate and up are another.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import ModelConfig, Shard
from engine.parallel import Ranks
from kernels import Activation, Fp8Weight, KvPool, Ops, Residual, Rotation, Weight
from kernels.reference import quantise_fp8


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer of a pass reads besides the residual and its own parameters and cache."""

    ranks: Ranks
    cos_sin: torch.Tensor
    """[positions, head_dim] float32: the rotary table."""
    positions: torch.Tensor
    """[tokens] int64"""
    kv_slots: torch.Tensor
    """[tokens] int64: KV slot indices, see `ForwardInput.kv_slots`."""
    attention_plan: Any
    """What `Ops.plan_attention` made for the pass."""
    kept: torch.Tensor | None = None
    """[rows] int64: the only tokens whose result is needed, as in `attention_plan`. The layer computes keys
    and values of all tokens, and everything else of these alone; None: all tokens."""


@dataclass(frozen=True, slots=True)
class ParameterFactory:
    """Where the weights of a layer are made."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False
    """Whether the layers' matrices are quantised."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def matrix(self, outputs: int, inputs: int) -> Weight:
        """An unset weight of a layer."""
        if not self.fp8:
            return self.empty(outputs, inputs)
        values = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=self.device)
        return Fp8Weight(values, torch.empty(outputs, dtype=torch.float32, device=self.device))


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A tensor of the checkpoint and this rank's part of it: the loader's instruction."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    target: torch.Tensor | None
    """A view of a parameter, which the part fills; None: another rank's."""
    dim: int = 0
    """The dimension that is split; `target` has the others whole."""
    start: int = 0
    """First index of the part along `dim`."""
    scales: torch.Tensor | None = None
    """A view of the scales of `target`'s rows, where it is e4m3: numbers of another dtype are quantised."""

    def part(self, whole: Any) -> Any:
        """This rank's part of the tensor, or of anything that is sliced like one."""
        assert self.target is not None
        stop = self.start + self.target.shape[self.dim]
        return whole[self.start : stop] if self.dim == 0 else whole[:, self.start : stop]

    def fill(self, part: torch.Tensor) -> None:
        """Set the part from numbers in any floating dtype, on any device."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part)
            return
        values, scales = quantise_fp8(part.to(self.target.device))
        self.target.copy_(values)
        self.scales.copy_(scales.squeeze(1))

    def fill_quantised(self, part: torch.Tensor, scales: torch.Tensor) -> None:
        """Set the part from e4m3 numbers and the float32 scale of each of its rows, `[rows]`, or of all,
        `[1]`."""
        assert self.target is not None
        if self.scales is None:
            self.target.copy_(part.float() * scales.unsqueeze(1))
            return
        self.target.copy_(part)
        self.scales.copy_(scales)


class Linear:
    """A weight `[out, in]` and perhaps a bias `[out]`, on this rank. `pack` once, after loading."""

    def __init__(self, factory: ParameterFactory, inputs: int, outputs: int, bias: bool) -> None:
        self.ops = factory.ops
        self.weight = factory.matrix(outputs, inputs)
        self.bias = factory.empty(outputs) if bias else None

    def __call__(self, x: Activation) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def after_norm(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The product of `rms_norm(x.values)`."""
        return self.ops.norm_linear(x, norm_weight, eps, self.weight, self.bias)

    def add_to(
        self, residual: Residual, x: Activation, next_gain: torch.Tensor | None, ranks: Ranks
    ) -> Residual:
        """`residual` and the sum over the ranks of this product; may overwrite `residual`. next_gain: of the
        norm that reads it next, None after the last layer."""
        if ranks.size == 1:
            return self.ops.linear_add(x, self.weight, self.bias, residual, next_gain)
        part = self(x)
        deferred = next_gain is not None and self.ops.defers_norm(len(part), self.weight)
        return ranks.add_sum(residual, part, next_gain if deferred else None)

    def pack(self) -> None:
        self.weight = self.ops.pack_weight(self.weight)

    def output_shards(self, name: str, whole: int, start: int, first: int, count: int) -> list[WeightShard]:
        """Rows `[first, first + count)` of this weight (and bias) are rows from `start` of the checkpoint's
        `whole` rows."""
        values, scales = self._parts()
        target = values[first : first + count]
        scales = None if scales is None else scales[first : first + count]
        weight_shards = [WeightShard(f"{name}.weight", (whole, values.shape[1]), target, 0, start, scales)]
        if self.bias is not None:
            weight_shards.append(
                WeightShard(f"{name}.bias", (whole,), self.bias[first : first + count], 0, start)
            )
        return weight_shards

    def input_shards(self, name: str, whole: int, start: int, bias: bool) -> list[WeightShard]:
        """All columns of this weight are columns from `start` of the checkpoint's `whole` columns. The sum
        over the ranks must hold the bias once: the first rank has it."""
        values, scales = self._parts()
        outputs = values.shape[0]
        weight_shards = [WeightShard(f"{name}.weight", (outputs, whole), values, 1, start, scales)]
        if bias:
            weight_shards.append(WeightShard(f"{name}.bias", (outputs,), self.bias))
        return weight_shards

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(self.weight, Fp8Weight):
            return self.weight.values, self.weight.scales
        return self.weight, None


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition to the residual that a layer yields: the product of a linear, summed over the ranks."""

    residual: Residual
    linear: Linear
    x: Activation
    next_gain: torch.Tensor | None
    """The gain of the norm that reads the result next; None after the last layer."""

    def compute(self, ranks: Ranks) -> Residual:
        """Return the new residual; may overwrite `residual`."""
        return self.linear.add_to(self.residual, self.x, self.next_gain, ranks)


LayerRun = Generator[Addition, Residual, Residual]
"""A layer's `run`: yields additions, is sent their results, and returns the residual."""


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

    def __call__(self, qkv: torch.Tensor, inputs: LayerInput, kv: KvPool) -> torch.Tensor:
        """Return the attention of `qkv [tokens, (heads + 2 kv_heads) × head_dim]`, which is the input of `o`:
        `[rows, heads × head_dim]` of this rank's heads, a row for each token or for each of `inputs.kept`."""
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
        return weight_shards

    def pack(self) -> None:
        self.qkv.pack()
        self.o.pack()


class Mlp:
    """`down(silu(gate x) × up x)`, cut before `down`, whose product goes to the residual stream."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory) -> None:
        self.config = config
        self.shard = shard
        self.ops = factory.ops
        self.gate_up = Linear(factory, config.hidden_size, 2 * shard.intermediate, config.mlp_bias)
        self.down = Linear(
            factory, shard.intermediate, config.hidden_size, config.mlp_bias and shard.rank == 0
        )

    def activate(self, x: Residual, norm_weight: torch.Tensor, eps: float) -> Activation:
        """`[tokens, intermediate on this rank]` from the residual stream: the input of `down`."""
        up = self.gate_up
        return self.ops.norm_gate_up(x, norm_weight, eps, up.weight, up.bias)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        whole, count = self.config.intermediate_size, self.shard.intermediate
        start = self.shard.first_intermediate
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

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, index: int) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = factory.empty(config.hidden_size)
        """The gain of the norm that reads the residual first. The layer in front may share this norm."""
        self.attention = Attention(config, shard, factory, index)
        self.post_norm = factory.empty(config.hidden_size)
        self.mlp = Mlp(config, shard, factory)

    def run(
        self, residual: Residual, inputs: LayerInput, kv: KvPool, next_gain: torch.Tensor | None
    ) -> LayerRun:
        """Run the layer: yield each addition to the residual, whose result the caller sends back, and return
        the residual after the layer. Keys and values of the pass are written into `kv`. May overwrite
        `residual`.

        next_gain: the gain of the norm that reads the result; None after the last layer.
        """
        attention, mlp = self.attention, self.mlp
        qkv = attention.qkv.after_norm(residual, self.input_norm, self.eps)
        if inputs.kept is not None:
            residual = Residual(residual.values.index_select(0, inputs.kept))
        attended = attention(qkv, inputs, kv)
        residual = yield Addition(residual, attention.o, attended, self.post_norm)
        activated = mlp.activate(residual, self.post_norm, self.eps)
        return (yield Addition(residual, mlp.down, activated, next_gain))

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        """Return the tensors of a checkpoint that fill the layer, whose names begin with `prefix`."""
        hidden = tuple(self.input_norm.shape)
        return [
            WeightShard(f"{prefix}.input_layernorm.weight", hidden, self.input_norm),
            *self.attention.weight_shards(f"{prefix}.self_attn"),
            WeightShard(f"{prefix}.post_attention_layernorm.weight", hidden, self.post_norm),
            *self.mlp.weight_shards(f"{prefix}.mlp"),
        ]

    def pack(self) -> None:
        """Lay the weights out as the backend reads them fastest, once they are filled."""
        self.attention.pack()
        self.mlp.pack()


def run_layer(layer_run: LayerRun, ranks: Ranks) -> Residual:
    """Run a layer, adding to the residual as the layer yields."""
    try:
        addition = next(layer_run)
        while True:
            addition = layer_run.send(addition.compute(ranks))
    except StopIteration as end:
        residual: Residual = end.value
        return residual


LAYER_KINDS: dict[str, type[Layer]] = {"dense": Layer}
"""The class of each kind of layer (`ModelConfig.layer_kinds`)."""
