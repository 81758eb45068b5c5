"""The search takes the fastest plan that is right; what it measures is a GPU's to say."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import compiling, dimensions
from kernels.triton import linear_plans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table, problem
from kernels.tune import search
from kernels.tune.__main__ import main
from kernels.tune.candidates import BUCKETS, candidates
from kernels.tune.layers import Layers
from tests.kernels import test_build

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LIBRARY_US = 20.0


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("hopper", [True, False])
def test_every_candidate_can_be_run(dtype: torch.dtype, rows: int, hopper: bool) -> None:
    for n, k in [*SHAPES.values(), (128256, 4096), (3072, 2048)]:
        product = Product(dtype, n, k)
        plans = candidates(product, rows, hopper)
        assert len(plans) == len(set(plans))
        assert not [wrong for plan in plans if (wrong := problem(plan, rows, product))]
        assert plans or rows >= 128


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_tiles_of_weights_that_come_early_are_tried_beside_those_of_the_next_product(
    dtype: torch.dtype,
) -> None:
    for shape in SHAPES.values():
        for rows in (8, 16, 32, 64):
            tiles = [plan for plan in candidates(Product(dtype, *shape), rows, True) if plan.form == "tiles"]
            assert len(tiles) >= 2
            for plan in tiles:
                stage = (plan.block_n + plan.rows) * plan.block_k * dtype.itemsize
                assert 2 * (plan.stages * stage + 1024) <= 228 << 10
    for rows, hopper in ((128, True), (8, False)):
        others = candidates(Product(dtype, *SHAPES["o"]), rows, hopper)
        assert others and not [plan for plan in others if plan.form == "tiles"]


def test_a_table_or_a_gpu_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    more = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    table = tmp_path / "table.json"
    table.write_text("[]")
    monkeypatch.setattr(sys, "argv", ["kernels.tune", "--config", str(tmp_path), "--out", str(table)])
    monkeypatch.setattr(compiling, "_send_gpu", lambda sender: None)
    assert main() == 1
    assert "no NVIDIA GPU can be used here: see nvidia-smi" in capsys.readouterr().err
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.Gpu.of("NVIDIA H200", 90))
    assert main() == 1
    assert f"{table}: has no object `products`" in capsys.readouterr().err


def test_what_a_search_would_fail_on_at_its_end_is_said_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(test_build.SMALL))
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.Gpu.of("NVIDIA H200", 90))
    monkeypatch.setattr(compiling, "record", lambda target, run: pytest.fail("the search began"))

    def said(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kernels.tune", "--config", str(tmp_path), *options])
        assert main() == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert said("--json", str(tmp_path)).startswith(f"--json is {tmp_path}, which cannot be written (Is a")
    assert said("--out", str(tmp_path)).startswith(f"--out is {tmp_path}, which cannot be written (Is a")
    assert said("--tensor-parallel", "0") == "tensor_parallel is 0; at least 1 is needed"
    with pytest.raises(SystemExit) as ended:
        said("--rows", "8", "1000")
    assert ended.value.code == 2
    assert "--rows has 1000; numbers from 1 to 256 are needed" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[]")
    assert said() == f"{tmp_path}/config.json: is no object but []; give the folder of a checkpoint"


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 products are the interpreter's")
def test_a_product_is_compared_with_its_twin_and_shares_its_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(test_build.SMALL | shape))
    monkeypatch.setitem(dimensions.DTYPES, "float32", torch.float32)
    found = replace(dimensions.read_dimensions(tmp_path), dtype="float32")
    layers = Layers(found, torch.device("cpu"), pdl=False)
    layers.set_rows(5)
    plan = GemmPlan("dot", 16, 64, 64, 4, 3)
    deferred_norm = layers._gained
    for name, product in layers.products().items():
        table = Table().with_entry(product, 5, PlanEntry(plan, 0.0, 0.0))
        monkeypatch.setattr(layers, "_gained", deferred_norm)
        assert layers.error(name, table, 5) < 1e-5
        # Half of what the norm makes of x: only a product that shares its norm reads these squares.
        monkeypatch.setattr(
            layers, "_gained", lambda x: replace(deferred_norm(x), squares=4 * deferred_norm(x).squares)
        )
        assert (layers.error(name, table, 5) > 0.1) == (name in ("qkv", "gate_up"))


class FakeLayers:
    """Products that take what `us` says, LIBRARY_US where it says nothing; `wrong` plans compute nonsense."""

    def __init__(
        self, us: dict[tuple[str, GemmPlan], float], wrong: set[GemmPlan], broken: set[GemmPlan]
    ) -> None:
        self.us, self.wrong, self.broken = us, wrong, broken

    def products(self) -> dict[str, Product]:
        return {name: Product(BF16, n, k) for name, (n, k) in SHAPES.items()}

    def microseconds(self, table: Table, without: str | None = None) -> float:
        total = 5.0
        for name, product in self.products().items():
            plan = table.choose(16, product.n, product.k, product.dtype)
            if plan in self.broken:
                raise RuntimeError("out of shared memory")
            if name != without:
                total += LIBRARY_US if plan is None else self.us.get((name, plan), 30.0)
        return total

    def error(self, name: str, table: Table, rows: int) -> float:
        product = self.products()[name]
        return math.nan if table.choose(16, product.n, product.k, product.dtype) in self.wrong else 3e-3


def searched(
    us: dict[tuple[str, GemmPlan], float],
    known: Table | None = None,
    wrong: set[GemmPlan] = frozenset(),
    **plans: set[GemmPlan],
) -> dict[str, PlanEntry]:
    layers = FakeLayers(us, wrong, plans.get("broken", set()))
    names = {product: name for name, product in layers.products().items()}
    found = search._search_layer(layers, 16, known or Table(), lambda line: None, False)  # type: ignore[arg-type]
    return {names[one.product]: one.entry for one in found}


def plans_of(name: str) -> list[GemmPlan]:
    """Those that no product's rule names."""
    rules = {linear_plans.choose(16, n, k, BF16) for n, k in SHAPES.values()}
    return [plan for plan in candidates(Product(BF16, *SHAPES[name]), 16, False) if plan not in rules]


