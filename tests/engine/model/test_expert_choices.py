"""Tests that the engine counts how many tokens choose each expert of each layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import steps
from engine.expert_use import expert_use
from engine.families import read_config
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.parallel import Ranks
from engine.progress import no_progress
from engine.rank_messages import LayerExperts
from kernels import Residual, select_backend
from tests.engine.running.thread_ranks import on_ranks

from .checkpoints import QWEN2_EXPERTS, Case, make, oracle
from .driver import Driver, Sequence

MIXTURE = Case("mixture", "qwen2_moe", {**QWEN2_EXPERTS, "mlp_only_layers": [1]})
TOKENS = torch.randint(3, 157, (100,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "EXPERT_CHOICES_S", 0.0)


def _engine(folder: Path) -> LocalEngine:
    return LocalEngine(
        ReplicaSpec(
            replica="m-0",
            model_path=str(folder),
            device="cpu",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            kv_blocks=16,
            prefix_cache=False,
            threads=1,
        )
    )


def test_the_choices_of_a_prompt_are_those_of_transformers(tmp_path: Path) -> None:
    """The prompt is computed in two chunks. In the last layer, only the last token of each chunk is
    computed."""
    engine = _engine(make(MIXTURE, tmp_path))
    assert engine.core.gauges().expert_layers == ()
    engine.generate([TOKENS], SamplingParams(max_tokens=1))
    found = engine.runner.decoder.expert_choices()
    gauges = engine.core.gauges()
    engine.close()
    assert found is not None and found.layers == [0, 2]
    with torch.no_grad():
        logits = oracle(tmp_path)(torch.tensor([TOKENS]), output_router_logits=True).router_logits
    chosen = logits[0].topk(2).indices
    assert found.counts[0].tolist() == chosen.flatten().bincount(minlength=8).tolist()
    assert found.counts[1].sum() == 2 * 2
    assert gauges.expert_layers == expert_use(dict(zip([0, 2], found.counts.tolist(), strict=True)))


def test_each_decode_is_counted_once(tmp_path: Path) -> None:
    engine = _engine(make(MIXTURE, tmp_path))
    engine.generate([TOKENS[:10], TOKENS[:7]], SamplingParams(max_tokens=6))
    first, last = engine.core.gauges().expert_layers
    engine.close()
    # The last sampled token is never an input of a pass, so it chooses no experts.
    assert first.choices == 2 * (10 + 5 + 7 + 5)
    assert last.choices == 2 * (1 + 5 + 1 + 5)


def test_padding_is_not_counted(tmp_path: Path) -> None:
    engine = _engine(make(MIXTURE, tmp_path))
    layer = engine.runner.decoder.layers[0]
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        live = torch.tensor([70, 0, -1, 5, -1, -1])
        activated = layer.mlp.activate(Residual(rows), layer.post_norm, layer.eps, live)
        expected = activated.routed.chosen[[0, 1, 3]].flatten().bincount(minlength=8)
        assert torch.equal(layer.mlp.choices, expected)
        engine.runner.decoder.reset_expert_choices()
        assert not layer.mlp.choices.any()
    engine.close()


def test_every_rank_counts_all_choices(tmp_path: Path) -> None:
    folder = make(MIXTURE, tmp_path)
    config = read_config(folder)

    def choices(ranks: Ranks) -> int:
        cpu = torch.device("cpu")
        decoder = Decoder(config, ranks, select_backend("cpu"), torch.float32, cpu)
        load(decoder, folder, no_progress)
        Driver(decoder, blocks=2).run([], [(Sequence(), TOKENS[:9])])
        found = decoder.expert_choices()
        assert found is not None
        return int(found.counts.sum())

    assert on_ranks(2, choices) == [2 * 2 * 9] * 2


def test_the_busiest_and_the_unused_experts_of_a_layer_are_summarised() -> None:
    assert expert_use({0: [0, 6, 0, 2], 3: [0, 0, 0, 0]}) == (
        LayerExperts(layer=0, experts=4, choices=8, busiest=1, busiest_choices=6, unused=2),
        LayerExperts(layer=3, experts=4, choices=0, busiest=0, busiest_choices=0, unused=4),
    )
    assert [use.imbalance for use in expert_use({0: [0, 6, 0, 2], 3: [0, 0, 0, 0]})] == [3.0, 0.0]
