"""Tests that the tuner finds all linears that a decoder runs, and that it compares the results of plans with
the reference implementation. Times can be measured only on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import read_served
from engine.tune.__main__ import main
from engine.tune.chain import HeadChain, LayerChain
from kernels import Residual, compiling
from kernels.cuda import CudaOps
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product, Table
from kernels.tune.search import table_of
from tests.engine.test_build import FAMILIES, SMALL, folder_of
from tests.kernels.test_compiling import compiled

GPU = compiling.GpuModel.of("NVIDIA A100-SXM4-80GB", 80)
PLAN = GemmPlan("dot", 16, 64, 64, 4, 3)
CPU, META = torch.device("cpu"), torch.device("meta")


def test_an_unusable_table_or_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    more = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    table = tmp_path / "table.json"
    table.write_text("[]")
    monkeypatch.setattr(sys, "argv", ["engine.tune", "--config", str(tmp_path), "--out", str(table)])
    monkeypatch.setattr(compiling, "_send_gpu", lambda sender: None)
    assert main() == 1
    assert "no usable NVIDIA GPU found: check nvidia-smi" in capsys.readouterr().err
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.GpuModel.of("NVIDIA H200", 90))
    assert main() == 1
    assert f"{table}: has no `products` object" in capsys.readouterr().err


def test_errors_that_would_end_a_search_are_reported_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.setattr(compiling, "this_gpu", lambda: compiling.GpuModel.of("NVIDIA H200", 90))
    monkeypatch.setattr(compiling, "record", lambda target, run: pytest.fail("the search began"))

    def said(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["engine.tune", "--config", str(tmp_path), *options])
        assert main() == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert said("--json", str(tmp_path)).startswith(f"--json is {tmp_path}, which cannot be written (Is a")
    assert said("--out", str(tmp_path)).startswith(f"--out is {tmp_path}, which cannot be written (Is a")
    assert said("--tensor-parallel", "0").endswith("tensor_parallel_size is 0; it must be at least 1")
    with pytest.raises(SystemExit) as ended:
        said("--rows", "8", "1000")
    assert ended.value.code == 2
    assert "--rows contains 1000; use numbers from 1 to 256" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[]")
    assert said() == f"{tmp_path}/config.json is not a JSON object; copy the file again"


def test_a_search_launches_nothing_that_was_not_compiled_and_writes_a_table() -> None:
    done = compiled("tests.engine.launches_of_tuning")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["late"] == [] and min(found["launched"]) > 40
    # A rank of several sums the embeddings, and the results of linears with and without the next norm.
    assert found["sums"] == [0, 0, 3]
    shapes = ("128256x4096", "28672x4096", "4096x14336", "4096x4096", "6144x4096")
    assert found["found"] == [[f"bfloat16 {shape}", rows] for shape in shapes for rows in (1, 8)]
    assert found["changed"] == [["bfloat16 28672x4096", 1], ["bfloat16 28672x4096", 8]]
    assert found["judged"] == 4 * 2 and found["kept_128"]
    assert "bfloat16 28672x4096: tiles 8 128 64 8 6 1" in found["printed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_linears_of_every_family_are_found_those_that_write_the_residual_first(
    tmp_path: Path, family: str
) -> None:
    served = replace(read_served(folder_of(tmp_path, family)), dtype="float32")
    config = served.config
    heads, kv_heads, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, 256
    shapes = [(hidden, heads), (hidden, 512), (heads + 2 * kv_heads, hidden), (1024, hidden)]
    with torch.inference_mode():
        layers = LayerChain(served, CPU, GPU)
        layers.set_rows(3)
        assert layers.products == list(dict.fromkeys(Product(torch.float32, n, k) for n, k in shapes))
        assert HeadChain(served, CPU, GPU).products == [Product(torch.float32, 1000, hidden)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")
def test_the_linears_of_layers_with_experts_are_found(tmp_path: Path) -> None:
    served = replace(read_served(folder_of(tmp_path, "qwen2_moe")), dtype="float32")
    with torch.inference_mode():
        layers = LayerChain(served, CPU, GPU)
        layers.set_rows(3)
    attention, dense, shared = [(256, 256), (512, 256)], [(256, 512), (1024, 256)], [(256, 384), (768, 256)]
    shapes = {*attention, *dense, *shared, (1, 256)}  # the last shape is the gate of the shared expert
    assert {*layers.products} == {Product(torch.float32, n, k) for n, k in shapes}


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")
def test_a_plan_is_compared_with_the_reference_and_shares_its_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    served = replace(read_served(folder_of(tmp_path, "qwen3", **shape)), dtype="float32")
    with torch.inference_mode():
        for chain in (LayerChain(served, CPU, GPU), HeadChain(served, CPU, GPU)):
            chain.set_rows(5)
            table = table_of(dict.fromkeys(chain.products, PLAN), 5)
            assert chain.error(table, 5) < 1e-5 and chain.error(table, 3) < 1e-5
            library = table_of(dict.fromkeys(chain.products), 5)
            with monkeypatch.context() as broken:
                broken.setattr(CudaOps, "_product", nonsense(CudaOps._product))
                assert chain.error(library, 5) > 0.05
        layers = LayerChain(served, CPU, GPU)
        layers.set_rows(5)
        add = CudaOps.linear_add

        def add_with_wrong_squares(*arguments: Any) -> Residual:
            made = add(*arguments)
            deferred = made.deferred_norm and replace(
                made.deferred_norm, squares=4 * made.deferred_norm.squares
            )
            return Residual(made.values, deferred)

        # The residual is correct, but half of the deferred norm, which the next linear reads, is wrong.
        monkeypatch.setattr(CudaOps, "linear_add", add_with_wrong_squares)
        assert layers.error(table_of(dict.fromkeys(layers.products), 5), 5) < 1e-5
        assert layers.error(table_of(dict.fromkeys(layers.products, PLAN), 5), 5) > 0.1


def nonsense(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an operation so that its results become 10% too large."""
    return lambda *arguments, **options: product(*arguments, **options).mul_(1.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")
def test_operations_of_a_linear_can_be_left_out_of_a_chain(tmp_path: Path) -> None:
    served = replace(read_served(folder_of(tmp_path, "mistral", num_key_value_heads=4)), dtype="float32")
    with torch.inference_mode():
        chain = LayerChain(served, CPU, GPU)
        chain.set_rows(2)
        for product in chain.products:
            chain.use(Table(), product)
            chain._ops.backend.asked.clear()
            assert chain.run().shape == (2, 256)
            assert set(chain._ops.backend.asked) == {*chain.products} - {product}


@pytest.mark.parametrize("attention", [False, True])
def test_every_copy_of_a_layer_has_weights_of_its_own(tmp_path: Path, attention: bool) -> None:
    served = read_served(folder_of(tmp_path, "qwen2"))
    chain = LayerChain(served, META, GPU, 640 if attention else None)
    weights = [layer.attention.qkv.weight for layer in chain._layers]
    # The model has two kinds of layers, and two layers of each kind are timed.
    assert len(weights) == len({id(weight) for weight in weights}) == 2 * 2
    assert [layer.attention.window for layer in chain._layers] == [None, 100, None, 100]
