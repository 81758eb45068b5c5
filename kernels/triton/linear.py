# mypy: allow-untyped-defs
"""Computes a decode step's GEMMs, which have up to 64 rows and spend nearly all of their time reading
weights.

`linear` and `linear_fp8` accept any number of rows. A table of measured shapes (`linear_table`) selects one
of this package's kernels, or cuBLAS (through torch) where that is faster. For shapes not in the table, the
rules in `linear_plans` choose the kernel.

Each GEMM is fused with the operations on its input and its result. RMSNorm and the quantisation of x are the
GEMM's prologue. Bias, residual and SwiGLU are its epilogue. With one row, every program normalises and
quantises the row itself. With more rows, and for weights with one scale per block, the norm and the
quantisation are a separate launch, or two consecutive GEMMs share the norm (`kernels.DeferredNorm`). To share
a norm, the first GEMM multiplies its result by the norm's gain and sums the squares. The second GEMM
multiplies its sums by each token's remaining factor.

Rounding:
- x is normalised in float32 and rounded once to its dtype, as in `reference.rms_norm`. For FP8, x is then
  divided by its scale (its largest magnitude / 448) and rounded to e4m3, as in `reference.quantise_fp8`. For
  weights with one scale per block, each group of a row's columns has its own scale.
- A shared norm rounds x × gain once, whereas the reference rounds x × factor × gain once. The relative error
  is the same if x × gain is within the dtype's range. With float16, x × gain may exceed this range.
- Sums are computed in float32. Bias and residual are added to the float32 sum, which is rounded once to the
  dtype of `out`. The reference rounds before it adds a residual.
- SwiGLU rounds gate, up and silu(gate), as the reference does.
- FP8 GEMMs of one row with one scale per output are exact in float32. All others use the tensor cores, which
  keep only about 14 bits of a sum. The total relative error is then 2e-3 to 4e-3, including 1.7e-3 from
  rounding to bfloat16.

No function in this module waits for the device, and all launches can be captured in CUDA graphs. Programmatic
dependent launch (PDL) does not change any bit of a result, because the order of every sum is fixed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import DeferredNorm
from kernels.triton import fused
from kernels.triton.block_scales import check_scales, check_step
from kernels.triton.linear_plans import ALIGNMENT, FusedOps, GemmPlan
from kernels.triton.linear_rows import Workspace, allocate_workspace, launch_dot, launch_gemv
from kernels.triton.linear_table import Table

__all__ = ["Workspace", "allocate_deferred_norm", "allocate_workspace", "linear", "linear_fp8", "quantise"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    squares: torch.Tensor | None = None,
    next_gain: torch.Tensor | None = None,
    deferred_norm: DeferredNorm | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    table: Table | None = None,
    pdl: bool = True,
    plan: GemmPlan | None = None,
) -> torch.Tensor:
    """Return `rms_norm(x) @ weight.T + bias`, followed by SwiGLU and `+ residual`. Each operation is applied
    only if its argument is given.

    x: `[rows, K]`; its rows may be strided.
    weight: `[N, K]` in x's dtype, contiguous.
    bias: `[N]`.
    norm_weight: `[K]`.
    silu_mul: apply SwiGLU. The weight contains the gate's rows followed by the up projection's rows, and the
      result is `silu(gate) × up`, `[rows, N / 2]`.
    residual, out: `[rows, N]` (`N / 2` with silu_mul). Their rows may be strided, and both may be the same
      tensor.
    workspace: memory for split-K GEMMs. If workspace is None, this call allocates one, at the cost of an
      extra launch.
    table: the device's measured plans, or None if only the rules apply.
    plan: overrides the table's choice.
    pdl: use programmatic dependent launch. weight, bias and next_gain are then read before the previous
      kernel has finished, so the previous kernel must not write to them.

    The following arguments let two GEMMs share a norm. They require a plan with `tiled` set. squares:
    `DeferredNorm.squares` of the deferred norm whose `values` are x. If it is given, eps is the norm's eps,
    and norm_weight must be None. deferred_norm: a buffer from `allocate_deferred_norm`, which this call fills
    with the deferred norm of the result. next_gain: `[N]`, the gain of the norm that follows.
    """
    extras = FusedOps(bias, residual, norm_weight, eps, silu_mul, squares, next_gain, deferred_norm)
    _check(x, weight, extras, out)
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype} and x is {x.dtype}; their dtypes must be equal")
    rows = x.shape[0]
    plan = plan or (table or Table()).choose(rows, weight.shape[0], weight.shape[1], weight.dtype)
    if squares is not None or deferred_norm is not None:
        _check_shared(plan, x, weight, extras)
    alone = plan is not None and rows == 1 and plan.form == "gemv"
    if norm_weight is not None and rows and not alone:
        x = fused.rms_norm(x.contiguous(), norm_weight, eps, pdl=pdl)
        extras = replace(extras, norm_weight=None)
    if plan is None and rows:
        return _cublas(x, weight, extras, out, pdl)
    if out is None:
        out = _allocate(x, weight, extras, x.dtype)
    if plan is not None and rows:
        _launch(plan, x, None, weight, None, extras, out, workspace, pdl)
    return out


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    silu_mul: bool = False,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    table: Table | None = None,
    pdl: bool = True,
    plan: GemmPlan | None = None,
) -> torch.Tensor:
    """Compute `linear` with e4m3 weights `[N, K]` and x quantised per token. `weight_scale [N]` contains each
    weight row's float32 scale. Raises ValueError if shapes, dtypes or strides do not match, or if the kernels
    do not support `block` or `plan`.

    x: `[rows, K]`, either in the model's dtype or in e4m3. If x is in the model's dtype, it is quantised
    after the optional RMSNorm. If x is in e4m3, it has float32 scales `x_scale`, `[rows]` or `[rows, 1]`,
    norm_weight must be None, and dtype must be the model's dtype. The result has `out`'s dtype or, without
    `out`, the model's dtype.

    block: if the weight has one scale per block (`kernels.Fp8Weight.block`), rows and columns per block. The
      weight's scales are then `[⌈N / rows⌉, ⌈K / columns⌉]`, and those of x are `[rows, ⌈K / columns⌉]`, as
      returned by `quantise`.
    """
    extras = FusedOps(bias, residual, norm_weight, eps, silu_mul)
    _check(x, weight, extras, out)
    dtype = x.dtype if x_scale is None else dtype
    if x_scale is not None and norm_weight is not None:
        raise ValueError("x_scale and norm_weight are both given; the norm needs x before quantisation")
    check_scales(x, x_scale, weight, weight_scale, block)
    (n, k), rows, group = weight.shape, len(x), 0 if block is None else block[1]
    if group and k % ALIGNMENT:
        raise ValueError(
            f"weight has {k} inputs; with one scale per block, expected a multiple of {ALIGNMENT}"
        )
    # Use a kernel for several rows: the one-row kernels quantise x themselves and cannot process a row that
    # is already quantised.
    for_rows = rows if x_scale is None else max(rows, 2)
    plan = plan or (table or Table()).choose(for_rows, n, k, weight.dtype, block)
    if out is None and (plan is not None or not rows):
        out = _allocate(x, weight, extras, dtype)
    if not rows and out is not None:
        return out
    alone = plan is not None and rows == 1 and plan.form in ("gemv", "stream")
    if x_scale is None and not alone:
        x = x.contiguous()
        if norm_weight is not None:
            x, x_scale = fused.rms_norm_fp8(x, norm_weight, eps, values=weight.dtype, group=group, pdl=pdl)
            extras = replace(extras, norm_weight=None)
        else:
            x, x_scale = quantise(x, values=weight.dtype, group=group, pdl=pdl)
    if plan is None or out is None:
        assert x_scale is not None
        return _cublas_fp8(x, x_scale, weight, weight_scale, block, extras, dtype, out, pdl)
    _launch(plan, x, x_scale, weight, weight_scale, extras, out, workspace, pdl, block)
    return out


def allocate_deferred_norm(plan: GemmPlan, result: torch.Tensor) -> DeferredNorm:
    """Allocate a buffer for the deferred norm of a GEMM's `result [rows, columns]`. The GEMM must use this
    `plan` and must not use SwiGLU."""
    rows, columns = result.shape
    parts = triton.cdiv(columns, plan.block_n)
    squares = torch.empty((parts, rows), dtype=torch.float32, device=result.device)
    return DeferredNorm(torch.empty((rows, columns), dtype=result.dtype, device=result.device), squares)


def quantise(
    x: torch.Tensor, *, values: torch.dtype = fused.FP8, group: int = 0, pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [rows, n]`, which must be contiguous, to e4m3 with scales `[rows, 1]` float32, as
    `reference.quantise_fp8` does.

    group: if not 0, a row has one scale per `group` columns: `[rows, ⌈n / group⌉]`.
    values: dtype of the quantised values. Triton's interpreter does not support e4m3, so tests that run in
    the interpreter pass a different dtype.
    """
    rows, n = x.shape
    quantised, scales = fused.allocate_quantised(x, n, values, group)
    if rows:
        block = triton.next_power_of_2(n)
        _quantise[(rows,)](
            x,
            quantised,
            scales,
            n,
            GROUP=group,
            PDL=pdl,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            launch_pdl=pdl,
        )
    return quantised, scales


