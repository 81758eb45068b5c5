"""Tests that warm-up runs every linear and every attention operation with enough different row counts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device_tables import Padding
from engine.families import read_config
from engine.parallel import single
from engine.runner import ModelRunner
from engine.sizing import gemm_sizes
from engine.warmup import run_padded_passes
from kernels import AttentionInput, Residual
from tests.engine.running.tiny_model import quiet, spec_of


@pytest.mark.parametrize(("most", "rows"), [(1, [1]), (8, [8]), (20, [8, 16, 20])])
def test_few_rows_are_padded_in_steps_of_eight(most: int, rows: list[int]) -> None:
    assert gemm_sizes(most) == rows


def test_many_rows_are_padded_in_steps_of_an_eighth_at_most() -> None:
    rows = gemm_sizes(8192)
    assert rows[-1] == 8192
    assert set(range(8, 513, 8)) <= set(rows)
    assert all(0 < after - before <= before / 8 for before, after in pairwise(rows) if before >= 512)


class RecordingOps:
    """Forwards every operation to another backend, and records the row counts of each linear and of each
    attention operation."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.rows: dict[int, list[int]] = defaultdict(list)
        """Row counts, keyed by the id of the weight."""
        self.attended: list[tuple[int, int, bool]] = []
        """For each attention operation: the number of tokens in the pass, the number of rows in the result,
        and whether the pass has chunks."""

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def recorded(x: torch.Tensor | Residual, *others: Any, **options: Any) -> Any:
            weights = [one for one in others if isinstance(one, torch.Tensor) and one.dim() == 2]
            if weights and name != "embedding":
                self.rows[id(weights[0])].append(len(x.values if isinstance(x, Residual) else x))
            return operation(x, *others, **options)

        return recorded

    def plan_attention(self, inputs: AttentionInput) -> AttentionInput:
        return inputs

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *rest: Any) -> Any:
        _, pool, heads, plan, *_ = rest
        assert (slots == -1).all() and not plan.lens.any()
        assert len(qkv) == len(positions) == len(slots)
        assert all(chunk.end <= plan.block_table.shape[1] * 64 for chunk in plan.chunks)
        rows = len(qkv) if plan.queries is None else len(plan.queries)
        self.attended.append((len(qkv), rows, bool(plan.chunks)))
        return qkv[:rows, : heads * pool.keys.shape[3]]


def test_every_linear_and_every_attention_is_run_for_every_number_of_rows(folder: Path) -> None:
    runner = ModelRunner(spec_of(folder, max_num_seqs=20, max_num_batched_tokens=96), single(), quiet)
    decoder = runner.decoder
    ops: Any = RecordingOps(decoder.ops)
    first, last = decoder.layers[0], decoder.layers[-1]
    owners: list[Any] = [decoder]
    for layer in decoder.layers:
        owners += [layer.attention, layer.mlp, layer.attention.qkv, layer.attention.o, layer.mlp.down]
    for owner in owners:
        owner.ops = ops
    sizes = Padding(gemm_sizes(96), gemm_sizes(20))
    run_padded_passes(runner.steps, sizes)
    few = {1, 2, 4, *sizes.results}
    for linear in (first.attention.qkv, first.attention.o, first.mlp.gate_up, first.mlp.down):
        assert set(ops.rows[id(linear.weight)]) == {*few, *sizes.tokens}
    # In passes with prompts, the last layer computes only a few rows.
    for linear in (last.attention.o, last.mlp.gate_up, last.mlp.down):
        assert set(ops.rows[id(linear.weight)]) == few
    # The largest size is the maximum number of prompt tokens that are scored in one pass. It runs first, so
    # that the memory allocated for it suffices for all later passes.
    logits = ops.rows[id(decoder.head)]
    assert logits == sorted({*few, *gemm_sizes(128)}, reverse=True)
    passes = set(ops.attended)
    assert {(rows, rows, False) for rows in few} <= passes
    assert {tokens for tokens, _, chunks in passes if chunks} == set(sizes.tokens)
    assert {rows for tokens, rows, chunks in passes if not chunks} == few
    runner.close()


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("A", [0]),
        ("AA", [0, 1]),
        ("AAAAAA", [4, 5]),
        ("ABABAB", [0, 3, 4, 5]),
        ("AABBBB", [0, 1, 2, 4, 5]),
        ("ABBBBB", [0, 1, 4, 5]),
        ("BAAAAB", [0, 1, 3, 4, 5]),
    ],
)
def test_a_few_layers_have_every_pair_of_neighbouring_kinds_and_end_as_all_layers_do(
    folder: Path, kinds: str, chosen: list[int]
) -> None:
    config = replace(
        read_config(folder),
        layers=len(kinds),
        layer_kinds=tuple(kinds),
        sliding_windows=(None,) * len(kinds),
    )
    assert config.representative_layers() == chosen
    few = config.with_layers(chosen)
    assert set(pairwise(few.layer_kinds)) >= set(pairwise(kinds))
    assert (few.layer_kinds[0], few.layer_kinds[-1]) == (kinds[0], kinds[-1])
