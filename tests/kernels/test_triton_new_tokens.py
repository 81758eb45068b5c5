"""Tests of new tokens in paged decode attention. Like the reference implementation, the kernel normalises,
rotates and caches the new tokens, and then attends to them.

The interpreter (CPU, float32) verifies indexing, the norm, the rotation and the cache write. Only the tests
marked `gpu` verify the numerics of bfloat16 and FP8, captured graphs and PDL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import PAGE_TOKENS

triton = pytest.importorskip("triton")
from kernels.triton import attention_decode as kernel  # noqa: E402
from kernels.triton import fused  # noqa: E402
from tests.kernels.closeness import check_as_torch, check_worst, error  # noqa: E402
from tests.kernels.decode_cases import (  # noqa: E402
    BATCHES,
    GPU_LENS,
    KINDS,
    LENS,
    LLAMA,
    OTHERS,
    Case,
    New,
    close,
    fp8_cache,
    make,
    needs_cpu,
    needs_gpu,
    new,
)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


def _check_cache(found: Case, expected_case: Case) -> None:
    """Assert that the cache equals the reference's cache bit for bit, except for the new keys. A few elements
    of the new keys may differ by one rounding error before or after the rotation, and in e4m3 by one step."""
    position = found.lens[found.lens > 0].long() - 1
    block = found.table.long()[found.rows[found.lens > 0].long(), position // PAGE_TOKENS]
    written = torch.zeros(found.keys.shape[:3], dtype=torch.bool, device=found.keys.device)
    written[block, :, position % PAGE_TOKENS] = True
    assert torch.equal(_bytes(found.values), _bytes(expected_case.values)), "values are only copied"
    assert torch.equal(_bytes(found.keys)[~written], _bytes(expected_case.keys)[~written])
    both = (_bytes(each.keys)[written].view(found.keys.dtype).float() for each in (found, expected_case))
    (new, wanted), steps = both, 0.0
    assert (new != wanted).float().sum() <= 0.02 * new.numel() or found.keys.dtype == torch.float32
    if found.k_scales is not None and expected_case.k_scales is not None:
        assert found.v_scales is not None and expected_case.v_scales is not None
        assert torch.equal(found.v_scales, expected_case.v_scales)
        assert torch.equal(found.k_scales[~written], expected_case.k_scales[~written])
        torch.testing.assert_close(found.k_scales, expected_case.k_scales, rtol=1e-2, atol=0)
        new, wanted = (
            new * found.k_scales[written][:, None],
            wanted * expected_case.k_scales[written][:, None],
        )
        steps = 0.14
    largest = wanted.abs().amax(-1, keepdim=True)
    last_places = 3 * max(torch.finfo(found.q.dtype).eps, 1e-5)
    assert ((new - wanted).abs() <= last_places * largest + steps * wanted.abs()).all()


@needs_cpu
@pytest.mark.parametrize(
    ("batch", "window", "norm"),
    [
        *((*each, True) for each in BATCHES if each[1] != 50),
        *((name, None, False) for name in ("ragged", "one is much longer", "padding inside")),
    ],
)
def test_new_tokens_are_rotated_written_and_attended_to(batch: str, window: int | None, norm: bool) -> None:
    made = new(make(LENS[batch], window=window), norm)
    expected_case = made.expected_case()
    close(made.run(), expected_case.expected(), 1e-4)
    _check_cache(made.case, expected_case)


@needs_cpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "extra"),
    [(7, 1, 32, 0), (7, 1, 32, 5), (20, 1, 16, 1), (20, 1, 16, 10), (8, 2, 128, 5)],
)
@pytest.mark.parametrize("early", [False, True])
def test_new_tokens_are_the_same_for_any_split(
    heads: int, kv_heads: int, size: int, extra: int, early: bool
) -> None:
    made = new(make([300, 1, 0, 193, 64, 65], heads, kv_heads, size), True)
    expected_case = made.expected_case()
    workspace = kernel.allocate_workspace(16, heads, kv_heads, size, made.qkv.device)
    for _ in range(2):
        found = made.run(config=kernel.DecodeConfig(6 + extra, 3, early=early), workspace=workspace)
        close(found, expected_case.expected(), 1e-4)
        _check_cache(made.case, expected_case)
        assert (workspace.arrived == 0).all()


@needs_cpu
def test_new_tokens_are_cached_with_a_scale_for_each_token_and_head() -> None:
    made = new(make([130, 70, 0, 193]), True)
    plain = made.expected_case()
    case = made.case
    scales = [torch.rand(case.keys.shape[:3]) + 0.1 for _ in range(2)]
    made.case = replace(
        case,
        keys=case.keys / scales[0].unsqueeze(-1),
        values=case.values / scales[1].unsqueeze(-1),
        k_scales=scales[0],
        v_scales=scales[1],
    )
    close(made.run(), plain.expected(), 1e-4)
    for pool, per_token, whole in zip(
        (made.case.keys, made.case.values), scales, (plain.keys, plain.values), strict=True
    ):
        torch.testing.assert_close(pool * per_token.unsqueeze(-1), whole, rtol=1e-4, atol=1e-5)
        written = (pool.abs().amax(-1) - 448).abs() < 1e-2
        assert written.sum() == 3 * 2, (
            "for three tokens and two heads, the largest magnitude must be e4m3's maximum"
        )


@needs_cpu
@pytest.mark.parametrize(
    ("head", "number"),
    [(0, float("inf")), (4, float("nan")), (6, float("nan"))],
    ids=["query", "key", "value"],
)
def test_a_non_finite_new_token_affects_only_its_own_sequence(head: int, number: float) -> None:
    lens, broken = [130, 193, 1, 64, 300], 1
    found = []
    for poisoned in (False, True):
        made = new(make(lens), True)
        if poisoned:
            made.qkv.view(len(lens), -1, 16)[broken, head] = number
        found.append((made.run(config=kernel.DecodeConfig(9, 3)), made.case.keys, made.case.values))
    (clean, *clean_cache), (out, *cache) = found
    others = [index for index in range(len(lens)) if index != broken]
    assert torch.equal(out[others], clean[others])
    assert not out[broken].isfinite().all()
    own = len(cache[0]) - len(lens) + broken
    for pool, clean_pool in zip(cache, clean_cache, strict=True):
        rest = torch.arange(len(pool)) != own
        assert torch.equal(pool[rest], clean_pool[rest])


def _check_changing_lengths(made: New, again: Callable[[], torch.Tensor], roundings: float) -> None:
    """Call `again`, which runs `made`, for several lengths. Each length uses a different block-table entry
    for the sequence's last page, which is not shared. Results must be within the bound of `check_as_torch`.
    """
    case = made.case
    own = torch.arange(len(case.lens), device=case.lens.device) + len(case.keys) - len(case.lens)
    longest = int(case.lens.max())
    shared = case.table.remainder(len(case.keys) - len(case.lens))
    for lens in ([longest] * 16, [1, 0, longest - 140, 64] * 4, [longest - 63] + [0] * 15):
        case.lens.copy_(torch.tensor(lens))
        case.table.copy_(shared)
        last = (case.lens - 1).clamp(min=0) // PAGE_TOKENS
        case.table[case.rows, last] = own
        expected_case = made.expected_case()
        out = again()
        assert (out[case.lens == 0] == 0).all()
        check_as_torch(out, expected_case.expected(out.dtype), expected_case.expected(), roundings)
        _check_cache(case, expected_case)


@needs_cpu
def test_new_tokens_are_written_at_the_changed_lengths() -> None:
    made = new(make([320] * 16), False)
    # the reference computes sums and exponentials in a different order
    _check_changing_lengths(made, made.run, 500)


@needs_cpu
def test_a_qkv_of_other_heads_is_refused() -> None:
    made = new(make([130]), True)
    with pytest.raises(ValueError, match=r"q has 112 columns; expected \(heads \+ 2 × 2\) × 16"):
        replace(made, qkv=made.qkv[:, :112]).run()
    with pytest.raises(ValueError, match="only one of q_norm and k_norm"):
        made.run(rotation=replace(made.rotation, k_norm=None))


@needs_cpu
@pytest.mark.parametrize("window", [None, 70])
def test_one_wrong_head_of_one_sequence_is_detected(window: int | None) -> None:
    """Uses float16, because the interpreter rounds float16 in the same way as a GPU."""
    case = make([130, 64, 5, 0, 300, 77], 8, 2, 32, window, dtype=torch.float16)
    made = new(replace(case, scale=32**-0.5), True)
    expected_case = made.expected_case()
    found, torchs, exact = made.run(), expected_case.expected(torch.float16), expected_case.expected()
    check_as_torch(found, torchs, exact, roundings=1)
    check_worst(found, _a_last_place_off(expected_case).expected(torch.float16), exact, roundings=1)
    _check_cache(made.case, expected_case)
    wrong = found.clone()
    wrong[4, 5] = found[4, 6]
    with pytest.raises(AssertionError, match="1 of 48 vectors have errors above"):
        check_worst(wrong, _a_last_place_off(expected_case).expected(torch.float16), exact, roundings=1)
    made.case.keys[-2, 1, 299 % PAGE_TOKENS, 7] += 0.5
    with pytest.raises(AssertionError):
        _check_cache(made.case, expected_case)


def _new_on_gpu(
    lens: list[int],
    shape: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    fp8: bool,
    window: int | None = None,
) -> New:
    made = new(make(lens, *shape, window, dtype=dtype, device="cuda", blocks=700), norm)
    return replace(made, case=fp8_cache(made.case)) if fp8 else made


NEW_CASES = [
    *((kind, LLAMA, lens, None) for kind in ("bf16", "fp8") for lens in GPU_LENS),
    *(("f16", LLAMA, lens, None) for lens in ("ragged", "mixed", "many")),
    *((kind, LLAMA, "mixed", window) for kind in KINDS for window in (70, 1000)),
    *((kind, shape, "mixed", None) for kind in ("bf16", "fp8") for shape in OTHERS),
    # For few sequences of a model with many query heads per KV head, the kernel loads the first page early.
    *((kind, (32, 4, 128), lens, None) for kind in ("bf16", "fp8") for lens in ("long", "few")),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("kind", "shape", "lens", "window"), NEW_CASES)
def test_the_error_of_new_tokens_is_at_most_twice_that_of_torch(
    kind: str,
    shape: tuple[int, int, int],
    lens: str,
    window: int | None,
    norm: bool,
) -> None:
    """The bound of `test_the_error_is_at_most_twice_that_of_torch` is raised by half a rounding error,
    because queries and keys differ from the reference by single rounding errors. In the worst vector, a
    rounding error may affect a large element. Its bound is therefore the error of torch with queries that are
    off by one rounding error."""
    dtype, fp8 = KINDS[kind]
    made = _new_on_gpu(GPU_LENS[lens], shape, norm, dtype, fp8, window)
    expected_case = made.expected_case()
    found = made.run(out=torch.full_like(expected_case.q, float("nan")))
    assert (found[made.case.lens == 0] == 0).all()
    if int(made.case.lens.max()) > 0:
        exact, computed = expected_case.expected(), torch.float16 if fp8 else dtype
        torchs = expected_case.expected(computed).to(dtype)
        assert error(found, exact) <= 2 * error(torchs, exact) + torch.finfo(dtype).eps / 4
        check_worst(found, _a_last_place_off(expected_case).expected(computed).to(dtype), exact, roundings=1)
    _check_cache(made.case, expected_case)


def _a_last_place_off(case: Case) -> Case:
    """Change every element of the queries by one unit in the last place."""
    way = torch.arange(case.q.shape[-1], device=case.q.device) * 5 % 3 - 1
    eps = torch.finfo(case.q.dtype).eps
    return replace(case, q=(case.q.double() * (1 + eps * torch.where(way == 0, 1, way))).to(case.q.dtype))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_new_tokens_have_the_same_bits_every_time_and_without_pdl(fp8: bool) -> None:
    """A preceding kernel writes the inputs of the decode kernel late. Both kernels are launched with and
    without PDL."""
    made = _new_on_gpu(GPU_LENS["mixed"], LLAMA, True, torch.bfloat16, fp8)
    workspace = kernel.allocate_workspace(len(made.case.lens), *LLAMA, made.qkv.device)
    source = made.qkv.clone()
    first = made.run(workspace=workspace, pdl=False)
    keys = made.case.keys.clone()
    ones = torch.ones(made.qkv.shape[1] // 128 * 128, dtype=torch.bfloat16, device="cuda")
    assert len(ones) == made.qkv.shape[1]
    expected = fused.rms_norm(source, ones, 1e-5, pdl=False)
    made.qkv = expected
    normed = made.run(workspace=workspace, pdl=False)
    for pdl in (True, False) * 10:
        made.qkv = fused.rms_norm(source, ones, 1e-5, pdl=pdl)
        assert torch.equal(made.run(workspace=workspace, pdl=pdl), normed)
    made.qkv = source
    assert torch.equal(made.run(workspace=workspace), first)
    assert torch.equal(made.case.keys.view(torch.uint8), keys.view(torch.uint8))
    assert (workspace.arrived == 0).all()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_writes_new_tokens_at_the_current_lengths() -> None:
    made = new(make([640] * 16, *LLAMA, dtype=torch.bfloat16, device="cuda", blocks=100), False)
    workspace = kernel.allocate_workspace(16, *LLAMA, made.qkv.device)
    out = made.run(workspace=workspace).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(workspace=workspace, out=out)

    def replayed() -> torch.Tensor:
        graph.replay()
        return out

    _check_changing_lengths(made, replayed, 1)