@triton.jit
def _quantise(x, quantised, scales, n, GROUP: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise one row per program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    values, scale = fused.fp8_row(values, BLOCK, GROUP)
    tl.store(quantised + row * n + column, values.to(quantised.dtype.element_ty), mask=column < n)
    fused.store_scale(scale, scales, row, tl.num_programs(0), n, BLOCK, GROUP)


# ── launching ────────────────────────────────────────────────────────────────────────────────────────


def _launch(
    plan: GemmPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    extras: FusedOps,
    out: torch.Tensor,
    workspace: Workspace | None,
    pdl: bool,
    block: tuple[int, int] | None = None,
) -> None:
    _check_plan(plan, len(x), x.shape[1], block)
    if plan.form == "gemv":
        launch_gemv(plan, x, weight, weight_scale, extras, out, pdl)
    elif plan.form == "stream" and weight_scale is not None:
        # Imported here because Gluon has no CPU interpreter. Without a GPU, this branch is never executed.
        from kernels.triton.linear_stream import launch_stream

        launch_stream(plan, x, weight, weight_scale, extras, out, pdl)
    else:
        if workspace is None:
            workspace = allocate_workspace(x.device)
        arguments = (plan, x, x_scale, weight, weight_scale, workspace, extras, out, pdl)
        if plan.form == "tiles":
            from kernels.triton.linear_tiles import launch_tiles

            launch_tiles(*arguments, block)
        else:
            launch_dot(*arguments, block)


def _cublas(
    x: torch.Tensor, weight: torch.Tensor, extras: FusedOps, out: torch.Tensor | None, pdl: bool
) -> torch.Tensor:
    if extras.bias is None and not extras.silu_mul and (out is None or out.dtype == x.dtype):
        if extras.residual is not None:
            return torch.addmm(extras.residual, x, weight.t(), out=out)
        return torch.mm(x, weight.t(), out=out)
    return _after(F.linear(x, weight, extras.bias), extras, out, pdl)


def _cublas_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    block: tuple[int, int] | None,
    extras: FusedOps,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    """Compute an FP8 GEMM with cuBLAS and return the result in the model's dtype. cuBLAS always returns
    bfloat16 here, and the result is converted for a float16 model: with one scale per row, some torch
    versions return wrong float16 results on some GPUs. Even without this bug, the last bits of a float16
    result would be inaccurate, because sums have only about 14 bits."""
    if block is not None:
        return _after(_cublas_blocks(x, x_scale, weight, weight_scale, extras.bias, dtype), extras, out, pdl)
    as_asked = dtype == torch.bfloat16
    # `out` is not passed for meta tensors (used to enumerate launches), because they do not support it.
    direct = out is not None and as_asked and not extras.silu_mul and extras.residual is None and x.is_cuda
    product = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale.view(-1, 1),
        scale_b=weight_scale.view(1, -1),
        bias=extras.bias if as_asked else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out if direct else None,
    )
    if direct:
        return product
    if not as_asked:
        product = product.to(dtype)
        if extras.bias is not None:
            product += extras.bias
    return _after(product, extras, out, pdl)


