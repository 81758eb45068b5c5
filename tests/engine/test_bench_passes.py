"""Tests of the variants that `engine.bench.passes` compares. No GPU is needed, because calls are only
recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench import passes
from engine.bench.shapes import write_config
from engine.families import read_config
from engine.launch_enumeration import UnconnectedRanks, _MetaMemory
from engine.model.decoder import Decoder
from engine.peer_ranks import PeerRanks
from kernels import Residual
from kernels.cuda import CudaOps
from kernels.triton import all_reduce

ROWS = {"one-shot": 1, "two-shot": 512}
"""For each kind of all-reduce, a row count for which that kind is the default."""


@pytest.fixture
def summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[tuple[str, bool]]]:
    """Return a function that lists the collectives that a variant uses to sum one message. Each entry is the
    collective's name and whether it uses PDL."""
    calls: list[tuple[str, bool]] = []

    def add(*tensors: Any, two_shot: bool, pdl: bool, **options: Any) -> None:
        calls.append(("two-shot" if two_shot else "one-shot", pdl))

    class Group(UnconnectedRanks):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            calls.append(("group", False))
            return tensor

    monkeypatch.setattr(all_reduce, "all_reduce_add", add)
    config = read_config(write_config("llama-3.1-8b", tmp_path)).with_layers([0])
    ranks = PeerRanks(Group(2, 0), _MetaMemory(2, 0), pdl=True)
    bench = object.__new__(passes._Bench)
    bench._ranks = ranks
    bench._layers = bench._halves = None
    bench._decoder = Decoder(config, ranks, CudaOps(pdl=True), torch.bfloat16, torch.device("meta"))

    def run(variant: str, rows: int) -> list[tuple[str, bool]]:
        calls.clear()
        part = torch.empty((rows, 8192), dtype=torch.bfloat16, device="meta")
        with bench._variant(variant) as decoder:
            assert isinstance(decoder.ops, CudaOps)
            decoder.ranks.add_sum(Residual(part), part, None)
            assert decoder.ops.pdl == (variant != "no PDL")
        return list(calls)

    return run


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_a_variant_lasts_as_long_as_its_context(
    rows: int, summed: Callable[[str, int], list[tuple[str, bool]]]
) -> None:
    default = next(name for name, count in ROWS.items() if count == rows)
    expected = {
        "no PDL": [(default, False)],
        "one-shot": [("one-shot", True)],
        "two-shot": [("two-shot", True)],
        "group": [("group", False)],
        "alone": [],
    }
    for variant in passes.VARIANTS:
        assert summed(variant, rows) == expected.get(variant, [(default, True)]), variant
        assert summed("default", rows) == [(default, True)]


def test_too_few_gpus_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["passes", "--gpus", "4"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert passes.main() == 1
    assert "--gpus is 4, but this machine has 2" in capsys.readouterr().err
