"""Computes the experts for a few tokens. Each program computes some of a GEMM's outputs, so tokens need not
be sorted by expert. `up` computes SwiGLU for each token's chosen experts. `down` computes the weighted sum of
the experts' results, plus the residual. Each function launches one of three kernel variants:

- `gemv`: a program multiplies weight rows of one chosen expert by one token on the CUDA cores. The weights of
  an expert chosen by several tokens are read once per token.
- `stream`: like `gemv`, but for FP8 weights and on the tensor cores (`experts_stream`).
- `dot`: a program multiplies weight rows of one expert by all tokens on the tensor cores, and keeps the
  results of the tokens that chose the expert. Each chosen expert's weights are therefore read only once. The
  weight is the 64-row operand of the tensor-core instruction. In `down`, the last program to finish a tile
  adds each token's weighted results in the order in which its experts were chosen, so results do not depend
  on timing.

Rounding: sums are computed in float32. SwiGLU rounds as the reference does. `down` multiplies the float32
sums by the routing weights, adds the products and the residual in float32, and rounds once. The reference
also rounds the result of each expert. With FP8 weights, the input of `up` is quantised. The input of `down`
is quantised for `dot`, while `gemv` and `stream` quantise each expert's activations themselves.

Programmatic dependent launch (PDL): `up` waits for the previous kernel before it reads the chosen experts,
and lets the next kernel start only after this wait. The router's results are therefore complete when `down`
starts. `down` reads the chosen experts and its first weights before waiting for `up`.

Several ranks: a rank may have only some of the experts (`first`). Programs for experts on other ranks end
without reading weights: `up` leaves the results undefined, and `down` adds nothing.
"""

from __future__ import annotations

import torch
import triton

from kernels.triton.block_scales import block_constants, check_scales, check_step
from kernels.triton.experts_few_kernels import _down_dot, _down_gemv, _up_dot, _up_gemv
from kernels.triton.experts_plans import ExpertsPlan
from kernels.triton.linear_rows import Workspace, check_results