def _cublas_blocks(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute an FP8 GEMM whose weight has one scale per block with cuBLAS, which needs a Hopper GPU. x and
    its scales have memory for a multiple of 4 rows (`fused.allocate_quantised`), which cuBLAS multiplies."""
    (rows, k), padded = x.shape, x_scale.stride(1)
    if x.is_meta:  # torch checks scales of meta tensors by other rules than scales of a GPU
        return torch.empty((rows, len(weight)), dtype=dtype, device=x.device)
    product = torch._scaled_mm(
        x.as_strided((padded, k), (k, 1)),
        weight.t(),
        scale_a=x_scale.as_strided((padded, x_scale.shape[1]), (1, padded)),
        scale_b=weight_scale.t(),
        out_dtype=torch.bfloat16,
    )[:rows].to(dtype)
    return product if bias is None else product.add_(bias)


def _after(product: torch.Tensor, extras: FusedOps, out: torch.Tensor | None, pdl: bool) -> torch.Tensor:
    if extras.silu_mul:
        product = fused.silu_mul(product, pdl=pdl)
    if extras.residual is not None:
        return torch.add(extras.residual, product, out=out)
    return product if out is None else out.copy_(product)


def _columns(weight: torch.Tensor, extras: FusedOps) -> int:
    return weight.shape[0] // 2 if extras.silu_mul else weight.shape[0]


def _allocate(x: torch.Tensor, weight: torch.Tensor, extras: FusedOps, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((x.shape[0], _columns(weight, extras)), dtype=dtype, device=x.device)


def _check(x: torch.Tensor, weight: torch.Tensor, extras: FusedOps, out: torch.Tensor | None) -> None:
    """Raise ValueError if shapes, dtypes or strides do not match."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; their second dimensions must be equal"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x has strides {x.stride()}, and the weight has strides {weight.stride()}; the rows of both "
            "must be contiguous"
        )
    shape = (x.shape[0], _columns(weight, extras))
    for name, tensor, wanted in (
        ("bias", extras.bias, weight.shape[:1]),
        ("norm_weight", extras.norm_weight, x.shape[1:]),
        ("residual", extras.residual, shape),
        ("out", out, shape),
    ):
        if tensor is not None and (tensor.shape != wanted or tensor.stride(-1) != 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
                f"expected shape {tuple(wanted)} with contiguous rows"
            )


