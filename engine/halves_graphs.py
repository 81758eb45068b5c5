"""Runs long passes in two halves by replaying CUDA graphs. On several GPUs, the host takes longer to launch a
pass of several thousand tokens kernel by kernel than the devices take to compute it. Everything except
attention and the sums over the ranks is captured, separately for each layer and half, so the graphs can be
replayed for any mix of prompts and decodes. As in `engine.model.halves`, one half's results are summed over
the ranks while the other half is computed. The graphs read and write buffers that are allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.layer_graphs import captured, first_of_each_kind
from engine.model.decoder import Decoder
from engine.model.layers import Layer, LayerInput
from engine.peer_overlap import HALVES, PeerOverlap
from engine.progress import ProgressCallback
from engine.rank_messages import Progress
from engine.sizing import overlap_split
from kernels import KvPool, Residual


@dataclass(frozen=True, slots=True)
class _LayerGraphs:
    """The CUDA graphs for one layer in one half of a pass."""

    qkv: torch.cuda.CUDAGraph
    o: torch.cuda.CUDAGraph
    mlp: torch.cuda.CUDAGraph


class HalvesGraphs:
    """One rank's CUDA graphs for long passes. `sizes` lists the captured token counts. The last layer is not
    included, because it computes only some rows. Call `capture` once, then `run` for each pass that `fits`
    accepts. `decoder` must have several layers.
    """

    def __init__(self, decoder: Decoder, overlap: PeerOverlap, sizes: Sequence[int]) -> None:
        self._layers = decoder.layers[:-1]
        self._overlap = overlap
        self._sizes = sizes
        self._graphs: dict[int, list[list[_LayerGraphs]]] = {}
        """For each captured number of tokens, the graphs for each half and layer."""
        shard, rows = decoder.shard, overlap_split(max(sizes))
        width = decoder.config.head_dim
        made: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        self._qkv = torch.empty((HALVES, rows, (shard.heads + 2 * shard.kv_heads) * width), **made)
        # Zero-filled, because padding rows are read before anything is written to them.
        self._attended = torch.zeros((HALVES, rows, shard.heads * width), **made)
        # Expert choices are not counted for padding rows, and all rows are padding until `run` is called.
        self._live = torch.full((HALVES, rows), -1, dtype=torch.int64, device=decoder.device)

    def capture(self, progress: ProgressCallback) -> None:
        """Capture the graphs for all sizes, largest first."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(sorted(self._sizes, reverse=True)):
                progress(Progress("warm up", done, len(self._sizes), "graphs", "long passes"))
                self._capture_size(size, pool)
        torch.cuda.current_stream().wait_stream(stream)

    def fits(self, tokens: int) -> bool:
        return tokens in self._graphs

    def run(
        self, residual: Residual, halves: tuple[LayerInput, LayerInput], kv: Sequence[KvPool]
    ) -> Residual:
        """Run all layers except the last. `residual` and `halves` are the arguments of
        `engine.model.halves.run_in_halves`. Returns the residual of all tokens."""
        overlap, tokens = self._overlap, len(residual.values)
        graphs, sizes = self._graphs[tokens], _halves(tokens)
        for half, values in enumerate(residual.values.split(sizes)):
            overlap.begin(half, values)
            self._live[half, : len(values)].copy_(halves[half].kv_slots)
        for index, (layer, pool) in enumerate(zip(self._layers, kv, strict=False)):
            for half, rows in enumerate(sizes):
                if index:
                    overlap.finish(half)
                graphs[half][index].qkv.replay()
                attended = self._attended[half, :rows]
                layer.attention(self._qkv[half, :rows], halves[half], pool, attended)
                graphs[half][index].o.replay()
                overlap.start_sum(half, rows)
            for half, rows in enumerate(sizes):
                overlap.finish(half)
                graphs[half][index].mlp.replay()
                overlap.start_sum(half, rows)
        return Residual(torch.cat([overlap.finish(half).values for half in range(HALVES)]))

    def _capture_size(self, size: int, pool: Any) -> None:
        """Capture the graphs for one size. Before each half's capture, one layer of each kind is run to load
        its kernels."""
        made = []
        for half, rows in enumerate(_halves(size)):
            for index in first_of_each_kind(self._layers):
                for part in self._parts(self._layers[index], half, rows):
                    part()
            made.append(
                [
                    _LayerGraphs(*(captured(part, pool) for part in self._parts(layer, half, rows)))
                    for layer in self._layers
                ]
            )
        self._graphs[size] = made

    def _parts(self, layer: Layer, half: int, rows: int) -> tuple[Callable[[], object], ...]:
        """Return the functions to capture for a layer, in the order of the fields of `_LayerGraphs`. The
        first and last functions read the sums that `PeerOverlap` stores in alternating buffers."""
        overlap = self._overlap
        before, between = (Residual(overlap.result(half, turn, rows)) for turn in range(2))
        qkv, attended, out = self._qkv[half, :rows], self._attended[half, :rows], overlap.part(half, rows)
        live = self._live[half, :rows]
        return (
            lambda: layer.attention.qkv.after_norm(before, layer.input_norm, layer.eps, qkv),
            lambda: layer.attention.o(attended, out),
            lambda: layer.mlp.down(layer.activate(between, live), out),
        )


def _halves(tokens: int) -> tuple[int, int]:
    split = overlap_split(tokens)
    return split, tokens - split
