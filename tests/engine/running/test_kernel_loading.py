"""Every product is asked for before requests come, at numbers of rows that are close together."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernel_loading import load_products, product_rows
from engine.parallel import single
from engine.runner import Runner
from kernels import Stream
from tests.engine.running.test_runner import folder, quiet, spec_of

__all__ = ["folder"]


@pytest.mark.parametrize(("most", "rows"), [(1, [1]), (8, [8]), (20, [20, 16, 8])])
def test_few_rows_are_asked_for_in_steps_of_eight(most: int, rows: list[int]) -> None:
    assert product_rows(most) == rows


def test_many_rows_are_asked_for_in_steps_of_an_eighth_at_most() -> None:
    rows = product_rows(8192)
    assert rows[0] == 8192 and rows == sorted(rows, reverse=True), "the first makes room for all"
    rows.reverse()
    assert set(range(8, 513, 8)) <= set(rows)
    assert all(0 < after - before <= before / 8 for before, after in pairwise(rows) if before >= 512)


def test_every_product_is_run_for_every_number_of_rows(folder: Path) -> None:
    runner = Runner(spec_of(folder), single(), quiet)
    weights: dict[int, list[int]] = defaultdict(list)

    class Noting:
        """Notes the rows that meet each weight."""

        def __getattr__(self, name: str) -> Any:
            def noted(x: torch.Tensor | Stream, *others: Any, **options: Any) -> Any:
                matrix = next(one for one in others if isinstance(one, torch.Tensor) and one.dim() == 2)
                weights[id(matrix)].append(len(x.values if isinstance(x, Stream) else x))
                return original(x, *others, **options)

            original = getattr(ops, name)
            return noted

    decoder = runner.decoder
    ops, noting = decoder.ops, Noting()
    layer = decoder.layers[0]
    owners: list[Any] = [decoder, layer.mlp, layer.mlp.down, layer.attention.qkv, layer.attention.o]
    for owner in owners:
        owner.ops = noting
    load_products(decoder, 96, 8)
    products = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    for product in products:
        assert weights.pop(id(product.weight)) == product_rows(96)
    assert weights == {id(decoder.head): product_rows(8)}
    runner.close()
