"""Splits the tokens of a long pass into two halves. While one half's results are summed over the ranks, the
device computes the other half. Tokens in the second half attend to keys and values from the first half, so
every layer computes the first half before the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model.layers import Addition, Layer, LayerInput, LayerRun
from engine.parallel import Overlap
from kernels import AttentionInput, ChunkSpan, KvPool, Residual

LayerCall = tuple[Layer, KvPool, torch.Tensor | None]
"""A layer, its KV pool, and the gain of the norm applied to the layer's result."""


def split_attention(inputs: AttentionInput, at: int) -> tuple[AttentionInput, AttentionInput]:
    """Split a pass's attention inputs at token index `at` and return both parts. All decodes must be in the
    first part."""
    before, after = [], []
    for chunk in inputs.chunks:
        head = min(max(at - chunk.first, 0), chunk.count)
        if head:
            before.append(replace(chunk, count=head))
        if head < chunk.count:
            rest = chunk.count - head
            after.append(ChunkSpan(chunk.first + head - at, rest, chunk.context + head, chunk.slot))
    empty = inputs.slots[:0]
    return (
        replace(inputs, chunks=before),
        replace(inputs, slots=empty, lens=empty, columns=0, chunks=after),
    )


def run_in_halves(
    layers: Sequence[LayerCall], residual: Residual, halves: tuple[LayerInput, LayerInput], overlap: Overlap
) -> Residual:
    """Run consecutive layers over a pass in two halves, the first of which has `overlap.split` tokens.
    Returns the residual of all tokens."""
    values = residual.values.split((overlap.split, len(residual.values) - overlap.split))
    runs = [_through(layers, Residual(part), inputs) for part, inputs in zip(values, halves, strict=True)]
    results: list[torch.Tensor] = []
    for half, run in enumerate(runs):
        _start(half, next(run), overlap)
    while len(results) < len(runs):
        for half, run in enumerate(runs):
            try:
                addition = run.send(overlap.finish(half))
            except StopIteration as end:
                results.append(end.value.values)
            else:
                _start(half, addition, overlap)
    return Residual(torch.cat(results))


def _start(half: int, addition: Addition, overlap: Overlap) -> None:
    residual = addition.residual
    part = addition.linear(addition.x, overlap.part(half, len(residual.values)))
    overlap.start(half, residual, part)


def _through(layers: Sequence[LayerCall], residual: Residual, inputs: LayerInput) -> LayerRun:
    for layer, pool, next_gain in layers:
        residual = yield from layer.run(residual, inputs, pool, next_gain)
    return residual
