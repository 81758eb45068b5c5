"""Tests that the right kernel is chosen for a GEMM, from the table or, for shapes without an entry, by rules,
and that invalid tables are refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.shapes import SHAPES
from engine.families import read_config
from kernels import compiling
from kernels.triton import experts_plans, linear_plans, linear_table
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import ExpertsEntry, PlanEntry, Product, Table, TableError, read_table

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
ONE = GemmPlan("gemv", 1, 4, 2048, warps=8)
FEW = GemmPlan("dot", 16, 64, 128, warps=4, stages=6, split=2)
PRODUCT = Product(BF16, 4096, 4096)


@pytest.fixture
def table() -> Table:
    made = Table("NVIDIA H200", {"date": "2026-11-21"})
    for rows, plan in ((64, None), (1, ONE), (16, FEW)):
        made = made.with_entry(PRODUCT, rows, PlanEntry(plan, 8.6, 14.5))
    return made


def test_the_entry_with_the_fewest_sufficient_rows_is_used(table: Table) -> None:
    chosen = {rows: table.choose(rows, 4096, 4096, BF16) for rows in (1, 2, 16, 17, 64, 65, 8000)}
    assert chosen == {1: ONE, 2: FEW, 16: FEW, 17: None, 64: None, 65: None, 8000: None}
    assert linear_plans.choose(17, 4096, 4096, BF16) is not None


def test_rows_beyond_the_last_entry_follow_the_rules() -> None:
    table = Table().with_entry(PRODUCT, 1, PlanEntry(ONE, 8.6, 14.5))
    assert table.choose(2, 4096, 4096, BF16) == linear_plans.choose(2, 4096, 4096, BF16) is not None


def test_unknown_shapes_and_dtypes_follow_the_rules(table: Table) -> None:
    for rows, n, k, dtype in ((1, 4096, 2048, BF16), (8, 4096, 4096, FP8), (20, 6144, 4096, BF16)):
        assert table.choose(rows, n, k, dtype) == linear_plans.choose(rows, n, k, dtype) is not None
    assert Table().choose(1, 4096, 4096, BF16) == linear_plans.choose(1, 4096, 4096, BF16)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_the_rules_respect_a_gpus_shared_memory(capability: int) -> None:
    """On GPUs with less shared memory, plans have fewer stages. On Hopper, no plan is changed."""
    has = compiling.GpuModel.of("Voodoo 2", capability).shared_bytes
    table = linear_table.load_table("Voodoo 2", has)
    fewer = 0
    for rows, n, k, dtype in product(
        (2, 16, 17, 32, 64, 128), (256, 4096, 6144, 28672, 128256), (512, 4096, 14336), (BF16, FP8)
    ):
        plan, at_most = table.choose(rows, n, k, dtype), linear_plans.choose(rows, n, k, dtype)
        if plan is None or at_most is None:
            assert plan is at_most
            continue
        assert linear_plans.tile_bytes(plan, dtype.itemsize) < has - 1024
        assert replace(plan, stages=at_most.stages) == at_most and 2 <= plan.stages <= at_most.stages
        fewer += plan.stages < at_most.stages
    assert (fewer > 0) == (capability != 90)


def test_a_table_is_read_as_it_was_written(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = table.with_entry(PRODUCT, 32, PlanEntry(None, 8.6, 14.5, layer_us=123.4))
    path.write_text(table.to_json())
    assert read_table(path) == table
    assert sum('"us"' in line for line in path.read_text().splitlines()) == 4


def good() -> dict[str, Any]:
    numbers = {"rows": 16, "block_n": 64, "block_k": 128, "warps": 4, "stages": 6, "split": 2}
    return {"form": "dot", **numbers, "us": 10.5, "library_us": 13.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "spiral"}, "form is 'spiral'; expected one of gemv, stream, dot"),
        ({"block_k": 0}, "block_k is 0, not a positive integer"),
        ({"block_k": None}, "block_k is None, not a positive integer"),
        ({"warps": "4"}, "warps is '4', not a positive integer"),
        ({"block_n": 48}, "block_n is 48, not a power of two"),
        ({"rows": 8}, "rows is 8; the entry needs at least 16"),
        ({"block_k": 4096}, "block_k is 4096; k = 4096 is not a multiple of 8192"),
        ({"form": "gemv"}, "rows is 16; gemv requires 1"),
        ({"split": 32, "rows": 64}, "split is 32; its partial sums do not fit into the workspace"),
        ({"us": "fast"}, "us is 'fast', not a number"),
        ({"layer_us": None}, "layer_us is None, not a number"),
        ({"speed": 1}, "unknown field speed"),
    ],
)
def test_an_entry_that_no_kernel_can_run_is_reported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "table.json"
    entry = good() | change
    path.write_text(json.dumps({"gpu": "x", "products": {"bfloat16 8192x4096": {"16": entry}}}))
    with pytest.raises(TableError, match=r"table\.json: bfloat16 8192x4096: 16: ") as error:
        read_table(path)
    assert message in str(error.value)
    assert "python -m engine.tune" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "has no `products` object"),
        ('{"products": {"int8 4x4": {}}}', "'int8 4x4' is not a GEMM"),
        ('{"products": {"bfloat16 4096x4096": {"some": {}}}}', "an object whose keys are row counts"),
        ('{"products": {"bfloat16 4096x4096": {"1": 3}}}', "expected an object, not 3"),
    ],
)
def test_an_invalid_table_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"table\.json") as error:
        read_table(path)
    assert message in str(error.value)


LAYER = ExpertsShape(FP8, 128, 8, 2048, 768, 128)
GROUPED = ExpertsPlan("grouped", 16, 64, 256, warps=4, stages=3, programs=3)
DOT = ExpertsPlan("dot", 16, 64, 256, warps=4, stages=3)


def _with_experts() -> Table:
    table = Table("NVIDIA H200", {"date": "2026-11-26"})
    table = table.with_experts(LAYER, 64, ExpertsEntry(LayerPlans(GROUPED, GROUPED), 180.5, 193.0))
    return table.with_experts(LAYER, 8, ExpertsEntry(LayerPlans(DOT, DOT), 70.1, 77.0))


def test_the_plans_of_experts_come_from_the_entry_with_the_fewest_sufficient_tokens() -> None:
    table = _with_experts()
    chosen = {tokens: table.choose_experts(tokens, LAYER).up for tokens in (1, 8, 9, 64)}
    assert chosen == {1: DOT, 8: DOT, 9: GROUPED, 64: GROUPED}
    rules = experts_plans.choose(65, 8, 128, 2048, 768, FP8)
    assert table.choose_experts(65, LAYER) == rules
    assert table.choose_experts(8, replace(LAYER, held=32)) == experts_plans.choose(8, 8, 128, 2048, 768, FP8)


def test_the_plans_of_experts_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = _with_experts().with_experts(
        replace(LAYER, held=32), 8, ExpertsEntry(LayerPlans(DOT, DOT), 60.0, 61.0)
    )
    table = table.with_entry(PRODUCT, 1, PlanEntry(ONE, 8.6, 14.5))
    path = tmp_path / "table.json"
    path.write_text(table.to_json())
    assert read_table(path) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up": {"form": "dot"}}, "up: expected the fields form, rows, block_n"),
        ({"down": asdict(GROUPED)}, "only one of up and down is grouped"),
        ({"up": asdict(replace(DOT, rows=8))}, "rows is 8; the entry needs at least 16"),
        ({"up": asdict(replace(DOT, block_k=768))}, "block_k is 768, not a power of two"),
        ({"down": asdict(replace(DOT, block_k=512))}, "block_k is 512, which does not divide 768"),
        ({"up": asdict(replace(DOT, stages=12))}, "stages is 12 and programs is 1; this needs more than"),
        (
            {"up": asdict(replace(DOT, form="tiles"))},
            "form is 'tiles'; expected gemv, stream, dot or grouped",
        ),
        ({"us": "fast"}, "us is 'fast', not a number"),
        ({"ns": 1}, "expected an object with up, down, us and rules_us"),
    ],
    ids=str,
)
def test_an_entry_of_experts_that_no_kernel_can_run_is_reported(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    entry = {"up": asdict(DOT), "down": asdict(DOT), "us": 1, "rules_us": 2} | change
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"products": {}, "experts": {str(LAYER): {"16": entry}}}))
    with pytest.raises(TableError, match=f"{path}: {LAYER}: 16: .*{message}.*; recreate the table with"):
        read_table(path)


def test_an_experts_layer_with_an_unknown_name_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"products": {}, "experts": {"bfloat16 128": {}}}))
    with pytest.raises(TableError, match="'bfloat16 128' is not an MoE layer"):
        read_table(path)


def test_a_gpu_without_a_table_has_an_empty_one() -> None:
    assert linear_table.load_table("Voodoo 2") == Table("Voodoo 2")


@pytest.mark.parametrize("path", sorted(linear_table.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_valid(path: Path) -> None:
    table = read_table(path)
    assert linear_table.table_path(table.gpu) == path
    assert table.to_json() == path.read_text()


@pytest.mark.parametrize("shape", ["llama-3.1-8b"])
def test_the_h200_table_has_every_gemm_of_the_common_shapes(tmp_path: Path, shape: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    config, table = read_config(tmp_path), linear_table.load_table("NVIDIA H200")
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "qkv": (heads + 2 * kv_heads, config.hidden_size),
        "o": (config.hidden_size, heads),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "lm_head": (config.vocab_size, config.hidden_size),
    }
    for name, (n, k) in shapes.items():
        for dtype in (BF16,) if name == "lm_head" else (BF16, FP8):
            entries = table.products[Product(dtype, n, k)]
            assert {1, 8, 16, 32, 64, 128} <= set(entries), (name, dtype)
