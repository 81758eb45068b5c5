"""Tests of the fused elementwise kernels against their reference implementations.

The interpreter (on a CPU, in CI) verifies indexing and masking: the elements that are read, written and left
unchanged, at widths and head counts that are not multiples of a tile, in float32 and float16. Only the tests
marked `gpu` verify the numerics of bfloat16 and e4m3, that results with and without PDL are bitwise equal,
and that a graph replays the captured kernels.

Tolerances: the error of a bfloat16 or float16 result against float64 is at most twice the reference's error
in the same dtype, plus half a unit in the last place (the reference may be accurate by chance). e4m3 values
and scales must be bitwise equal to the values and scales that the reference computes from the kernel's own
unquantised result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import PAGE_TOKENS, KvPool, Rotation, reference
from kernels.rope import cos_sin_table, default_frequencies
from tests.kernels.linear_cases import DEVICE, EPS, POISON, on_gpu, random_tensor

fused = pytest.importorskip("kernels.triton.fused", exc_type=ImportError)

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, on_gpu]),
]


def _as_good(found: torch.Tensor, by_torch: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that the error against float64 is at most twice the reference's error plus half a unit in the
    last place of the largest value."""
    assert found.shape == by_torch.shape and found.dtype == by_torch.dtype
    exact = exact.to(found.device)
    unit = torch.finfo(found.dtype).eps * exact.abs().max()
    torch_error = (by_torch.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * torch_error + unit / 2


# ── RMSNorm ──────────────────────────────────────────────────────────────────────────────────────────


def _norm_exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (3, 4096), (2, 2880), (300, 72)], ids=str)
def test_a_norm_is_as_accurate_as_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random_tensor(*shape, dtype=dtype), random_tensor(shape[1], seed=1, dtype=dtype)
    _as_good(fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), _norm_exact(x, weight))


def test_zero_tokens_launch_nothing() -> None:
    empty = random_tensor(0, 64)
    assert fused.rms_norm(empty, random_tensor(64), EPS).shape == (0, 64)
    assert fused.silu_mul(empty).shape == (0, 32)


def test_a_non_contiguous_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="x has strides"):
        fused.rms_norm(random_tensor(4, 128)[:, ::2], random_tensor(64), EPS)


# ── quantised ────────────────────────────────────────────────────────────────────────────────────────


