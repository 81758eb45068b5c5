"""Prints, as JSON, the kernels that the commands for compiling, loading and tuning find: first in the
unchanged product, and then with an additional kind of layer, which has a separate operation and kernel. Runs
in a separate process, like `tests.engine.launches_of_serving`: `python -m tests.engine.toy_layer FOLDER`.

The new kind is added as a developer would add it: with one class (`ToyLayer`), one operation (`gated_add`),
and the kind's name in the family. These commands need no other change.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import triton
import triton.language as tl

from engine import build, families, kernel_build
from engine.config import ModelConfig, Shard
from engine.launch_enumeration import MetaReplica
from engine.model.kinds import LAYER_KINDS
from engine.model.layers import (
    Layer,
    LayerInput,
    LayerRun,
    Linear,
    ParameterFactory,
    WeightShard,
)
from engine.replica_model import ReplicaModel
from kernels import KvPool, Residual, compiling, reference
from kernels.cuda import CudaOps
from kernels.triton.linear_table import Table, read_table
from tests.engine import launches_of_tuning

GPU = compiling.GpuModel.of("any", 90)
SEQUENCES, MAX_NUM_BATCHED_TOKENS = 8, 64


# ── the additions to the product ─────────────────────────────────────────────────────────────────────


class ToyLayer(Layer):
    """A dense layer followed by a gate. A linear computes a gate value for each element of the residual, and
    the element is multiplied by 1 + sigmoid(gate value)."""

    def __init__(self, config: ModelConfig, shard: Shard, factory: ParameterFactory, index: int) -> None:
        super().__init__(config, shard, factory, index)
        self.ops = factory.ops
        self.gate_norm = factory.empty(config.hidden_size)
        self.gate = Linear(factory, config.hidden_size, config.hidden_size, bias=False)

    def run(
        self, residual: Residual, inputs: LayerInput, kv: KvPool, next_gain: torch.Tensor | None
    ) -> LayerRun:
        residual = yield from super().run(residual, inputs, kv, self.gate_norm)
        return self.ops.gated_add(residual, self.gate_norm, self.eps, self.gate.weight)  # type: ignore[attr-defined]

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        hidden = len(self.gate_norm)
        return [
            *super().weight_shards(prefix),
            WeightShard(f"{prefix}.gate_norm.weight", (hidden,), self.gate_norm),
            *self.gate.output_shards(f"{prefix}.gate_proj", hidden, 0, 0, hidden),
        ]


@triton.jit
def _toy_gate(x, gate, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scale = tl.sigmoid(tl.load(gate + at, mask=inside).to(tl.float32))
    value = tl.load(x + at, mask=inside).to(tl.float32)
    tl.store(x + at, value * (1 + scale), mask=inside)


def gated_add(self: CudaOps, x: Residual, gain: torch.Tensor, eps: float, weight: torch.Tensor) -> Residual:
    gate = self._norm_product(x, gain, eps, weight)
    _toy_gate[(triton.cdiv(gate.numel(), 256),)](x.values, gate, gate.numel(), BLOCK=256)
    return Residual(x.values)


def reference_gated_add(x: Residual, gain: torch.Tensor, eps: float, weight: torch.Tensor) -> Residual:
    gate = reference.norm_linear(x, gain, eps, weight, None)
    return Residual(x.values + x.values * gate.sigmoid())


# ── the commands ─────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    folder = Path(sys.argv[1])
    without = found(folder, folder / "without")
    with added():
        print(json.dumps({"without": without, "with": found(folder, folder / "with")}))


@contextlib.contextmanager
def added() -> Iterator[None]:
    """Add the new kind of layer to the product while the block runs, and use it for every Llama layer."""
    family = replace(families._FAMILIES["llama"], layer_kinds=lambda fields, layers: ("toy",) * layers)
    with (
        mock.patch.object(CudaOps, "gated_add", gated_add, create=True),
        mock.patch.object(reference, "gated_add", reference_gated_add, create=True),
        mock.patch.dict(LAYER_KINDS, toy=ToyLayer),
        mock.patch.dict(families._FAMILIES, llama=family),
    ):
        yield


def found(folder: Path, out: Path) -> dict[str, list[str]]:
    """Run the three commands, which write their results into `out`."""
    out.mkdir()
    return {"built": built(folder, out), "loaded": loaded(folder), "tuned": tuned(folder, out)}


def replica_model(folder: Path) -> ReplicaModel:
    """Return the replica's model with few slots and small steps. It has the same kinds of layers as with
    larger steps."""
    return build.read_served(folder, max_num_seqs=SEQUENCES, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)


def built(folder: Path, out: Path) -> list[str]:
    """Run `python -m engine.build`, and return the names of the kernels that it compiles."""
    found: list[compiling.CompileJob] = []

    def compile_jobs(target: object, jobs: list[compiling.CompileJob], processes: int) -> list[object]:
        found.extend(jobs)
        return []

    options = [
        "--config",
        str(folder),
        "--gpu",
        "any",
        "--capability",
        "90",
        "--cache",
        str(out / "cache"),
        "--max-num-seqs",
        str(SEQUENCES),
        "--max-num-batched-tokens",
        str(MAX_NUM_BATCHED_TOKENS),
    ]
    with (
        mock.patch.object(compiling, "compile_jobs", compile_jobs),
        mock.patch.object(sys, "argv", ["engine.build", *options]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert build.main() == 0
    assert kernel_build.is_built(replica_model(folder), GPU)
    return sorted({job.name.split(".")[-1] for job in found})


def loaded(folder: Path) -> list[str]:
    """Run warm-up, and return the names of the kernels that it launches."""
    replica = MetaReplica(replica_model(folder), 0, GPU, Table())
    with torch.inference_mode():
        jobs = compiling.record(GPU.target, replica.launch_warm_up)
    return sorted({job.name.split(".")[-1] for job in jobs})


def tuned(folder: Path, out: Path) -> list[str]:
    """Run `python -m engine.tune`, and return the linears in the table that it writes."""
    table = out / "table.json"
    launches_of_tuning.run("--config", str(folder), "--rows", "8", "--out", str(table))
    return sorted(str(product) for product in read_table(table).products)


if __name__ == "__main__":
    main()
