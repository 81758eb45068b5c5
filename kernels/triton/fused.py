# mypy: allow-untyped-defs
"""Contains the elementwise kernels between a decoder's GEMMs: RMSNorm, QK-norm + RoPE + KV-cache write, and
SiLU·mul. Each reads its data only once and has a variant that quantises its result to e4m3. (The GEMMs in
`linear` add the residual.) `kernels.Ops` defines shapes and semantics. The kernels round at the same points
as `kernels.reference`: a normalised head before the rotation, silu(gate) before the multiplication, and a
result before its quantisation.

Quantisation uses one scale per token, or per token and head. A scale is the largest magnitude / 448, so no
value saturates. A row of zeros has scale 0.

Each function launches one kernel, reads no device value on the host, and can be captured in a CUDA graph.
With `pdl`, the kernel may start while the previous kernel finishes (programmatic dependent launch, Hopper and
later). It then waits for the previous kernel before reading anything but weights. Results with and without
PDL are bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import PAGE_TOKENS, KvPool, Rotation
from kernels.limits import LARGEST_ROW

FP8 = torch.float8_e4m3fn
"""Dtype of quantised values. Triton's interpreter does not support e4m3, so tests that run in the interpreter
replace this dtype; values are then scaled, but not rounded to eight bits."""


# ── RMSNorm ──────────────────────────────────────────────────────────────────────────────────────────


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, pdl: bool = False) -> torch.Tensor:
    """Return the RMSNorm (Zhang and Sennrich 2019) of `x [tokens, hidden]` with gain `weight [hidden]`, in
    x's dtype."""
    normed = torch.empty_like(x)
    _launch_norm(x, weight, eps, normed, None, None, 0, pdl)
    return normed


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    values: torch.dtype = FP8,
    group: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `rms_norm` and quantise the result. Return values `[tokens, hidden]` e4m3 and scales
    `[tokens, 1]` float32, or `[tokens, ⌈hidden / group⌉]` if group is not 0."""
    quantised, scales = allocate_quantised(x, x.shape[1], values, group)
    _launch_norm(x, weight, eps, None, quantised, scales, group, pdl)
    return quantised, scales


def rms_norm_both(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    values: torch.dtype = FP8,
    group: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the results of both `rms_norm` and `rms_norm_fp8`, computed in one launch."""
    normed = torch.empty_like(x)
    quantised, scales = allocate_quantised(x, x.shape[1], values, group)
    _launch_norm(x, weight, eps, normed, quantised, scales, group, pdl)
    return normed, quantised, scales