def test_the_fastest_plan_wins_with_its_own_and_the_librarys_time() -> None:
    slow, fast, *_ = plans_of("qkv")
    found = searched({("qkv", slow): 15.0, ("qkv", fast): 12.0})
    assert found["qkv"].plan == fast
    assert found["qkv"].us == pytest.approx(12.0)
    assert found["qkv"].library_us == pytest.approx(LIBRARY_US)
    assert found["down"].plan is None


def test_a_fast_plan_that_is_wrong_or_does_not_start_loses() -> None:
    wrong, broken, right, *_ = plans_of("o")
    us = {("o", wrong): 1.0, ("o", broken): 2.0, ("o", right): 9.0}
    assert searched(us, wrong={wrong}, broken={broken})["o"].plan == right


def test_the_rules_plan_stays_where_no_difference_can_be_told() -> None:
    n, k = SHAPES["down"]
    rule, other = linear_plans.choose(16, n, k, BF16), plans_of("down")[0]
    assert rule is not None
    assert searched({("down", rule): 10.05, ("down", other): 10.0})["down"].plan == rule
    assert searched({("down", rule): 11.0, ("down", other): 10.0})["down"].plan == other


def test_what_the_table_has_is_kept_and_not_measured_again() -> None:
    kept, faster, *_ = plans_of("qkv")
    known = Table().with_entry(Product(BF16, *SHAPES["qkv"]), 16, PlanEntry(kept, 14.0, 20.0))
    found = searched({("qkv", kept): 14.0, ("qkv", faster): 3.0}, known)
    assert set(found) == {"o", "gate_up", "down"}
