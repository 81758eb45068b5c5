"""Defines the layer that has a mixture of experts instead of an MLP. Every rank has the full router, so all
ranks choose the same experts. A rank holds either a slice of every expert, as with a dense MLP, or a subset
of whole experts (`ExpertsConfig.whole`). In both layouts, the ranks' results are summed just once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import ModelConfig, Shard
from engine.model.layers import (
    Layer,
    Linear,
    Mlp,
    ParameterFactory,
    WeightShard,
    add_sum,
    rows_of,
)
from engine.parallel import Ranks
from kernels import Activation, ChoiceCount, ExpertActivation, Experts, Fp8Activation, Ops, Residual
from kernels.reference import expert_weight


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """For each layer, the number of tokens that chose each expert."""

    layers: list[int]
    """Indices of the MoE layers."""
    counts: torch.Tensor
    """Number of tokens per layer and expert: [MoE layers, experts] int64."""


@dataclass(frozen=True, slots=True)
class MixtureActivation:
    """The input of `MixtureDown`: the activations of the routed experts and of the shared expert."""

    routed: ExpertActivation
    shared: Activation | None
    """The shared expert's activations multiplied by its gate, or None if the model has no shared expert."""


class MixtureDown:
    """Computes and sums the down-projections of all experts. Implements `engine.model.layers.Summand`."""

    def __init__(self, ops: Ops, experts: Experts, shared: Linear | None) -> None:
        self.ops = ops
        self.experts = experts
        self.shared = shared

    def __call__(self, x: MixtureActivation, out: torch.Tensor | None = None) -> torch.Tensor:
        total = self.ops.experts_sum(x.routed, self.experts, out)
        if self.shared is not None and x.shared is not None:
            total += self.shared(x.shared)
        return total

    def add_to(
        self,
        residual: Residual,
        x: MixtureActivation,
        next_gain: torch.Tensor | None,
        eps: float,
        ranks: Ranks,
    ) -> Residual:
        if ranks.size > 1:
            one = expert_weight(self.experts.down, 0)
            return add_sum(self.ops, residual, self(x), one, next_gain, eps, ranks)
        if self.shared is not None and x.shared is not None:
            residual = self.ops.linear_add(x.shared, self.shared.weight, None, residual, None)
        return self.ops.experts_add(x.routed, self.experts, residual, next_gain)


class Mixture:
    """The router, the routed experts, and the shared expert if there is one. Implements
    `engine.model.layers.FeedForward`."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory) -> None:
        assert config.experts is not None
        self.config = config.experts
        self.ops = factory.ops
        hidden = config.hidden_size
        self.here = shard.experts(self.config)
        count, width = self.here.count, self.here.width
        column_part = 0 if self.config.whole else shard.cut(width)
        self.experts = Experts(
            router=factory.empty(self.config.count, hidden),
            gate_up=factory.matrix(count, 2 * width, hidden, row_part=width),
            down=factory.matrix(count, hidden, width, column_part=column_part),
            top_k=self.config.top_k,
            normalised=self.config.normalised,
            first=self.here.first,
        )
        self.choices = torch.zeros(self.config.count, dtype=torch.int64, device=factory.device)
        """Number of tokens that chose each expert."""
        self.shared, self.shared_gate = None, None
        if self.config.shared_intermediate_size is not None:
            self.shared = Mlp(config, shard, factory, self.config.shared_intermediate_size)
            self.shared_gate = factory.empty(1, hidden)
        self.down = MixtureDown(self.ops, self.experts, None if self.shared is None else self.shared.down)

    def activate(
        self, x: Residual, norm_weight: torch.Tensor, eps: float, live: torch.Tensor | None = None
    ) -> MixtureActivation:
        """Return the input of `down`. If `live` is given, the number of tokens that choose each expert is
        added to `choices`. Padding tokens, which have a negative number in `live`, are not counted
        (`kernels.ChoiceCount`)."""
        count = None if live is None else ChoiceCount(self.choices, live)
        routed = self.ops.norm_experts(x, norm_weight, eps, self.experts, count)
        if self.shared is None or self.shared_gate is None:
            return MixtureActivation(routed, None)
        gate = self.ops.norm_linear(Residual(x.values), norm_weight, eps, self.shared_gate, None).sigmoid()
        shared = self.shared.activate(x, norm_weight, eps)
        # Apply the gate to the input of the down-projection: scaling a linear layer's input scales its result
        # by the same factor.
        if isinstance(shared, Fp8Activation):
            return MixtureActivation(routed, Fp8Activation(shared.values, shared.scales * gate, shared.dtype))
        return MixtureActivation(routed, shared * gate)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        router = self.experts.router
        weight_shards = [WeightShard(f"{prefix}.gate.weight", tuple(router.shape), router)]
        for expert in range(self.config.count):
            weight_shards += self._expert_shards(f"{prefix}.experts.{expert}", expert - self.here.first)
        if self.shared is not None:
            weight_shards += self.shared.weight_shards(f"{prefix}.shared_expert")
            weight_shards.append(
                WeightShard(f"{prefix}.shared_expert_gate.weight", (1, router.shape[1]), self.shared_gate)
            )
        return weight_shards

    def _expert_shards(self, name: str, index: int) -> list[WeightShard]:
        """Return the shards of one expert's matrices. `index` is the expert's index on this rank and is out
        of range if another rank has the expert."""
        hidden, width = self.experts.router.shape[1], self.config.intermediate_size
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        if not 0 <= index < self.here.count:
            return [WeightShard(f"{name}.{part}.weight", shape, None) for part, shape in shapes.items()]
        part, start = self.here.width, self.here.start
        gate_up = expert_weight(self.experts.gate_up, index)
        down = expert_weight(self.experts.down, index)
        # A whole expert is read in complete rows. For slices, the ranks read different rows and exchange
        # columns.
        dim = 0 if self.config.whole else 1
        return [
            WeightShard.of(f"{name}.{matrix}.weight", shapes[matrix], weight, of_dim, start)
            for matrix, weight, of_dim in (
                ("gate_proj", rows_of(gate_up, 0, part), 0),
                ("up_proj", rows_of(gate_up, part, part), 0),
                ("down_proj", down, dim),
            )
        ]

    def pack(self) -> None:
        if self.shared is not None:
            self.shared.pack()


class ExpertsLayer(Layer):
    """The MoE layer: a norm, attention, a second norm and a mixture of experts."""

    feed_forward_type = Mixture
    mlp: Mixture

    def activate(self, residual: Residual, live: torch.Tensor | None) -> MixtureActivation:
        return self.mlp.activate(residual, self.post_norm, self.eps, live)
