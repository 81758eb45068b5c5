"""Tests that decode attention over an FP8 cache of 65,536 tokens stays within a derived error bound.

Only tests on a GPU check the kernel at that length and in bfloat16. In the interpreter, the kernel runs on
2,048 tokens. The reference is checked with 8,192 tokens, and with 65,536 for values that add up.

The exact result is attention over the cache's values in float64. For each element of the output, with N
tokens, heads of d dimensions, weights w (the softmax terms, of which the largest is 1) and values v = e ×
scale:

    |error| ≤ ROUND |o| + (WEIGHT + 2 δ + SUM N / 64) a + TINY b

    o   the exact output
    a   Σ w |v| / Σ w: the attention of magnitudes. Where values cancel, a is much larger than |o|
    δ   (d + 8) 2⁻²³ max Σ |q k| scale: the error of a score, a float32 sum of d products with a few more
        roundings. An error of δ in a score is a relative error of δ in its weight and in the sum of weights
    b   Σ |e| / Σ w

    ROUND   the rounding of the result: 2⁻⁹ in bfloat16
    WEIGHT  the rounding of w × scale before the product with e: 2⁻¹¹ in float16
    SUM     the error that a page of 64 tokens adds to a float32 sum, eight roundings: 2⁻²¹. Sums in float16,
            or in the 14 bits of FP8 tensor cores, would exceed this term
    TINY    half of float16's smallest step, divided by the factor 2⁸ on the weights: 2⁻³³
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kernels import PAGE_TOKENS, reference
from kernels.reference_attention import paged_attention_decode, paged_attention_prefill
from tests.kernels.decode_cases import ON_CPU, needs_cpu, needs_gpu

TOKENS = 65_536
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5


@dataclass
class Sequence:
    """The query of one sequence, and its cache with blocks in random order."""

    q: torch.Tensor
    """Query: [1, heads, HEAD_DIM]."""
    keys: torch.Tensor
    """Keys: [blocks, kv_heads, 64, HEAD_DIM] e4m3."""
    values: torch.Tensor
    k_scales: torch.Tensor
    """Scales of the keys: [blocks, kv_heads, 64]."""
    v_scales: torch.Tensor
    table: torch.Tensor
    """Block table: [1, blocks] int64."""

    @property
    def tokens(self) -> int:
        return self.table.shape[1] * PAGE_TOKENS

    def in_order(self, pool: torch.Tensor) -> torch.Tensor:
        """Return a pool's values in token order: `[kv_heads, tokens, ...]` float64."""
        # torch cannot index FP8, so view the values as bytes.
        raw = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
        return raw[self.table[0]].view(pool.dtype).double().transpose(0, 1).flatten(1, 2)


@dataclass
class Exact:
    """The exact result of attention and the terms of its error bound, per head, in float64. The formula is in
    the module's docstring."""

    output: torch.Tensor
    """Exact output, [1, heads, HEAD_DIM]. `magnitudes` and `units` have the same shape."""
    magnitudes: torch.Tensor
    units: torch.Tensor
    score_error: torch.Tensor
    """Bound δ on the error of a score, [1, heads, 1]."""
    pages: int

    def worst(self, found: torch.Tensor, *, rounding: float, weight: float, tiny: float) -> float:
        """Return the maximum of the errors of `found`, each divided by its bound."""
        assert found.shape == self.output.shape
        relative = weight + 2 * self.score_error + 2**-21 * self.pages
        bound = rounding * self.output.abs() + relative * self.magnitudes + tiny * self.units
        return float(((found.double() - self.output).abs() / bound.clamp(min=1e-30)).max())


def exact(sequence: Sequence) -> Exact:
    keys, values = sequence.in_order(sequence.keys), sequence.in_order(sequence.values)
    k_scales, v_scales = sequence.in_order(sequence.k_scales), sequence.in_order(sequence.v_scales)
    heads, kv_heads = sequence.q.shape[1], len(keys)
    parts = []
    for head in range(heads):
        at = head * kv_heads // heads
        q = sequence.q[0, head].double()
        scores = (keys[at] @ q) * k_scales[at] * SCALE
        products = (keys[at].abs() @ q.abs()) * k_scales[at] * SCALE
        weights = (scores - scores.max()).exp()
        total = weights.sum()
        scaled = weights * v_scales[at]
        parts.append(
            (
                scaled @ values[at] / total,
                scaled @ values[at].abs() / total,
                values[at].abs().sum(0) / total,
                ((HEAD_DIM + 8) * 2**-23 * products.max()).view(1),
            )
        )
    together = (torch.stack(each).unsqueeze(0) for each in zip(*parts, strict=True))
    return Exact(*together, pages=sequence.table.shape[1])


Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], None]


