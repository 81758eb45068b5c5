"""Tests that the faster interpreter computes exactly the results of Triton's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from kernels.triton.attention_decode import DecodeConfig
from tests import quick_interpreter
from tests.kernels import decode_cases, exercise

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not interpreted")


@triton.jit
def difference_or_product(x, y):
    return tl.where(x > y, x - y, x * y)


@triton.jit
def compute(ints, floats, out_ints, out_floats, count, SIZE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    valid = at < count
    i = tl.load(ints + row * SIZE + at, mask=valid, other=-7)
    f = tl.load(floats + row * SIZE + at, mask=valid, other=0.5)
    wrapped = i * i + (i << 3) - i.to(tl.uint8).to(tl.int32)
    wrapped += (i.to(tl.int64) * count + row >> 2).to(tl.int32) ^ (i // 5 + i % 3)
    half = f.to(tl.float16) * 3 + (i & 1023).to(tl.float16) / 7
    mixed = difference_or_product(half.to(tl.float32), f) + tl.exp(-tl.abs(f)) * (i & 15)
    square = tl.dot(
        mixed[:, None] * tl.full((1, SIZE), 0.25, tl.float32), mixed[None, :] + mixed[:, None] + f
    )
    total = tl.sum(square, 1) + tl.max(mixed, 0) + tl.cumsum(f, 0)
    for step in range(row, count, 3):
        total += tl.sum(tl.where(at == step, f, 0.0), 0) / (step + 1)
    tl.store(out_floats + row * SIZE + at, total, mask=at != 1)
    tl.store(out_ints + row * SIZE + at, wrapped + tl.argmax(f, 0), mask=valid | (at == SIZE - 1))
    tl.atomic_add(out_ints + at, i, mask=valid)


def results_of_operations() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ints = torch.randint(-(2**31), 2**31, (3, 16), dtype=torch.int32, generator=random)
    floats = torch.randn(3, 16, generator=random)
    out = [torch.zeros_like(ints), torch.zeros_like(floats)]
    compute[(3,)](ints, floats, *out, 13, SIZE=16)
    return out


def results_of_kernels() -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exercise, "_finite", lambda *of_one: results.extend(of_one))
        for group in ("fuse", "place", "embed"):
            exercise.GROUPS[group]()
    new_tokens = decode_cases.new(decode_cases.make([1, 65, 0, 130], window=100), norm=True)
    return [*results, new_tokens.run(config=DecodeConfig(items=6, stages=3))]


@pytest.mark.parametrize("run", [results_of_operations, results_of_kernels])
def test_results_are_those_of_the_original_interpreter(run) -> None:
    quick = run()
    with quick_interpreter.original_interpreter():
        original = run()
    assert len(quick) == len(original) > 1
    assert all(one.float().isfinite().all() for one in quick)
    for one, other in zip(quick, original, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_an_error_in_a_kernel_restores_the_language() -> None:
    before = dict(vars(tl)), dict(vars(tl.tensor))
    with pytest.raises(triton.runtime.errors.InterpreterError):
        compute[(1,)](torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.zeros(4), 4, SIZE=5)
    assert (dict(vars(tl)), dict(vars(tl.tensor))) == before
