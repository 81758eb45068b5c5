"""Layers of experts for the tests of their GEMMs, and their reference results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import Fp8Weight, Weight, reference
from kernels.triton.experts_plans import ExpertsPlan, LayerPlans
from tests.kernels.closeness import error, worst_error
from tests.kernels.linear_cases import DEVICE, linear

experts = pytest.importorskip("kernels.triton.experts", exc_type=ImportError)
few = pytest.importorskip("kernels.triton.experts_few", exc_type=ImportError)
many = pytest.importorskip("kernels.triton.experts_many", exc_type=ImportError)
routes = pytest.importorskip("kernels.triton.experts_route", exc_type=ImportError)


E4M3 = torch.float8_e4m3fn


def random_tensor(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def choices(kind: str, tokens: int, count: int, top_k: int) -> torch.Tensor:
    """Return chosen experts `[tokens, top_k]` int32. `kind` is "random", "same" (the same experts for every
    token) or "odd" (only experts with odd ids)."""
    generator = torch.Generator().manual_seed(7)
    if kind == "same":
        chosen = torch.randperm(count, generator=generator)[:top_k].expand(tokens, -1)
    elif kind == "odd":
        odd = torch.arange(1, count, 2)
        ranks = torch.rand(tokens, len(odd), generator=generator).argsort(dim=1)[:, :top_k]
        chosen = odd[ranks]
    else:
        chosen = torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :top_k]
    return chosen.int().contiguous().to(DEVICE)


def in_both_dtypes(cases: list[tuple]) -> list[tuple[tuple, torch.dtype]]:
    """Return every case with float32, and the last one also with float16. The dtype interacts with no other
    field of a case."""
    return [*((case, torch.float32) for case in cases), (cases[-1], torch.float16)]


def quantised(weight: torch.Tensor, values: torch.dtype) -> Fp8Weight:
    """Quantise the experts' matrices. In the interpreter, `values` is not e4m3, so values are scaled but not
    rounded."""
    rounded, scales = reference.quantise_fp8(weight)
    return Fp8Weight(rounded if values == E4M3 else (weight.float() / scales).to(values), scales.squeeze(-1))


def routed(chosen: torch.Tensor, count: int) -> routes.Routed:
    """Return the choices of experts with their places and counts, in the form in which `route_many` returns
    them."""
    tokens = len(chosen)
    block = routes.block_tokens(tokens, count)
    blocks = -(-tokens // block)
    taken = torch.zeros(blocks * block, max(16, 1 << (count - 1).bit_length()), dtype=torch.int32)
    taken[:tokens].scatter_(1, chosen.cpu().long(), 1)
    taken = taken.view(blocks, block, -1)
    places = (taken.cumsum(1) - taken).flatten(0, 1)[:tokens].gather(1, chosen.cpu().long())
    counts = taken.sum(1)
    empty = torch.empty(0, device=DEVICE)
    return routes.Routed(empty, None, chosen, empty, places.int().to(DEVICE), counts.int().to(DEVICE))


class Case:
    """The experts' matrices, tokens that are already normalised, and the experts that the tokens choose."""

    def __init__(
        self,
        tokens: int,
        count: int,
        top_k: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        kind: str = "random",
        values: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.x = random_tensor(tokens, hidden, seed=1, dtype=dtype)
        self.chosen = choices(kind, tokens, count, top_k)
        self.weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        self.residual = random_tensor(tokens, hidden, seed=3, dtype=dtype)
        self.live = torch.arange(tokens, device=DEVICE) % 3 - 1
        """One number per token, [tokens] int64. Negative numbers mark padding, which is not counted."""
        gate_up = random_tensor(count, 2 * width, hidden, seed=4, dtype=dtype) * hidden**-0.5
        down = random_tensor(count, hidden, width, seed=5, dtype=dtype) * width**-0.5
        self.values = values
        self.gate_up: Weight = gate_up if values is None else quantised(gate_up, values)
        self.down: Weight = down if values is None else quantised(down, values)
        self.workspace = linear.allocate_workspace(DEVICE)

    @property
    def slack(self) -> float:
        """Error that is allowed in addition to twice the reference's error."""
        sums = 4 * max(self.x.shape[1], 64) ** 0.5 * 2**-24
        return torch.finfo(self.dtype).eps / 2 + sums + (4e-3 if self.values is not None else 0)

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x in the dtype that the GEMMs read and, if the experts are quantised, its scales."""
        return (x, None) if self.values is None else linear.quantise(x, values=self.values, pdl=False)

    def dequantised(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self.quantise(x.contiguous())
        return values.double() if scales is None else values.double() * scales.double()

    def products(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return the exact products of `x [tokens × top_k, in]` float64 with the matrices of the chosen
        experts."""
        chosen = self.chosen.flatten()
        values, scales = parts_of(weight)
        result = x.new_empty(len(x), values.shape[1])
        for expert in chosen.unique().tolist():
            matrix = values[expert].double()
            if scales is not None:
                matrix = matrix * scales[expert].double().unsqueeze(1)
            rows = chosen == expert
            result[rows] = x[rows] @ matrix.T
        return result

    def check_up(self, found: torch.Tensor) -> None:
        """Check `silu(gate) × up`, in the order of the choices."""
        x = self.dequantised(self.x).repeat_interleave(self.chosen.shape[1], dim=0)
        products = self.products(x, self.gate_up)
        gate, up = products.chunk(2, dim=1)
        self._check(found, reference.silu_mul(products.to(self.dtype)), F.silu(gate) * up)

    def check_down(self, found: torch.Tensor, activations: torch.Tensor) -> None:
        """Check the experts' weighted sum with the residual added. `activations` are in the order of the
        choices."""
        products = self.products(self.dequantised(activations), self.down)
        tokens, top_k = self.chosen.shape
        factors = self.weights.unsqueeze(-1)

        def summed(results: torch.Tensor) -> torch.Tensor:
            return (results.view(tokens, top_k, -1) * factors.to(results.dtype)).sum(dim=1)

        exact = summed(products) + self.residual.double()
        rounded = summed(products.to(self.dtype).float()).to(self.dtype) + self.residual
        self._check(found, rounded, exact)

    def _check(self, found: torch.Tensor, by_torch: torch.Tensor, exact: torch.Tensor) -> None:
        assert found.shape == exact.shape and found.dtype == self.dtype and found.isfinite().all()
        assert error(found, exact) <= 2 * error(by_torch, exact) + self.slack
        assert worst_error(found, exact) <= 2 * worst_error(by_torch, exact) + 2 * self.slack

    def check_few(self, up: ExpertsPlan, down: ExpertsPlan, pdl: bool = False) -> None:
        weight, scale = parts_of(self.gate_up)
        options = {"dtype": self.dtype, "pdl": pdl}
        x, x_scale = self.quantise(self.x)
        activations = few.up(x, x_scale, self.chosen, weight, scale, up, **options)
        self.check_up(activations)
        weight, scale = parts_of(self.down)
        x, x_scale = (activations, None) if down.quantises else self.quantise(activations)
        out = self.residual.clone()
        inputs = (x, x_scale, self.chosen, self.weights, weight, scale, down)
        found = few.down(*inputs, workspace=self.workspace, residual=out, out=out, **options)
        assert found is out
        self.check_down(found, activations)
        assert self.workspace.arrived.eq(0).all()
        alone = few.down(*inputs, workspace=self.workspace, **options)
        whole = alone.float() + self.residual.float()
        assert error(whole, found.double()) <= 2 * torch.finfo(self.dtype).eps

    def check_many(self, up: ExpertsPlan, down: ExpertsPlan, programs: int, pdl: bool = False) -> None:
        weight, scale = parts_of(self.gate_up)
        options = {"dtype": self.dtype, "pdl": pdl}
        x, x_scale = self.quantise(self.x)
        rows = (up.rows, down.rows)
        by_expert = many.sort(routed(self.chosen, len(weight)), len(weight), rows, pdl=pdl)
        top_k = self.chosen.shape[1]
        found = many.up(x, x_scale, by_expert, top_k, weight, scale, up, programs, **options)
        activations = torch.empty_like(found)
        activations[by_expert.order.long()] = found
        self.check_up(activations)
        weight, scale = parts_of(self.down)
        x, x_scale = self.quantise(found)
        results = many.down(x, x_scale, by_expert, weight, scale, down, programs, **options)
        out = self.residual.clone()
        assert many.combine(results, self.weights, residual=out, out=out, pdl=pdl) is out
        self.check_down(out, activations)
        alone = many.combine(results, self.weights, pdl=pdl)
        whole = alone.float() + self.residual.float()
        assert error(whole, out.double()) <= 2 * torch.finfo(self.dtype).eps

    def _up(
        self, plans: LayerPlans, here: range | None, pdl: bool
    ) -> tuple[torch.Tensor, many.Sorted | None]:
        """Return `silu(gate) × up` of a rank that holds only the experts in `here`, or all experts if `here`
        is None, and the order of the rows if the plans are grouped."""
        weight, scale = parts_of(self.gate_up)
        some = slice(None) if here is None else slice(here.start, here.stop)
        x, x_scale = self.quantise(self.x)
        matrices = (weight[some], None if scale is None else scale[some], plans.up)
        options = {"dtype": self.dtype, "pdl": pdl}
        if not plans.grouped:
            first = None if here is None else here.start
            return few.up(x, x_scale, self.chosen, *matrices, first=first, **options), None
        share = {} if here is None else {"first": here.start, "held": len(here)}
        count, rows = len(weight), (plans.up.rows, plans.down.rows)
        by_expert = many.sort(routed(self.chosen, count), count, rows, pdl=pdl, **share)
        inputs = (x, x_scale, by_expert, self.chosen.shape[1], *matrices)
        return many.up(*inputs, self._programs, **options), by_expert

    @property
    def _programs(self) -> int:
        return experts.multiprocessors_of(DEVICE) if DEVICE.type == "cuda" else 3

    def _check_some(self, plans: LayerPlans, here: range, up_of_all: torch.Tensor, pdl: bool) -> torch.Tensor:
        """Run a rank that holds only the experts in `here`, and return its partial sum. Check that the
        results of these experts equal `up_of_all`, those on a rank that holds all experts. The results of all
        other experts are set to NaN, so that the sum becomes NaN if the kernel reads one of them."""
        found, by_expert = self._up(plans, here, pdl)
        elsewhere = ~inside_of(self.chosen, here).flatten()
        if by_expert is not None:
            elsewhere = elsewhere[by_expert.order.long()]
        assert torch.equal(found[~elsewhere], up_of_all[~elsewhere])
        if torch.are_deterministic_algorithms_enabled():  # `torch.empty` is filled with NaN
            assert found[elsewhere].isnan().all()
        found[elsewhere] = torch.nan
        down, scale = parts_of(self.down)
        some = slice(here.start, here.stop)
        matrices = (down[some], None if scale is None else scale[some], plans.down)
        options = {"dtype": self.dtype, "pdl": pdl}
        x, x_scale = (found, None) if plans.down.quantises else self.quantise(found)
        if by_expert is None:
            inputs = (x, x_scale, self.chosen, self.weights, *matrices)
            return few.down(*inputs, workspace=self.workspace, first=here.start, **options)
        results = many.down(x, x_scale, by_expert, *matrices, self._programs, **options)
        results[~inside_of(self.chosen, here).flatten()] = torch.nan
        computed = many.ComputedChoices(self.chosen, here.start, len(here))
        return many.combine(results, self.weights, computed=computed, pdl=pdl)

    def check_ranks(self, plans: LayerPlans, pdl: bool = False) -> None:
        """Check that the partial sums of three ranks, which each hold some of the experts, add up to the sum
        over all experts."""
        count = len(parts_of(self.gate_up)[0])
        ranks = [range(1), range(1, count - 1), range(count - 1, count)]
        up_of_all, _ = self._up(plans, None, pdl)
        parts = [self._check_some(plans, here, up_of_all, pdl) for here in ranks]
        for here, part in zip(ranks, parts, strict=True):
            assert not part[~inside_of(self.chosen, here).any(dim=1)].any()
        whole = self._check_some(plans, range(count), up_of_all, pdl)
        total = sum(part.float() for part in parts)
        assert error(total, whole.double()) <= 4 * torch.finfo(self.dtype).eps


def inside_of(chosen: torch.Tensor, here: range) -> torch.Tensor:
    return (chosen >= here.start) & (chosen < here.stop)


def parts_of(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)
