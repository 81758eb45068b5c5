"""Implements every operation in plain torch. This module is both the CPU backend and the reference for
testing the GPU kernels.

`kernels.Ops` documents shapes and semantics. The code is optimised for CPUs, where GEMMs take most of the
time, followed by copying KV pages and torch call overhead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels import (
    PAGE_TOKENS,
    Activation,
    ChoiceCount,
    ExpertActivation,
    Experts,
    Fp8Activation,
    Fp8Weight,
    KvPool,
    NextNorm,
    Residual,
    Rotation,
    Weight,
)
from kernels.reference_attention import AttentionPlan, attention
from kernels.reference_attention import plan_attention as plan_attention

name = "reference"

_FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn (e4m3 without infinities)."""


def pack_weight(weight: Weight) -> Weight:
    """Return float32 CPU weights in oneDNN's blocked layout, and other weights unchanged.

    In the blocked layout, GEMMs of 4 to 256 rows are 2 to 3.6 times as fast as with MKL (Zen 5, one thread).
    MKL, torch's default for float32, uses AVX-512 only on Intel CPUs. For other dtypes, torch already uses
    oneDNN. Packing uses two private torch operations. If the torch build lacks them, the weight is returned
    unchanged.
    """
    if isinstance(weight, Fp8Weight):
        return weight
    packable = weight.device.type == "cpu" and weight.dtype == torch.float32
    if packable and torch.backends.mkldnn.is_available() and _has_packed_linear():
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


def _has_packed_linear() -> bool:
    return all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise"))


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
    if first is None:
        return F.embedding(token_ids, weight)
    rows = token_ids - first
    foreign = (rows < 0) | (rows >= weight.shape[0])
    return F.embedding(rows.masked_fill(foreign, 0), weight).masked_fill_(foreign.unsqueeze(1), 0.0)