def _check_plan(plan: GemmPlan, rows: int, k: int, block: tuple[int, int] | None) -> None:
    """Raise ValueError if the plan does not compute all of the GEMM `[rows, k] × [n, k]ᵀ`, or if it does not
    support weights with these blocks."""
    if block is not None and not plan.tiled:
        raise ValueError(
            f"plan has form {plan.form!r}; weights with one scale per block need 'dot' or 'tiles'"
        )
    if plan.tiled:
        check_step(plan.block_k, block)
    if k % plan.k_divisor:
        raise ValueError(f"plan has block_k {plan.block_k}; K = {k} is not a multiple of {plan.k_divisor}")
    # With split-K, several tiles of tokens would share their partial sums.
    several = block is not None and plan.form == "dot" and plan.split == 1
    if rows > plan.rows and not several:
        raise ValueError(f"plan has rows {plan.rows} and split {plan.split}, but x has {rows} rows")


def _check_shared(plan: GemmPlan | None, x: torch.Tensor, weight: torch.Tensor, extras: FusedOps) -> None:
    """Raise ValueError if these arguments do not allow the GEMM to share a norm."""
    rows, columns = x.shape[0], weight.shape[0]
    if plan is None or not plan.tiled:
        raise ValueError(f"only 'dot' and 'tiles' plans can share a norm; this GEMM uses {plan or 'cuBLAS'}")
    if extras.silu_mul and extras.deferred_norm is not None:
        raise ValueError(
            "deferred_norm and silu_mul are both given; a deferred norm needs a result without SwiGLU"
        )
    wanted: list[tuple[str, torch.Tensor | None, tuple[int, ...]]] = []
    if extras.squares is not None:
        wanted.append(("squares", extras.squares, (len(extras.squares), rows)))
        if extras.norm_weight is not None:
            raise ValueError(
                "squares and norm_weight are both given; x with squares already includes the norm's gain"
            )
    if extras.deferred_norm is not None:
        wanted.append(("next_gain", extras.next_gain, (columns,)))
        wanted.append(("deferred_norm.values", extras.deferred_norm.values, (rows, columns)))
        parts = triton.cdiv(columns, plan.block_n)
        wanted.append(("deferred_norm.squares", extras.deferred_norm.squares, (parts, rows)))
    for name, tensor, shape in wanted:
        if tensor is None or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {None if tensor is None else tuple(tensor.shape)}; expected {shape}, contiguous"
            )
