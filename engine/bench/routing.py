"""Counts the distinct experts chosen in a workload's decode steps. The benchmark's limits assume that every
expert is equally likely to be chosen (`engine.ceilings.expected_experts`). The counts show whether this holds
for a model with random weights."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine.bench.workloads import EngineWorkload, run
from engine.ceilings import expected_experts
from engine.forward import ForwardInput
from engine.generate import LocalEngine
from engine.model.decoder import Decoder
from engine.model.experts import Mixture
from kernels import ExpertActivation

_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 17
"""Prompt and output length, in tokens, of the sequences used to count experts."""


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """The mean number of distinct experts per layer chosen in a decode step."""

    counted: float
    expected: float
    """Expected number of distinct experts if all experts are equally likely to be chosen."""
    experts: int
    """Number of experts per layer."""

    def line(self) -> str:
        return (
            f"{'':14}  distinct experts chosen per layer in a decode step: {self.counted:.1f} of "
            f"{self.experts}, {self.expected:.1f} expected for a uniform choice"
        )


def count_experts(engine: LocalEngine, workload: EngineWorkload) -> DistinctExperts | None:
    """Count the distinct experts chosen in decode steps of short sequences, as many as the workload decodes
    concurrently. Returns None if the model has no experts, or if no step decodes all sequences. Also returns
    None if there are several ranks, because this rank counts without CUDA graphs, while the other ranks would
    still replay theirs."""
    experts = engine.runner.config.experts
    if experts is None or workload.output_tokens == 1 or engine.info.tensor_parallel_size > 1:
        return None
    tokens = 1 if workload.one_at_a_time else min(workload.requests, engine.runner.spec.max_num_seqs)
    few = replace(
        workload,
        requests=tokens,
        prompt_tokens=min(workload.prompt_tokens, _PROMPT_TOKENS),
        output_tokens=min(workload.output_tokens, _OUTPUT_TOKENS),
    )
    steps = engine.runner.steps
    graphs, steps.graphs = steps.graphs, None
    try:
        with _watched(steps.decoder, tokens) as counts:
            run(engine, few, seed=-2)
    finally:
        steps.graphs = graphs
    if not counts:
        return None
    return DistinctExperts(statistics.fmean(counts), expected_experts(experts, tokens), experts.count)


@contextmanager
def _watched(decoder: Decoder, tokens: int) -> Iterator[list[int]]:
    """Count the distinct experts chosen per layer in decode steps of `tokens` tokens while the `with` body
    runs."""
    watch = _Watch(tokens)
    forward = decoder.forward

    def watched(inputs: ForwardInput, kv: Any) -> Any:
        attention = inputs.attention
        # A step may have more slots than tokens because of padding.
        watch.decoding = not attention.chunks and attention.tiles is None and len(attention.slots) >= tokens
        return forward(inputs, kv)

    mixtures = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Mixture)]
    operations = [mixture.ops for mixture in mixtures]
    decoder.forward = watched  # type: ignore[method-assign]
    for mixture in mixtures:
        mixture.ops = _WatchedOps(mixture.ops, watch)
    try:
        yield watch.counts
    finally:
        del decoder.forward
        for mixture, ops in zip(mixtures, operations, strict=True):
            mixture.ops = ops


class _Watch:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.decoding = False
        """Whether the current pass is a decode-only step that includes all sequences."""
        self.counts: list[int] = []


class _WatchedOps:
    """Forwards every operation to `ops` and counts the chosen experts."""

    def __init__(self, ops: Any, watch: _Watch) -> None:
        self._ops = ops
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def norm_experts(self, *arguments: Any) -> ExpertActivation:
        result: ExpertActivation = self._ops.norm_experts(*arguments)
        if self._watch.decoding:
            self._watch.counts.append(result.chosen[: self._watch.tokens].unique().numel())
        return result
