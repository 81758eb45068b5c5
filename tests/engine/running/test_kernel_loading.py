"""Every product is asked for before requests come, at numbers of rows that are close together."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernel_loading import load_attention, load_products
from engine.parallel import single
from engine.runner import Runner
from engine.sizing import product_ladder
from kernels import AttentionInput, Residual
from tests.engine.running.test_runner import folder, quiet, spec_of

__all__ = ["folder"]


@pytest.mark.parametrize(("most", "rows"), [(1, [1]), (8, [8]), (20, [8, 16, 20])])
def test_few_rows_are_asked_for_in_steps_of_eight(most: int, rows: list[int]) -> None:
    assert product_ladder(most) == rows


def test_many_rows_are_asked_for_in_steps_of_an_eighth_at_most() -> None:
    rows = product_ladder(8192)
    assert rows[-1] == 8192
    assert set(range(8, 513, 8)) <= set(rows)
    assert all(0 < after - before <= before / 8 for before, after in pairwise(rows) if before >= 512)


def test_every_product_is_run_for_every_number_of_rows(folder: Path) -> None:
    runner = Runner(spec_of(folder), single(), quiet)
    weights: dict[int, list[int]] = defaultdict(list)

    class Noting:
        """Notes the rows that meet each weight."""

        def __getattr__(self, name: str) -> Any:
            def noted(x: torch.Tensor | Residual, *others: Any, **options: Any) -> Any:
                matrix = next(one for one in others if isinstance(one, torch.Tensor) and one.dim() == 2)
                weights[id(matrix)].append(len(x.values if isinstance(x, Residual) else x))
                return original(x, *others, **options)

            original = getattr(ops, name)
            return noted

    decoder = runner.decoder
    ops, noting = decoder.ops, Noting()
    layer = decoder.layers[0]
    owners: list[Any] = [decoder, layer.mlp, layer.mlp.down, layer.attention.qkv, layer.attention.o]
    for owner in owners:
        owner.ops = noting
    load_products(decoder, 96, 20)
    products = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    for product in products:
        # The most first: it makes room for all others. Ends of prompts pad to the ladder of the rows.
        assert weights.pop(id(product.weight)) == sorted({1, 2, 4, *product_ladder(96), 20}, reverse=True)
    # As many as are scored at once.
    assert weights == {id(decoder.head): sorted({1, 2, 4, *product_ladder(128)}, reverse=True)}
    runner.close()


def test_attention_is_run_for_every_number_of_rows_of_padding_alone(folder: Path) -> None:
    runner = Runner(spec_of(folder), single(), quiet)
    decoder, asked = runner.decoder, list[tuple[int, bool]]()

    class Noting:
        def plan_attention(self, inputs: AttentionInput) -> AttentionInput:
            return inputs

        def attend(
            self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *rest: Any
        ) -> torch.Tensor:
            _, pool, heads, plan, *_ = rest
            assert pool is runner.steps.kv[-1] and (slots == -1).all() and not plan.lens.any()
            assert len(qkv) == len(positions) == len(slots) == len(plan.slots)
            assert plan.queries is None or len(plan.queries) == len(qkv)
            asked.append((len(qkv), plan.queries is not None))
            return qkv[:, : heads * decoder.config.head_dim]

    decoder.ops = Noting()  # type: ignore[assignment]
    for layer in decoder.layers:
        layer.attention.ops = decoder.ops
    load_attention(decoder, runner.steps.kv, runner.steps.tables.block_table, 20)
    assert sorted(asked) == [(rows, ends) for rows in (1, 2, 4, 8, 16, 20) for ends in (False, True)]
    runner.close()
