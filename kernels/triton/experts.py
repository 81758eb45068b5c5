"""Mixture-of-experts layers: choice of the kernels by the number of tokens, and the order of their launches.

`activate` and `weighted_sum` are the two halves of a layer, as `kernels.Ops` defines them. Few tokens take
three launches (router, up, down), with FP8 weights a fourth one that quantises the activations unless `down`
does. Many tokens take more launches, because they are sorted by expert first. No function here waits for the
device, and all launches can be captured in CUDA graphs: their number and sizes depend on the number of tokens
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels import ExpertActivation, Experts, Fp8Weight, Weight
from kernels.triton import experts_few, experts_many, experts_route, linear
from kernels.triton.attention_decode import multiprocessors_of
from kernels.triton.experts_many import Sorted
from kernels.triton.experts_plans import ExpertsPlan, LayerPlans, choose
from kernels.triton.linear_plans import HOPPER_SHARED
from kernels.triton.linear_rows import Workspace

MAX_ROUTE_TOKENS = 16
"""Largest number of tokens whose experts are chosen in one launch, which reads the router once per token."""


@dataclass(frozen=True, slots=True)
class ChosenValues:
    """`ExpertActivation.values` of these kernels."""

    values: torch.Tensor
    """`silu(gate) × up`: [tokens × top_k, intermediate], in the order of the choices or of `by_expert`."""
    scales: torch.Tensor | None
    """Scales of quantised values: [tokens × top_k, 1] float32; None if the values are not quantised."""
    by_expert: Sorted | None
    """The order of the values, or None if they are in the order of the choices."""
    plan: ExpertsPlan
    """The plan of `down`."""


def activate(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    experts: Experts,
    *,
    workspace: Workspace,
    shared_bytes: int = HOPPER_SHARED,
    plans: LayerPlans | None = None,
    pdl: bool = True,
) -> ExpertActivation:
    """Normalise `x [tokens, hidden]`, choose the experts of each token and compute their activations
    (`kernels.Ops.norm_experts`).

    workspace: of the stream. shared_bytes: shared memory that a program of the GPU can have. plans: replace
    the choice of the rules.
    """
    weight, scale = _parts(experts.gate_up)
    count, rows, hidden = weight.shape
    plans = plans or choose(
        len(x), experts.top_k, count, hidden, rows // 2, weight.dtype, shared_bytes=shared_bytes
    )
    dtype = x.dtype
    values = None if scale is None else weight.dtype
    router = (x.contiguous(), norm_weight, eps, experts.router, experts.top_k)
    options: dict[str, Any] = {"normalised": experts.normalised, "values": values, "pdl": pdl}
    if len(x) <= MAX_ROUTE_TOKENS and not plans.grouped:
        routed = experts_route.route(*router, workspace=workspace, **options)
    else:
        routed = experts_route.route_many(*router, **options)
    by_expert = None
    if plans.grouped:
        by_expert = experts_many.sort(routed, count, pdl=pdl)
        activations = experts_many.up(
            routed.normed,
            routed.scales,
            by_expert,
            experts.top_k,
            weight,
            scale,
            plans.up,
            multiprocessors_of(x.device),
            dtype=dtype,
            pdl=pdl,
        )
    else:
        activations = experts_few.up(
            routed.normed, routed.scales, routed.chosen, weight, scale, plans.up, dtype=dtype, pdl=pdl
        )
    scales = None
    if scale is not None and plans.down.form != "gemv":
        activations, scales = linear.quantise(activations, values=weight.dtype, pdl=pdl)
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
    `[tokens, hidden]` in the router's dtype, or in `out`, which may be the residual
    (`kernels.Ops.experts_sum` and `experts_add`). x: from `activate`."""
    weight, scale = _parts(experts.down)
    chosen: ChosenValues = x.values
    dtype = experts.router.dtype
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
        dtype=dtype,
        pdl=pdl,
    )
    return experts_many.combine(results, x.weights, residual=residual, out=out, pdl=pdl)


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
