"""GEMMs for the tests of their kernels, and their reference results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import DeferredNorm, reference
from tests.kernels.closeness import error, worst_error

linear = pytest.importorskip("kernels.triton.linear", exc_type=ImportError)
CudaOps = pytest.importorskip("kernels.cuda", exc_type=ImportError).CudaOps
EPS = 1e-5
POISON = 77.0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
ALL = ("norm", "bias", "residual")


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


class Case:
    """A GEMM with random matrices, its reference result and its exact result."""

    def __init__(self, rows: int, n: int, k: int, extras: tuple[str, ...], dtype: torch.dtype) -> None:
        self.x = random_tensor(rows, k, seed=1, dtype=dtype)
        self.weight = random_tensor(n, k, seed=2, dtype=torch.float32).mul_(k**-0.5).to(dtype)
        self.silu = "silu" in extras
        columns = n // 2 if self.silu else n
        self.norm = random_tensor(k, seed=3, dtype=dtype) if "norm" in extras else None
        self.bias = random_tensor(n, seed=4, dtype=dtype) if "bias" in extras else None
        self.residual = random_tensor(rows, columns, seed=5, dtype=dtype) if "residual" in extras else None
        self.out = torch.full((rows, columns), POISON, dtype=dtype, device=DEVICE)

    def options(self) -> dict[str, object]:
        return {
            "bias": self.bias,
            "residual": self.residual,
            "norm_weight": self.norm,
            "eps": EPS,
            "silu_mul": self.silu,
            "out": self.out,
        }

    def normed(self) -> torch.Tensor:
        return self.x if self.norm is None else reference.rms_norm(self.x, self.norm, EPS)

    def by_torch(self, product: torch.Tensor) -> torch.Tensor:
        if self.silu:
            product = reference.silu_mul(product)
        return product if self.residual is None else product + self.residual

    def exact(self, product: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            product = product + self.bias.double()
        if self.silu:
            gate, up = product.chunk(2, dim=-1)
            product = F.silu(gate) * up
        return product if self.residual is None else product + self.residual.double()

    def exact_normed(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm is None:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.norm.double()

    def half_normed(self, parts: int) -> DeferredNorm:
        """Return the deferred norm of x as the preceding GEMM would write it, with `parts` partial sums of
        squares, followed by poison values."""
        assert self.norm is not None
        squares = torch.full((parts + 3, len(self.x)), POISON, device=DEVICE)[:parts]
        for index, part in enumerate(self.x.float().tensor_split(parts, dim=1)):
            squares[index] = part.pow(2).sum(1)
        return DeferredNorm((self.x.float() * self.norm.float()).to(self.x.dtype), squares)

    def options_after(self, deferred_norm: DeferredNorm) -> dict[str, object]:
        """Return the options of a GEMM that reads `deferred_norm.values`."""
        return {**self.options(), "norm_weight": None, "squares": deferred_norm.squares}


def check(case: Case, found: torch.Tensor) -> None:
    assert found is case.out
    by_torch = case.by_torch(reference.linear(case.normed(), case.weight, case.bias))
    x, weight = case.exact_normed(), case.weight.double()
    exact = case.exact(x @ weight.T)
    assert found.shape == by_torch.shape and found.dtype == by_torch.dtype
    unit = torch.finfo(found.dtype).eps * exact.abs().max()
    sums = x.shape[1] ** 0.5 * 2**-24 * (x.abs() @ weight.abs().T).max()
    torch_error = (by_torch.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 2 * torch_error + unit / 2 + sums


class Fp8Case(Case):
    """A case with FP8 weights of dtype `values`. In the interpreter the dtype is not e4m3, so values are
    scaled but not rounded."""

    def __init__(
        self, rows: int, n: int, k: int, extras: tuple[str, ...], dtype: torch.dtype, values: torch.dtype
    ) -> None:
        super().__init__(rows, n, k, extras, dtype)
        quantised, scales = reference.quantise_fp8(self.weight)
        self.weight_scale = scales.squeeze(1)
        self.quantised = (
            quantised if values == torch.float8_e4m3fn else (self.weight.float() / scales).to(values)
        )


def check_fp8(
    case: Fp8Case,
    found: torch.Tensor,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
    rounded: torch.dtype = torch.float64,
) -> None:
    """Check an FP8 result. `quantised` is the input of the GEMM if it was quantised beforehand. `rounded` is
    the dtype to which the GEMM may round before its epilogue."""
    x = case.normed()
    dequantised = x.double()
    if case.quantised.dtype == torch.float8_e4m3fn:
        values, scales = quantised or quantised_rows(case)
        dequantised = values.double() * scales.double()
    weight = case.quantised.double() * case.weight_scale.double().unsqueeze(1)
    product = dequantised @ weight.T
    exact = case.exact(product)
    biased = product.to(rounded).double().add(0 if case.bias is None else case.bias)
    by_torch = case.by_torch(biased.to(x.dtype))
    assert error(found, exact) <= 2 * error(by_torch, exact) + 4e-3
    assert worst_error(found, exact) <= 2 * worst_error(by_torch, exact) + 4e-3
    off, torch_off = ((each.double() - exact).abs().max() for each in (found, by_torch))
    unit = torch.finfo(found.dtype).eps * exact.abs().max()
    assert off <= 2 * torch_off + unit / 2 + 1e-2 * max(exact.abs().max(), product.abs().max())


def quantised_rows(case: Fp8Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x after the norm and quantisation.

    For several rows, run the quantisation kernel that the GEMM launches first, check its result against the
    reference, and return the kernel's values. The reference's own values are not suitable, because the last
    bit of a row's largest value affects how many other values are rounded.
    """
    expected, expected_scales = reference.quantise_fp8(case.normed())
    if case.norm is None or len(case.x) == 1:
        return expected, expected_scales
    values, scales = linear.fused.rms_norm_fp8(case.x, case.norm, EPS)
    torch.testing.assert_close(scales, expected_scales, rtol=torch.finfo(case.x.dtype).eps, atol=0)
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.126, atol=0.002)
    return values, scales
