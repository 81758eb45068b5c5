"""Products by every plan of the tables that ship, as `test_triton_linear` holds all products to their twins.

Parity and PDL are a Hopper's to prove (marked `gpu`), at the rows and K of what ships. Anywhere: that no plan
that ships is left out, that each fits a Hopper's shared memory, and that the hungriest of each form compiles.
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
from tests.kernels.shipped_plans import Product, Shipped, shipped_plans  # noqa: E402

DEVICE = products.DEVICE
on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
SHIPPED = shipped_plans()
BARRIERS = 1024
"""More bytes than a program's barriers and its warps' sums take."""


def check(made: Product) -> None:
    """A product, its residual in its result as a decoder has it, against the twin."""
    case, inputs = made.case, dict(made.inputs)
    gained, behind = products.poisoned_gained(case.out, made.plan)
    if case.residual is not None:
        inputs["residual"] = case.out.copy_(case.residual)
    found, *left = made.run(**inputs, out=case.out, gained=gained)
    if isinstance(case, products.Fp8Case):
        products._check_fp8(case, found)
    else:
        products._check(case, found)
    if left:
        products.check_is_gained(gained, found, made.gain, made.plan)
    assert all(part.eq(products.POISON).all() for part in behind)
    assert made.workspace.arrived.eq(0).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_a_product_by_a_plan_that_ships_is_as_good_as_its_twin(shipped: Shipped) -> None:
    for rows, k in shipped.cases:
        for silu in (False, True):
            check(Product(shipped, rows, k, silu))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shipped", SHIPPED, ids=str)
def test_pdl_and_graphs_change_no_bit_of_a_plan_that_ships(shipped: Shipped) -> None:
    """Behind kernels that let it begin before they write what it reads."""
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


# ── anywhere ─────────────────────────────────────────────────────────────────────────────────────────


def _tested(test: Any) -> list[Shipped]:
    (plans,) = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"]
    return plans


def test_every_plan_that_ships_is_tested_at_its_rows_and_k() -> None:
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
        test_a_product_by_a_plan_that_ships_is_as_good_as_its_twin,
        test_pdl_and_graphs_change_no_bit_of_a_plan_that_ships,
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
def test_a_plan_that_ships_fits_a_hopper_and_is_cut_as_it_ships(shipped: Shipped) -> None:
    plan = shipped.plan
    for _, k in shipped.uses:
        assert shared_bytes(plan, Shape(shipped.dtype, 4096, k)) + BARRIERS <= HOPPER_SHARED
    rows, _ = shipped.uses[-1]
    assert linear_table.problem(plan, rows, Shape(shipped.dtype, 160, shipped.short_k)) is None


def test_the_hungriest_plan_of_each_form_compiles_to_what_it_is_said_to_take() -> None:
    done = compiled("tests.kernels.shipped_compiled")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert {"gemv", "dot", "tiles"} <= set(kernels)
    for kernel in kernels.values():
        assert abs(kernel["shared"] - kernel["expected"]) < BARRIERS, kernel