def _needle(value: float) -> Change:
    """Return a change to the cache: in the first head of each group, the weight of one key becomes e⁶ times
    the total weight of all other keys."""

    def change(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, draw: torch.Generator) -> None:
        heads, kv_heads = q.shape[1], keys.shape[1]
        for kv_head in range(kv_heads):
            seeker = q[0, kv_head * heads // kv_heads]
            place = int(torch.randint(len(keys), (1,), generator=draw, device=q.device))
            others = math.log(len(keys)) + 0.5 * float(seeker.square().sum()) * SCALE**2
            keys[place, kv_head] = seeker * (others + 6) / (SCALE * seeker.square().sum())
            values[place, kv_head] *= value

    return change


def _scaled(q: float = 1.0, offset: float = 0.0, outliers: float = 0.0) -> Change:
    def change(q_: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, draw: torch.Generator) -> None:
        q_ *= q
        values += offset
        values *= (outliers * torch.randn(*values.shape[:2], 1, generator=draw, device=values.device)).exp()

    return change


KINDS: dict[str, Change] = {
    "equal weights": _scaled(q=0.0),
    "random": _scaled(),
    "peaked": _scaled(q=30.0),
    "a needle": _needle(1.0),
    "one key without a value, so that the tiny weights of the other keys are the result": _needle(0.0),
    "values that add up": _scaled(offset=3.0),
    "values of very different tokens": _scaled(outliers=2.0),
}


def make(
    kind: str, seed: int, heads: int, kv_heads: int, dtype: torch.dtype, device: str, tokens: int = TOKENS
) -> Sequence:
    draw = torch.Generator(device).manual_seed(seed)
    q = torch.randn(1, heads, HEAD_DIM, generator=draw, device=device)
    keys = torch.randn(tokens, kv_heads, HEAD_DIM, generator=draw, device=device)
    values = torch.randn(tokens, kv_heads, HEAD_DIM, generator=draw, device=device)
    KINDS[kind](q, keys, values, draw)
    order = torch.randperm(tokens // PAGE_TOKENS, generator=draw, device=device)

    def paged(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        pages = raw.view(-1, PAGE_TOKENS, *raw.shape[1:]).transpose(1, 2)
        pool = torch.empty_like(pages, memory_format=torch.contiguous_format)
        pool[order] = pages
        return pool.view(tensor.dtype)

    (k, k_scales), (v, v_scales) = reference.quantise_fp8(keys), reference.quantise_fp8(values)
    pools = (paged(k), paged(v), paged(k_scales.squeeze(-1)), paged(v_scales.squeeze(-1)))
    return Sequence(q.to(dtype), *pools, order.unsqueeze(0))


def check_reference(sequence: Sequence, expected: Exact) -> None:
    pools = (sequence.q, sequence.keys, sequence.values)
    scales = (sequence.k_scales, sequence.v_scales)
    table, tokens = sequence.table, sequence.tokens
    decoded = paged_attention_decode(*pools, table, torch.tensor([tokens]), SCALE, None, *scales)
    prefilled = paged_attention_prefill(*pools, table[0], tokens - 1, SCALE, None, *scales)
    for found in (decoded, prefilled):
        assert expected.worst(found, rounding=2**-24, weight=2**-23, tiny=0.0) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_stays_within_the_bound_in_float32(kind: str) -> None:
    sequence = make(kind, 0, 2, 1, torch.float32, "cpu", tokens=8192)
    check_reference(sequence, exact(sequence))


def test_sums_in_float32_stay_within_the_bound_and_sums_with_fewer_bits_exceed_it() -> None:
    """If each page is summed in float32, but these sums are added up in float16, the error exceeds the
    bound."""
    sequence = make("values that add up", 0, 2, 1, torch.float32, "cpu")
    expected = exact(sequence)
    check_reference(sequence, expected)
    values = sequence.in_order(sequence.values) * sequence.in_order(sequence.v_scales).unsqueeze(-1)
    scores = sequence.in_order(sequence.keys) @ sequence.q[0].double().T
    weights = (scores * sequence.in_order(sequence.k_scales).unsqueeze(-1) * SCALE).softmax(dim=1)
    total = torch.zeros(1, 2, HEAD_DIM, dtype=torch.float16)
    for page in range(TOKENS // PAGE_TOKENS):
        span = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        total += (weights[:, span].transpose(1, 2) @ values[:, span]).half()
    assert expected.worst(total.float(), rounding=2**-9, weight=2**-11, tiny=2**-33) > 1


def by_kernel(sequence: Sequence) -> torch.Tensor:
    from kernels.triton import attention_decode as kernel

    device, heads, kv_heads = sequence.q.device, sequence.q.shape[1], sequence.keys.shape[1]
    return kernel.decode(
        sequence.q,
        sequence.keys,
        sequence.values,
        sequence.table,
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.tensor([sequence.tokens], device=device),
        SCALE,
        kernel.allocate_workspace(1, heads, kv_heads, HEAD_DIM, device),
        None,
        sequence.k_scales,
        sequence.v_scales,
        pdl=not ON_CPU,
    )


@needs_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_in_the_interpreter_stays_within_the_bound(kind: str) -> None:
    sequence = make(kind, 0, 4, 1, torch.float16, "cpu", tokens=2048)
    found = by_kernel(sequence)
    assert exact(sequence).worst(found, rounding=2**-12, weight=2**-11, tiny=2**-33) <= 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_stays_within_the_bound(kind: str, dtype: torch.dtype, seed: int) -> None:
    sequence = make(kind, seed, 32, 8, dtype, "cuda")
    rounding = 2**-9 if dtype == torch.bfloat16 else 2**-12
    worst = exact(sequence).worst(by_kernel(sequence), rounding=rounding, weight=2**-11, tiny=2**-33)
    print(f"{kind}, {dtype}, seed {seed}: {worst:.3f} of the bound")
    assert worst <= 1