def linear(
    x: Activation, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    if out is not None:
        return out.copy_(linear(x, weight, bias))
    if isinstance(weight, Fp8Weight):
        return linear_fp8(x, weight, bias)
    assert isinstance(x, torch.Tensor)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def norm_linear(
    x: Residual,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    result = linear(rms_norm(x.values, norm_weight, eps), weight, bias)
    return result if out is None else out.copy_(result)


def norm_gate_up(
    x: Residual, norm_weight: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    return silu_mul(norm_linear(x, norm_weight, eps, weight, bias))


def linear_add(
    x: Activation,
    weight: Weight,
    bias: torch.Tensor | None,
    residual: Residual,
    next_gain: torch.Tensor | None,
) -> Residual:
    return Residual(residual.values.add_(linear(x, weight, bias)))


def next_norm(rows: int, weight: Weight, gain: torch.Tensor, eps: float) -> NextNorm | None:
    return None


def norm_experts(
    x: Residual,
    norm_weight: torch.Tensor,
    eps: float,
    experts: Experts,
    count: ChoiceCount | None = None,
) -> ExpertActivation:
    normed = rms_norm(x.values, norm_weight, eps)
    chosen, weights = route(normed, experts.router, experts.top_k, experts.normalised)
    if count is not None:
        each = (count.live >= 0).long().unsqueeze(1).expand_as(chosen)
        count.totals.index_add_(0, chosen.flatten(), each.flatten())
    rows = normed.repeat_interleave(experts.top_k, dim=0)
    products = experts_linear(rows, chosen.flatten() - experts.first, experts.gate_up)
    return ExpertActivation(chosen, weights, silu_mul(products))


def experts_sum(x: ExpertActivation, experts: Experts, out: torch.Tensor | None = None) -> torch.Tensor:
    results = experts_linear(x.values, x.chosen.flatten() - experts.first, experts.down)
    weighted = results.float().mul_(x.weights.view(-1, 1))
    total = weighted.view(*x.chosen.shape, results.shape[1]).sum(dim=1)
    return total.to(experts.router.dtype) if out is None else out.copy_(total)


def experts_add(
    x: ExpertActivation, experts: Experts, residual: Residual, next_gain: torch.Tensor | None
) -> Residual:
    return Residual(residual.values.add_(experts_sum(x, experts)))


def route(
    x: torch.Tensor, router: torch.Tensor, top_k: int, normalised: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts chosen by each token in `x [tokens, hidden]`, and their routing weights, both in the
    format of `kernels.ExpertActivation`."""
    logits = F.linear(x.float(), router.float())
    # Use a stable sort, because torch.topk does not define the order of equal values.
    falling, experts = logits.sort(dim=-1, descending=True, stable=True)
    best = falling[:, :top_k]
    weights = best.softmax(dim=-1) if normalised else falling.softmax(dim=-1)[:, :top_k]
    return experts[:, :top_k].int(), weights.contiguous()


def experts_linear(x: torch.Tensor, expert: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Multiply each row of `x [rows, in]` by the matrix in `weight [experts, out, in]` selected by `expert
    [rows]`. The result is `[rows, out]` in x's dtype, with zeros for rows that select an expert outside
    `weight`."""
    held = len(_values(weight))
    expert = torch.where((expert >= 0) & (expert < held), expert, held)
    by_expert = expert.argsort(stable=True)
    *of_experts, elsewhere = by_expert.split(expert.bincount(minlength=held + 1).tolist())
    out = x.new_empty(len(x), _values(weight).shape[1])
    out[elsewhere] = 0
    for index, rows in enumerate(of_experts):
        if len(rows):
            out[rows] = linear(x[rows], expert_weight(weight, index), None)
    return out


def expert_weight(weight: Weight, expert: int) -> Weight:
    """Return one expert's matrix `[out, in]` from `weight [experts, out, in]`."""
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(weight.values[expert], weight.scales[expert], weight.block)
    return weight[expert]


def _values(weight: Weight) -> torch.Tensor:
    return weight.values if isinstance(weight, Fp8Weight) else weight


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `x [..., n]` to e4m3, and return the quantised values and their scales `[..., 1]` float32. A
    scale is the row's largest magnitude divided by 448, so no value saturates. A row of zeros has scale 0."""
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    # Divide by a tensor: given a Python number, torch would multiply by its reciprocal, which rounds twice.
    most = torch.full_like(largest, _FP8_MAX)
    inverse = most / torch.where(largest > 0, largest, 1.0)
    values = (x * inverse).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values, largest / most


def quantise_blocks(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix `x [out, in]` to e4m3 as `quantise_fp8` does, but with one scale per block. Return
    the quantised values and their scales (`kernels.Fp8Weight.scales`)."""
    (out, inputs), (rows, columns) = x.shape, block
    whole = F.pad(x, (0, -inputs % columns, 0, -out % rows))
    blocks = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    values, scales = quantise_fp8(blocks.flatten(2))
    values = values.view(blocks.shape).transpose(1, 2).reshape(whole.shape)
    return values[:out, :inputs].contiguous(), scales.squeeze(-1)


def dequantise(weight: Fp8Weight) -> torch.Tensor:
    """Return an FP8 matrix's values `[out, in]` multiplied by their scales, in float32."""
    found = weight.values.float()
    if weight.block is None:
        return found.mul_(weight.scales.unsqueeze(1))
    rows, columns = weight.block
    # Scale one group of columns at a time, so that no full matrix of scales is needed.
    scales = weight.scales.repeat_interleave(rows, dim=0)[: len(found)]
    for group, part in enumerate(found.split(columns, dim=1)):
        part.mul_(scales[:, group : group + 1])
    return found


def round_in_groups(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Quantise `x [tokens, n]` to e4m3 with one scale for each group of `columns` numbers in a row, and
    return the quantised values multiplied by their scales, in float32."""
    groups = F.pad(x, (0, -x.shape[1] % columns)).unflatten(1, (-1, columns))
    values, scales = quantise_fp8(groups)
    return values.float().mul_(scales).flatten(1)[:, : x.shape[1]]


def linear_fp8(x: Activation, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply `x [tokens, in]` by an FP8 weight. If the weight has one scale per row, x may already be
    quantised per token; otherwise, this function quantises it. If the weight has one scale per block, x must
    not be quantised yet: this function quantises it with one scale for each group of a token's inputs. Sums
    are computed in float32 and rounded once to the model's dtype."""
    if weight.block is not None:
        assert isinstance(x, torch.Tensor)
        product = F.linear(round_in_groups(x, weight.block[1]), dequantise(weight))
        return (product if bias is None else product + bias.float()).to(x.dtype)
    if not isinstance(x, Fp8Activation):
        x = Fp8Activation(*quantise_fp8(x), x.dtype)
    product = F.linear(x.values.float(), weight.values.float()) * x.scales * weight.scales
    return (product if bias is None else product + bias.float()).to(x.dtype)


def rope_cache_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    rotation: Rotation,
    pool: KvPool,
    heads: int,
) -> torch.Tensor:
    """Write keys and values to the pool, and return the rotated queries `[tokens, heads, head_dim]`. This is
    the first half of `Ops.attend`."""
    _, kv_heads, _, head_dim = pool.keys.shape
    q_norm, k_norm, eps = rotation.q_norm, rotation.k_norm, rotation.eps
    both = heads + kv_heads
    qkv = qkv.view(-1, both + kv_heads, head_dim)
    qk = qkv[:, :both]
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((rms_norm(qk[:, :heads], q_norm, eps), rms_norm(qk[:, heads:], k_norm, eps)), dim=1)
    # The rotation pairs dimension i with i + head_dim / 2, as in Hugging Face checkpoints.
    cos, sin = rotation.cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    low, high = qk.float().chunk(2, dim=-1)
    rotated = torch.empty(qk.shape, dtype=torch.float32, device=qk.device)
    low_out, high_out = rotated.chunk(2, dim=-1)
    torch.mul(low, cos, out=low_out).addcmul_(high, sin, value=-1.0)
    torch.mul(high, cos, out=high_out).addcmul_(low, sin)
    keys, values, written = rotated[:, heads:], qkv[:, both:], kv_slots >= 0
    if not written.all():
        keys, values, kv_slots = keys[written], values[written], kv_slots[written]
    block, offset = kv_slots // PAGE_TOKENS, kv_slots % PAGE_TOKENS
    for numbers, scales, new in (
        (pool.keys, pool.k_scales, keys),
        (pool.values, pool.v_scales, values),
    ):
        if scales is None:
            numbers[block, :, offset] = new.to(numbers.dtype)
        else:
            numbers[block, :, offset], per_head = quantise_fp8(new)
            scales[block, :, offset] = per_head.squeeze(-1)
    return rotated[:, :heads].to(qkv.dtype)


def attend(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    rotation: Rotation,
    pool: KvPool,
    heads: int,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    q = rope_cache_write(qkv, positions, kv_slots, rotation, pool, heads)
    attended = attention(q, pool.keys, pool.values, plan, scale, window, pool.k_scales, pool.v_scales)
    return attended if out is None else out.copy_(attended)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