def allocate_quantised(
    x: torch.Tensor, width: int, values: torch.dtype, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the quantised values and scales of the rows of `x`, with `width` columns. A row has one scale,
    or one per `group` columns if `group` is not 0. The scales of a group are then adjacent in memory, and
    there is memory for as many rows as `scales_stride` returns, as cuBLAS requires."""
    rows = x.shape[0]
    if not group:
        scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        return torch.empty((rows, width), dtype=values, device=x.device), scales
    padded = scales_stride.fn(rows)
    scales = torch.empty((triton.cdiv(width, group), padded), dtype=torch.float32, device=x.device)
    return torch.empty((padded, width), dtype=values, device=x.device)[:rows], scales.t()[:rows]


def _launch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    quantised: torch.Tensor | None,
    scales: torch.Tensor | None,
    group: int,
    pdl: bool,
) -> None:
    tokens, hidden = x.shape
    _whole("x", x)
    if tokens == 0:
        return
    block = _block(hidden, "hidden")
    _norm[(tokens,)](
        x,
        weight,
        out,
        quantised,
        scales,
        hidden,
        eps,
        STORE=out is not None,
        QUANTISE=quantised is not None,
        GROUP=group,
        PDL=pdl,
        BLOCK=block,
        num_warps=_row_warps(block, tokens),
        launch_pdl=pdl,
    )


@triton.jit
def _norm(
    x,
    weight,
    out,
    quantised,
    scales,
    hidden,
    eps,
    STORE: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one token per program, with its row in registers. With STORE, the normalised values are also
    stored before being quantised."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = token * hidden + column
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(row * row, axis=0) / hidden
    normed = (row * tl.rsqrt(mean + eps) * gain).to(x.dtype.element_ty)
    if STORE:
        tl.store(out + at, normed, mask=inside)
    if QUANTISE:
        values, scale = fp8_row(normed.to(tl.float32), BLOCK, GROUP)
        tl.store(quantised + at, values.to(quantised.dtype.element_ty), mask=inside)
        store_scale(scale, scales, token, tl.num_programs(0), hidden, BLOCK, GROUP)


@triton.jit
def fp8_scale(largest):
    """Return the scale for values whose largest magnitude is `largest`, and the factor that quantises the
    values. Divisions are rounded exactly, as in the reference. A quantised value may exceed 448 by one
    rounding step, which is harmless because the hardware conversion to e4m3 saturates."""
    return tl.div_rn(largest, 448.0), tl.div_rn(448.0, tl.where(largest > 0.0, largest, 1.0))


@triton.jit
def scales_stride(tokens):
    """Return the distance between the scales of a token's consecutive groups (`allocate_quantised`). cuBLAS
    requires a multiple of 16 bytes."""
    return (tokens + 3) // 4 * 4


@triton.jit
def fp8_row(row, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Divide a row of numbers (`row [BLOCK]` float32) by its scale, and return both. With GROUP, every GROUP
    columns have a scale of their own."""
    if GROUP:
        size: tl.constexpr = min(GROUP, BLOCK)
        parts = tl.reshape(row, [BLOCK // size, size])
        scale, inverse = fp8_scale(tl.max(tl.abs(parts), axis=1))
        row = tl.reshape(parts * inverse[:, None], [BLOCK])
    else:
        scale, inverse = fp8_scale(tl.max(tl.abs(row), axis=0))
        row = row * inverse
    return row, scale


@triton.jit
def store_scale(scale, scales, token, tokens, width, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Store the scale that `fp8_row` returned for one of `tokens` rows of `width` columns."""
    if GROUP:
        group = tl.arange(0, BLOCK // min(GROUP, BLOCK))
        to = scales + group.to(tl.int64) * scales_stride(tokens) + token
        tl.store(to, scale, mask=group < (width + GROUP - 1) // GROUP)
    else:
        tl.store(scales + token, scale)


# ── QK-norm, RoPE and the KV cache ───────────────────────────────────────────────────────────────────


def rope_cache_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    rotation: Rotation,
    pool: KvPool,
    heads: int,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Apply QK-norm and RoPE, write keys and values to the pool, and return the rotated queries of
    `Ops.attend`, `[tokens, heads, head_dim]`. Nothing is written for a KV slot of -1. qkv and the pool must
    be contiguous."""
    cos_sin, q_norm, k_norm, eps = rotation.cos_sin, rotation.q_norm, rotation.k_norm, rotation.eps
    keys, values, k_scales, v_scales = pool.keys, pool.values, pool.k_scales, pool.v_scales
    tokens = qkv.shape[0]
    _, kv_heads, page, head_dim = keys.shape
    for name, tensor in (("qkv", qkv), ("keys", keys), ("values", values), ("cos_sin", cos_sin)):
        _whole(name, tensor)
    if page != PAGE_TOKENS:
        raise ValueError(f"keys has pages of {page} tokens; the kernels support only {PAGE_TOKENS}")
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns; {heads} + 2 × {kv_heads} heads of {head_dim} need "
            f"{(heads + 2 * kv_heads) * head_dim}"
        )
    if (k_scales is None) != (v_scales is None) or (q_norm is None) != (k_norm is None):
        raise ValueError(
            "only one of k_scales and v_scales, or of q_norm and k_norm, is given; give both or neither"
        )
    queries = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return queries
    both = heads + 2 * kv_heads
    # Choose the number of heads per program. 16 heads of 128 bf16 values take 4 KB, so each of the 128
    # threads loads 16 bytes of the heads' first halves and 16 bytes of their second halves. With few tokens,
    # programs with fewer heads finish sooner.
    group = min(8 if tokens <= 256 else 16, triton.next_power_of_2(both))
    _rope[(tokens, triton.cdiv(both, group))](
        qkv,
        positions,
        kv_slots,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        queries,
        keys,
        values,
        k_scales,
        v_scales,
        heads,
        kv_heads,
        NORM=q_norm is not None,
        QUANTISE=k_scales is not None,
        PDL=pdl,
        GROUP=group,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        PAGE=PAGE_TOKENS,
        num_warps=4 if group * head_dim >= 1024 else 1,
        launch_pdl=pdl,
    )
    return queries


@triton.jit
def _rope(
    qkv,
    positions,
    slots,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    queries,
    keys,
    values,
    k_scales,
    v_scales,
    heads,
    kv_heads,
    NORM: tl.constexpr,
    QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Compute `rope_cache_write` for a group of heads of one token. A group may contain query, key and value
    heads, so the token's row is read only once."""
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dim = tl.arange(0, HALF)
    both = heads + 2 * kv_heads
    is_q = head < heads
    is_v = head >= heads + kv_heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    in_dim = dim < half
    inside = (head < both)[:, None] & in_dim[None, :]
    if NORM:
        q_low = tl.load(q_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + half + dim, mask=in_dim, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + dim, mask=in_dim, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + half + dim, mask=in_dim, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = (token * both + head)[:, None] * HEAD_DIM + dim[None, :]
    low = tl.load(qkv + at, mask=inside, other=0.0)
    high = tl.load(qkv + at + half, mask=inside, other=0.0)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    block = slot // PAGE
    offset = slot % PAGE
    cos = tl.load(cos_sin + position * HEAD_DIM + dim, mask=in_dim, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + half + dim, mask=in_dim, other=0.0)[None, :]
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    if NORM:
        mean = tl.sum(a * a + b * b, axis=1) / HEAD_DIM
        norm = tl.rsqrt(mean + eps)[:, None]
        normed_a = a * norm * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        normed_b = b * norm * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
        a = normed_a.to(qkv.dtype.element_ty).to(tl.float32)
        b = normed_b.to(qkv.dtype.element_ty).to(tl.float32)
    turned_a = tl.where(is_v[:, None], low.to(tl.float32), a * cos - b * sin)
    turned_b = tl.where(is_v[:, None], high.to(tl.float32), b * cos + a * sin)

    to_q = queries + (token * heads + head)[:, None] * HEAD_DIM + dim[None, :]
    q_inside = inside & is_q[:, None]
    tl.store(to_q, turned_a.to(queries.dtype.element_ty), mask=q_inside)
    tl.store(to_q + half, turned_b.to(queries.dtype.element_ty), mask=q_inside)

    kv_head = tl.where(is_v, head - heads - kv_heads, head - heads)
    place = (block * kv_heads + kv_head) * PAGE + offset
    is_k = is_k & live
    is_v = is_v & (head < both) & live
    if QUANTISE:
        largest = tl.maximum(tl.max(tl.abs(turned_a), axis=1), tl.max(tl.abs(turned_b), axis=1))
        scale, inverse = fp8_scale(largest)
        turned_a *= inverse[:, None]
        turned_b *= inverse[:, None]
        tl.store(k_scales + place, scale, mask=is_k)
        tl.store(v_scales + place, scale, mask=is_v)
    to_page = place[:, None] * HEAD_DIM + dim[None, :]
    k_inside = is_k[:, None] & in_dim[None, :]
    v_inside = is_v[:, None] & in_dim[None, :]
    low = turned_a.to(keys.dtype.element_ty)
    high = turned_b.to(keys.dtype.element_ty)
    tl.store(keys + to_page, low, mask=k_inside)
    tl.store(keys + to_page + half, high, mask=k_inside)
    tl.store(values + to_page, low, mask=v_inside)
    tl.store(values + to_page + half, high, mask=v_inside)


# ── SwiGLU ───────────────────────────────────────────────────────────────────────────────────────────


def silu_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Compute SwiGLU (Shazeer 2020) and return `silu(gate) × up`, `[tokens, n]`. gate_up: `[tokens, 2 × n]`,
    gate first."""
    tokens, width = gate_up.shape
    out = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_SILU_COLUMNS, triton.next_power_of_2(width // 2))
    _launch_silu(gate_up, out, None, block, pdl)
    return out


def silu_mul_fp8(
    gate_up: torch.Tensor, *, values: torch.dtype = FP8, group: int = 0, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `silu_mul` and quantise the result. Return values `[tokens, n]` e4m3 and scales `[tokens, 1]`
    float32, or `[tokens, ⌈n / group⌉]` if group is not 0."""
    width = gate_up.shape[1] // 2
    quantised, scales = allocate_quantised(gate_up, width, values, group)
    _launch_silu(gate_up, quantised, scales, _block(width, "gate_up's half"), pdl, group)
    return quantised, scales


_SILU_COLUMNS = 2048
"""Columns per program of the SiLU·mul kernel, unless the result is quantised."""


def _launch_silu(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    block: int,
    pdl: bool,
    group: int = 0,
) -> None:
    tokens, width = out.shape
    _whole("gate_up", gate_up)
    if gate_up.shape[1] != 2 * width:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns; expected an even number (gate and up)")
    if tokens == 0:
        return
    _silu_mul[(tokens, triton.cdiv(width, block))](
        gate_up,
        out,
        scales,
        width,
        QUANTISE=scales is not None,
        GROUP=group,
        PDL=pdl,
        BLOCK=block,
        num_warps=_row_warps(block, tokens),
        launch_pdl=pdl,
    )


@triton.jit
def _silu_mul(
    gate_up,
    out,
    scales,
    width,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute SwiGLU for a block of columns of one token. If the result is quantised, the block is the whole
    row, because the scale depends on all columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = token * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    product = (gated * up).to(gate_up.dtype.element_ty)
    to = out + token * width + column
    if QUANTISE:
        row = product.to(tl.float32)
        values, scale = fp8_row(row, BLOCK, GROUP)
        tl.store(to, values.to(out.dtype.element_ty), mask=inside)
        store_scale(scale, scales, token, tl.num_programs(0), width, BLOCK, GROUP)
    else:
        tl.store(to, product, mask=inside)


# ── checks and launch sizes ──────────────────────────────────────────────────────────────────────────


def _whole(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")


def _block(width: int, name: str) -> int:
    block = triton.next_power_of_2(width)
    if block > LARGEST_ROW:
        raise ValueError(f"{name} is {width}; the largest supported width is {LARGEST_ROW}")
    return block


def _row_warps(block: int, tokens: int) -> int:
    """Return the number of warps per row. With few tokens, spreading a row over more threads reduces latency.
    With many, processing more elements per thread increases bandwidth."""
    elements = 8 if tokens <= 256 else 16
    return min(max(block // (32 * elements), 1), 32)