def _scaled_only(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise like the reference, but without rounding to e4m3, because the interpreter does not support
    e4m3."""
    largest = x.float().abs().amax(-1, keepdim=True)
    full = torch.full_like(largest, 448.0)
    return x.float() * (full / torch.where(largest > 0, largest, 1.0)), largest / full


def test_quantised_rows_are_scaled_by_their_largest_value() -> None:
    x, weight = random_tensor(4, 100), random_tensor(100, seed=1)
    x[2] = 0.0
    for found, plain in (
        (fused.rms_norm_fp8(x, weight, EPS, values=torch.float32), fused.rms_norm(x, weight, EPS)),
        (fused.silu_mul_fp8(x, values=torch.float32), fused.silu_mul(x)),
    ):
        values, scales = _scaled_only(plain)
        assert torch.equal(found[1], scales) and scales[2] == 0
        torch.testing.assert_close(found[0], values, rtol=1e-6, atol=1e-4)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantised_results_equal_the_reference(tokens: int, dtype: torch.dtype) -> None:
    """The results of silu_mul are bitwise equal. A norm may sum in a different order, which changes the last
    bit of a few results before quantisation and thus changes their quantised values by one step of e4m3."""
    x, weight = random_tensor(tokens, 4096, dtype=dtype), random_tensor(4096, seed=1, dtype=dtype)
    gate_up = random_tensor(tokens, 2 * 14336, dtype=dtype)
    x[0, :100] = 1e-3
    values, scales = reference.quantise_fp8(fused.silu_mul(gate_up))
    found = fused.silu_mul_fp8(gate_up)
    assert torch.equal(found[1], scales)
    assert torch.equal(found[0].view(torch.uint8), values.view(torch.uint8))
    found = fused.rms_norm_fp8(x, weight, EPS)
    values, scales = reference.quantise_fp8(fused.rms_norm(x, weight, EPS))
    torch.testing.assert_close(found[1], scales, rtol=torch.finfo(dtype).eps, atol=0)
    assert (found[0].float() != values.float()).float().mean() < 1e-3
    torch.testing.assert_close(found[0].float(), values.float(), rtol=0.126, atol=0.002)


# ── QK-norm, RoPE and the cache ──────────────────────────────────────────────────────────────────────

Pool = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """The inputs of one call, and pools that are filled with a poison value so that stray writes are
    detected."""

    def __init__(
        self, heads: int, kv_heads: int, size: int, tokens: int, dtype: torch.dtype, norm: bool
    ) -> None:
        self.heads, self.kv_heads, self.size, self.tokens = heads, kv_heads, size, tokens
        self.qkv = random_tensor(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
        self.norms = (
            [random_tensor(size, seed=seed, dtype=dtype) for seed in (4, 5)] if norm else [None, None]
        )
        blocks = 4 + tokens // PAGE_TOKENS
        generator = torch.Generator().manual_seed(1)
        self.slots = torch.randperm(blocks * PAGE_TOKENS, generator=generator)[:tokens].to(DEVICE)
        self.positions = torch.randint(0, 512, (tokens,), generator=generator).to(DEVICE)
        self.shape = (blocks, kv_heads, PAGE_TOKENS, size)
        self.table = cos_sin_table(default_frequencies(size, 10000.0), 512).to(DEVICE)

    def pools(self, dtype: torch.dtype) -> Pool:
        first, second = (torch.full(self.shape, POISON, device=DEVICE).to(dtype) for _ in range(2))
        return first, second

    def scales(self) -> Pool:
        first, second = (torch.full(self.shape[:3], POISON, device=DEVICE) for _ in range(2))
        return first, second

    def run(self, function: Callable[..., torch.Tensor], *pools: torch.Tensor, **more: bool) -> torch.Tensor:
        rotation = Rotation(self.table, *self.norms, EPS)
        return function(self.qkv, self.positions, self.slots, rotation, KvPool(*pools), self.heads, **more)


ROPE_CASES = [(6, 2, 16, 9, True), (4, 4, 64, 3, False), (32, 8, 128, 2, False), (3, 1, 80, 5, True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_heads_are_normed_rotated_and_written(
    case: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    rope = Rope(*case[:4], dtype, case[4])
    found_pools, torch_pools, exact_pools = rope.pools(dtype), rope.pools(dtype), rope.pools(torch.float64)
    found = rope.run(fused.rope_cache_write, *found_pools)
    by_torch = rope.run(reference.rope_cache_write, *torch_pools)
    exact = _rope_exact(rope, *exact_pools)
    for results in zip((found, *found_pools), (by_torch, *torch_pools), (exact, *exact_pools), strict=True):
        _as_good(*results)
    assert torch.equal(found_pools[1], torch_pools[1]), "values are only copied"


def _rope_exact(rope: Rope, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute the expected result in float64, one token and one head at a time. As documented, the normalised
    head is then rounded to its dtype."""
    heads, kv_heads, size = rope.heads, rope.kv_heads, rope.size
    queries = torch.empty(rope.tokens, heads, size, dtype=torch.float64, device=DEVICE)
    cos, sin = rope.table[rope.positions].double().chunk(2, dim=-1)
    for token, slot in enumerate(rope.slots.tolist()):
        block, offset = divmod(slot, PAGE_TOKENS)
        for head, row in enumerate(rope.qkv[token].view(-1, size)):
            if head >= heads + kv_heads:
                values[block, head - heads - kv_heads, offset] = row.double()
                continue
            norm = rope.norms[0 if head < heads else 1]
            row = row.double() if norm is None else _norm_exact(row, norm).to(rope.qkv.dtype).double()
            low, high = row.chunk(2)
            turned = torch.cat((low * cos[token] - high * sin[token], high * cos[token] + low * sin[token]))
            if head < heads:
                queries[token, head] = turned
            else:
                keys[block, head - heads, offset] = turned
    return queries


def test_a_slot_of_minus_one_writes_nothing() -> None:
    rope = Rope(6, 2, 16, 5, torch.float32, True)
    pools, torch_pools = rope.pools(torch.float32), rope.pools(torch.float32)
    rope.run(reference.rope_cache_write, *torch_pools)
    for slot in rope.slots[[1, 4]].tolist():
        for pool in torch_pools:
            pool[slot // PAGE_TOKENS, :, slot % PAGE_TOKENS] = POISON
    rope.slots[[1, 4]] = -1
    rope.run(fused.rope_cache_write, *pools)
    for found, expected in zip(pools, torch_pools, strict=True):
        torch.testing.assert_close(found, expected)


def test_quantised_pages_have_a_scale_for_each_token_and_head() -> None:
    rope = Rope(6, 2, 16, 5, torch.float32, True)
    plain, scaled, scales = rope.pools(torch.float32), rope.pools(torch.float32), rope.scales()
    expected = rope.run(fused.rope_cache_write, *plain)
    assert torch.equal(rope.run(fused.rope_cache_write, *scaled, *scales), expected)
    untouched = torch.full(rope.shape[:3], True, device=DEVICE)
    untouched[rope.slots // PAGE_TOKENS, :, rope.slots % PAGE_TOKENS] = False
    for pool, values, per_head in zip(plain, scaled, scales, strict=True):
        expected_values, expected_scales = _scaled_only(pool[~untouched])
        torch.testing.assert_close(values[~untouched], expected_values, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(per_head[~untouched], expected_scales.squeeze(-1))
        assert (values[untouched] == POISON).all() and (per_head[untouched] == POISON).all()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("norm", [False, True])
def test_quantised_pages_equal_the_reference(norm: bool) -> None:
    """Cached values are bitwise equal, because they are only copied. Cached keys differ by at most one step
    of e4m3, where the last bit of the rotation's result decides how the key is rounded."""
    rope = Rope(32, 8, 128, 300, torch.bfloat16, norm)
    found, found_scales = rope.pools(torch.float8_e4m3fn), rope.scales()
    by_torch, torch_scales = rope.pools(torch.float8_e4m3fn), rope.scales()
    assert torch.equal(
        rope.run(fused.rope_cache_write, *found, *found_scales),
        rope.run(fused.rope_cache_write, *rope.pools(torch.bfloat16)),
    )
    rope.run(reference.rope_cache_write, *by_torch, *torch_scales)
    assert torch.equal(found[1].view(torch.uint8), by_torch[1].view(torch.uint8))
    assert torch.equal(found_scales[1], torch_scales[1])
    torch.testing.assert_close(found_scales[0], torch_scales[0], rtol=1e-6 if not norm else 1e-2, atol=0)
    apart = found[0].float() != by_torch[0].float()
    assert apart.float().mean() < (2e-3 if norm else 1e-4)
    torch.testing.assert_close(found[0].float(), by_torch[0].float(), rtol=0.126, atol=0.002)


# ── SwiGLU ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 48), (3, 4500), (2, 28672)], ids=str)
def test_silu_mul_is_as_accurate_as_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random_tensor(*shape, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate / (1 + (-gate).exp()) * up
    _as_good(fused.silu_mul(gate_up), reference.silu_mul(gate_up.clone()), exact)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("tokens", [1, 70])
def test_pdl_and_a_graph_change_no_bit(tokens: int) -> None:
    """Each kernel in the chain reads the output of the previous kernel. The chain is launched with and
    without PDL, and replayed from a graph with inputs that differ from those at capture."""
    rope = Rope(32, 8, 128, tokens, torch.bfloat16, True)
    weight = random_tensor(4096, seed=7, dtype=torch.bfloat16)
    source = random_tensor(tokens, 4096, seed=8, dtype=torch.bfloat16)

    def chain(x: torch.Tensor, pdl: bool) -> list[torch.Tensor]:
        pools, scales = rope.pools(torch.float8_e4m3fn), rope.scales()
        x = fused.rms_norm(x, weight, EPS, pdl=pdl)
        values, norm_scales = fused.rms_norm_fp8(x, weight, EPS, pdl=pdl)
        x = fused.rms_norm(x, weight, EPS, pdl=pdl)
        gated = fused.silu_mul(x, pdl=pdl)
        gated_fp8, gate_scales = fused.silu_mul_fp8(x, pdl=pdl)
        rope.qkv = torch.cat((gated, gated, x[:, :2048]), dim=1)
        queries = rope.run(fused.rope_cache_write, *pools, *scales, pdl=pdl)
        normed = fused.rms_norm(queries.view(tokens, 4096), weight, EPS, pdl=pdl)
        parts = [normed, x, values, norm_scales, gated_fp8, gate_scales, *pools, *scales]
        return [part.view(torch.uint8) for part in parts]

    plain = chain(source, False)
    for _ in range(3):
        for one, other in zip(plain, chain(source, True), strict=True):
            assert torch.equal(one, other)
    x = torch.zeros_like(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chain(x, True)
    for _ in range(2):
        x.copy_(source)
        graph.replay()
        for one, other in zip(plain, replayed, strict=True):
            assert torch.equal(one, other)