def up(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    plan: ExpertsPlan,
    *,
    block: tuple[int, int] | None = None,
    first: int | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return `silu(gate) × up` of the chosen experts: `[tokens × top_k, intermediate]` in the model's dtype.

    x: `[tokens, hidden]` of the weight's dtype, contiguous and normalised.
    chosen: `[tokens, top_k]` int32; a token's experts are distinct.
    weight: `[experts, 2 × intermediate, hidden]`.
    x_scale, weight_scale: float32 scales `[tokens, 1]` and `[experts, 2 × intermediate]` if x and weight are
      quantised. dtype must then be the model's dtype.
    block: if given, each expert's matrix has one scale per block, and block contains the rows and columns per
      block. weight_scale is then `[experts, ⌈2 × intermediate / rows⌉, ⌈hidden / columns⌉]`, and x_scale is
      `[tokens, ⌈hidden / columns⌉]`, as returned by `linear.quantise`. `stream` does not support blocks.
    first: if given, the index of the first expert in `weight`.

    Results of experts not in `weight` are undefined.
    """
    tokens, hidden = x.shape
    top_k = chosen.shape[1]
    experts, columns = weight.shape[0], weight.shape[1] // 2
    _check(x, x_scale, chosen, weight, weight_scale, block, plan, tokens)
    out = torch.empty((tokens * top_k, columns), dtype=dtype or x.dtype, device=x.device)
    if not tokens:
        return out
    tiles = triton.cdiv(2 * columns, plan.block_n)
    shape = {
        "COLUMNS": columns,
        "K": hidden,
        "TOP_K": top_k,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EXPERTS": experts,
        "PARTIAL": first is not None,
        "SCALED": weight_scale is not None,
        **block_constants(block),
        "PDL": pdl,
        "num_warps": plan.warps,
        "launch_pdl": pdl,
    }
    arguments = (x, x_scale, chosen, weight, weight_scale, out, first or 0)
    if plan.form == "stream":
        # Imported here because Gluon has no CPU interpreter. Without a GPU, this branch is never executed.
        from kernels.triton.experts_stream import launch_up

        assert x_scale is not None and weight_scale is not None
        launch_up(plan, x, x_scale, chosen, weight, weight_scale, out, first, pdl)
        return out
    if plan.form == "gemv":
        _up_gemv[(tokens * top_k * tiles,)](*arguments, tokens, VECTOR=16 // weight.element_size(), **shape)
        return out
    by_pair, slots = _slots(tokens, top_k, experts)
    _up_dot[(slots * tiles,)](
        *arguments,
        tokens,
        ROWS=plan.rows,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        BY_PAIR=by_pair,
        num_stages=plan.stages,
        **shape,
    )
    return out


def down(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    plan: ExpertsPlan,
    *,
    workspace: Workspace,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
    first: int | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return each token's sum of `routing weight × down(x)` over its chosen experts, plus the residual:
    `[tokens, hidden]` in the model's dtype. If `out` is given, the result is written to it. `out` may be the
    residual.

    x: `[tokens × top_k, intermediate]`, the result of `up`. For `dot` with FP8 weights, it must be quantised,
      with `x_scale [tokens × top_k, 1]`.
    chosen: `[tokens, top_k]` int32.
    weights: `[tokens, top_k]` float32.
    weight: `[experts, hidden, intermediate]`.
    block: as in `up`. weight_scale is then `[experts, ⌈hidden / rows⌉, ⌈intermediate / columns⌉]`, and the
      scales of quantised x are `[tokens × top_k, ⌈intermediate / columns⌉]`.
    first: if given, the index of the first expert in `weight`. Nothing is added for experts not in `weight`.
    dtype: the model's dtype, if x's differs.
    pdl: use programmatic dependent launch. `chosen` is then read before the previous kernel has ended (see
      the module docstring).
    """
    tokens, top_k = chosen.shape
    experts, columns, intermediate = weight.shape
    _check(x, x_scale, chosen, weight, weight_scale, block, plan, tokens * top_k)
    out = torch.empty((tokens, columns), dtype=dtype or x.dtype, device=x.device) if out is None else out
    check_results(out, residual, (tokens, columns))
    if not tokens:
        return out
    tiles = triton.cdiv(columns, plan.block_n)
    shape = {
        "COLUMNS": columns,
        "K": intermediate,
        "TOP_K": top_k,
        "TOP_K_BLOCK": triton.next_power_of_2(top_k),
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EXPERTS": experts,
        "PARTIAL": first is not None,
        "SCALED": weight_scale is not None,
        **block_constants(block),
        "RESIDUAL": residual is not None,
        "PDL": pdl,
        "num_warps": plan.warps,
        "launch_pdl": pdl,
    }
    if plan.form == "stream":
        from kernels.triton.experts_stream import launch_down

        assert weight_scale is not None
        launch_down(plan, x, chosen, weights, weight, weight_scale, residual, out, first, pdl)
        return out
    if plan.form == "gemv":
        _down_gemv[(tokens * tiles,)](
            x,
            chosen,
            weights,
            weight,
            weight_scale,
            residual,
            out,
            first or 0,
            WHOLE=triton.next_power_of_2(intermediate),
            VECTOR=16 // weight.element_size(),
            **shape,
        )
        return out
    if tiles > len(workspace.arrived):
        raise ValueError(
            f"{columns} outputs need {tiles} tiles, but the workspace has {len(workspace.arrived)}"
        )
    by_pair, slots = _slots(tokens, top_k, experts)
    partials = torch.empty((tokens * top_k, columns), dtype=torch.float32, device=x.device)
    _down_dot[(slots * tiles,)](
        x,
        x_scale,
        chosen,
        weights,
        weight,
        weight_scale,
        residual,
        out,
        partials,
        workspace.arrived,
        tokens,
        first or 0,
        ROWS=plan.rows,
        BY_PAIR=by_pair,
        num_stages=plan.stages,
        **shape,
    )
    return out


def _slots(tokens: int, top_k: int, experts: int) -> tuple[bool, int]:
    """Return whether `dot` has one group of programs per (token, expert) pair (True) or per expert (False),
    and the number of groups."""
    pairs = tokens * top_k
    return pairs < experts, min(pairs, experts)


def _check(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    block: tuple[int, int] | None,
    plan: ExpertsPlan,
    rows: int,
) -> None:
    """Raise ValueError if shapes, dtypes or strides do not match. rows: expected number of rows of x."""
    if x.shape != (rows, weight.shape[2]):
        raise ValueError(
            f"x is {tuple(x.shape)}, but the weight {tuple(weight.shape)} needs {(rows, weight.shape[2])}"
        )
    if chosen.dtype != torch.int32:
        raise ValueError(f"chosen is {chosen.dtype}; expected int32")
    for name, tensor in (("x", x), ("chosen", chosen), ("weight", weight)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")
    if block is not None and plan.form == "stream":
        raise ValueError("plan has form 'stream', which does not support weights with one scale per block")
    if plan.form == "dot":
        check_step(plan.block_k, block)
        if len(chosen) > plan.rows:
            raise ValueError(f"plan has rows {plan.rows}, but there are {len(chosen)} tokens")
    if weight_scale is not None:
        check_scales(x, x_scale, weight, weight_scale, block)
