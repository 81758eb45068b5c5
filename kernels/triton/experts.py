"""Launches the kernels of mixture-of-experts layers. The number of tokens determines which kernels run.

`activate` and `weighted_sum` are the two halves of a layer, as defined in `kernels.Ops`. For a few tokens, a
layer takes three launches: router, up and down. With FP8 weights, a fourth launch quantises the activations,
unless `down` does so itself. For many tokens, it takes more launches, because the tokens are first sorted by
expert. No function in this module waits for the device. All launches can be captured in CUDA graphs, because
their number and sizes depend only on the token count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels import ChoiceCount, ExpertActivation, Experts, Fp8Weight, Weight
from kernels.triton import experts_few, experts_many, experts_route, linear
from kernels.triton.attention_decode import multiprocessors_of
from kernels.triton.experts_many import ComputedChoices, Sorted
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans
from kernels.triton.linear_rows import Workspace

MAX_ROUTE_TOKENS = 16
"""Maximum number of tokens for which a single launch computes the norm and chooses the experts. This launch
reads the router's matrix once per token."""


@dataclass(frozen=True, slots=True)
class ChosenValues:
    """The GPU kernels' format of `ExpertActivation.values`."""

    values: torch.Tensor
    """Results of `silu(gate) × up`: [tokens × top_k, intermediate], sorted by expert if `by_expert` is given,
    otherwise in token order."""
    scales: torch.Tensor | None
    """Scales of quantised values: [tokens × top_k, 1] or [tokens × top_k, groups] float32, or None."""
    by_expert: Sorted | None
    """The (token, expert) pairs sorted by expert, or None if the values are in token order."""
    plan: ExpertsPlan
    """The plan for `down`."""


def shape_of(experts: Experts) -> ExpertsShape:
    """Return the sizes of an MoE layer that determine which plans it uses."""
    (weight, _, _), (every, hidden) = _parts(experts.gate_up), experts.router.shape
    sizes = (every, experts.top_k, hidden, weight.shape[1] // 2, len(weight))
    return ExpertsShape(weight.dtype, *sizes, _group(experts.down))


def activate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    experts: Experts,
    *,
    workspace: Workspace,
    plans: LayerPlans,
    count: ChoiceCount | None = None,
    pdl: bool = True,
) -> ExpertActivation:
    """Normalise `x [tokens, hidden]`, choose each token's experts and compute their activations
    (`kernels.Ops.norm_experts`).

    workspace: the stream's workspace.
    plans: the plans chosen by a table or by the rules for this number of tokens.
    count: if given, per-expert token counts that this call increments.
    """
    weight, scale, block = _parts(experts.gate_up)
    first, dtype = _first(experts), x.dtype
    values = None if scale is None else weight.dtype
    router = (x.contiguous(), norm_weight, eps, experts.router, experts.top_k)
    options: dict[str, Any] = {"normalised": experts.normalised, "values": values, "count": count, "pdl": pdl}
    options["group"] = _group(experts.gate_up)
    if len(x) <= MAX_ROUTE_TOKENS and not plans.grouped:
        routed = experts_route.route(*router, workspace=workspace, **options)
    else:
        routed = experts_route.route_many(*router, **options)
    by_expert = None
    if plans.grouped:
        rows = (plans.up.rows, plans.down.rows)
        share: dict[str, Any] = {"first": first or 0, "held": len(weight), "pdl": pdl}
        by_expert = experts_many.sort(routed, len(experts.router), rows, **share)
        activations = experts_many.up(
            routed.normed,
            routed.scales,
            by_expert,
            experts.top_k,
            weight,
            scale,
            plans.up,
            multiprocessors_of(x.device),
            block=block,
            dtype=dtype,
            pdl=pdl,
        )
    else:
        few: dict[str, Any] = {"block": block, "first": first, "dtype": dtype, "pdl": pdl}
        chosen = routed.chosen
        activations = experts_few.up(routed.normed, routed.scales, chosen, weight, scale, plans.up, **few)
    scales = None
    if scale is not None and not plans.down.quantises:
        group = _group(experts.down)
        activations, scales = linear.quantise(activations, values=weight.dtype, group=group, pdl=pdl)
    return ExpertActivation(
        routed.chosen, routed.weights, ChosenValues(activations, scales, by_expert, plans.down)
    )


def weighted_sum(
    x: ExpertActivation,
    experts: Experts,
    *,
    workspace: Workspace,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return each token's sum of `weight × down(activation)` over its chosen experts, plus the residual:
    `[tokens, hidden]` in the router's dtype (`kernels.Ops.experts_sum` and `experts_add`). If `out` is given,
    the result is written to it. `out` may be the residual. x: the result of `activate`."""
    weight, scale, block = _parts(experts.down)
    chosen: ChosenValues = x.values
    dtype, first = experts.router.dtype, _first(experts)
    if chosen.by_expert is None:
        return experts_few.down(
            chosen.values,
            chosen.scales,
            x.chosen,
            x.weights,
            weight,
            scale,
            chosen.plan,
            workspace=workspace,
            residual=residual,
            out=out,
            block=block,
            first=first,
            dtype=dtype,
            pdl=pdl,
        )
    results = experts_many.down(
        chosen.values,
        chosen.scales,
        chosen.by_expert,
        weight,
        scale,
        chosen.plan,
        multiprocessors_of(weight.device),
        block=block,
        dtype=dtype,
        pdl=pdl,
    )
    computed = None if first is None else ComputedChoices(x.chosen, first, len(weight))
    return experts_many.combine(results, x.weights, residual=residual, out=out, computed=computed, pdl=pdl)


def _first(experts: Experts) -> int | None:
    """Return this rank's first expert, or None if the rank has all experts."""
    weight, _, _ = _parts(experts.gate_up)
    return experts.first if len(weight) < len(experts.router) else None


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, int] | None]:
    """Return a weight's values, its scales if it is quantised, and the size of its blocks if it has any."""
    if not isinstance(weight, Fp8Weight):
        return weight, None, None
    return weight.values, weight.scales, weight.block


def _group(weight: Weight) -> int:
    """Return the columns of a weight's blocks, or 0 if the weight has no blocks."""
    block = _parts(weight)[2]
    return 0 if block is None else block[1]
