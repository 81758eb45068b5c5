"""Tests of GEMMs with every plan of the shipped tables, against the reference as in `test_triton_linear`.

The tests of parity and PDL need a Hopper GPU (marked `gpu`) and use the shipped row counts and K. The other
tests run on any machine. They check that every shipped plan is tested and fits into Hopper's shared memory.
For each form, they also compile the plan that needs the most shared memory.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kernels.triton import linear_table
from kernels.triton.linear_plans import HOPPER_SHARED
from kernels.triton.linear_table import Product as Shape
from kernels.tune.candidates import shared_bytes
from tests.kernels.test_compiling import compiled

fused = pytest.importorskip("kernels.triton.fused", exc_type=ImportError)
from tests.kernels import test_triton_linear as products  # noqa: E402
from tests.kernels.linear_cases import on_hopper  # noqa: E402
from tests.kernels.shipped_plans import Product, Shipped, shipped_plans  # noqa: E402

SHIPPED = shipped_plans()
BARRIERS = 1024
"""Upper bound, in bytes, on the shared memory that a program uses for its barriers and its warps' sums."""


def check(made: Product) -> None:
    """Compare a GEMM with the reference. The residual is the output tensor, as in a decoder."""
    case, inputs = made.case, dict(made.inputs)
    deferred_norm, behind = products.poisoned_deferred_norm(case.out, made.plan)
    if case.residual is not None:
        inputs["residual"] = case.out.copy_(case.residual)
    found, *left = made.run(**inputs, out=case.out, deferred_norm=deferred_norm)
    if isinstance(case, products.Fp8Case):
        products.check_fp8(case, found)
    else:
        products.check(case, found)
    if left:
        products.check_deferred_norm(deferred_norm, found, made.gain, made.plan)
    assert all(part.eq(products.POISON).all() for part in behind)
    assert made.workspace.arrived.eq(0).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_a_gemm_with_a_shipped_plan_is_as_accurate_as_the_reference(shipped: Shipped) -> None:
    for rows, k in shipped.cases:
        for silu in (False, True):
            check(Product(shipped, rows, k, silu))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_pdl_and_graphs_change_no_bit_of_a_shipped_plan(shipped: Shipped) -> None:
    """The kernels that write the inputs of the GEMM let the GEMM start before the inputs are complete."""
    made = Product(shipped, *shipped.uses[-1], silu=False)
    sources = {
        name: each.view(1, -1) if name == "squares" else each
        for name, each in made.inputs.items()
        if each is not None
    }
    ones = {name: torch.ones_like(each[0]) for name, each in sources.items()}

    def run(pdl: bool) -> list[torch.Tensor]:
        late = {name: fused.rms_norm(sources[name], ones[name], products.EPS, pdl=pdl) for name in sources}
        late = {name: late[name].view_as(made.inputs[name]) for name in late}
        found = made.run(**late, out=torch.empty_like(made.case.out), pdl=pdl)
        return [made.case.x, *late.values(), *found]

    products.check_bits(run)
    assert made.workspace.arrived.eq(0).all()


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────


def _tested(test: Any) -> list[Shipped]:
    (plans,) = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"]
    return plans


def test_every_shipped_plan_is_tested_at_its_rows_and_k() -> None:
    ships = set()
    for path in linear_table.FOLDER.glob("*.json"):
        for name, entries in json.loads(path.read_text())["products"].items():
            dtype, _, shape = name.partition(" ")
            for rows, entry in entries.items():
                plan = tuple(entry.get(part) for part in ("form", *linear_table._NUMBERS))
                if plan[0] != "library":
                    ships.add((dtype, *plan, int(rows), int(shape.partition("x")[2])))
    assert len(ships) > 50
    for test in (
        test_a_gemm_with_a_shipped_plan_is_as_accurate_as_the_reference,
        test_pdl_and_graphs_change_no_bit_of_a_shipped_plan,
    ):
        found = _tested(test)
        assert len({str(shipped) for shipped in found}) == len(found)
        assert ships == {
            (str(one.dtype).removeprefix("torch."), plan.form, *numbers, rows, k)
            for one in found
            for plan in [one.plan]
            for numbers in [[getattr(plan, part) for part in linear_table._NUMBERS]]
            for rows, k in one.cases
            if (rows, k) in one.uses
        }


@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_a_shipped_plan_fits_hopper_and_the_tested_shape(shipped: Shipped) -> None:
    plan = shipped.plan
    for _, k in shipped.uses:
        assert shared_bytes(plan, Shape(shipped.dtype, 4096, k)) + BARRIERS <= HOPPER_SHARED
    rows, _ = shipped.uses[-1]
    assert linear_table.problem(plan, rows, Shape(shipped.dtype, 160, shipped.short_k)) is None


def test_the_largest_plan_of_each_form_compiles_to_its_predicted_shared_memory() -> None:
    done = compiled("tests.kernels.shipped_compiled")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {"gemv", "dot", "tiles"} <= set(kernels)
    for form, kernel in kernels.items():
        # `gemv` copies nothing to shared memory, but its warps exchange partial sums through shared memory.
        bound = 4096 if form == "gemv" else BARRIERS - 1
        assert abs(kernel["shared"] - kernel["expected"]) <= bound, kernel
