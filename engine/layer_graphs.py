"""Runs passes that contain prompts by replaying one CUDA graph per layer. If a layer is split across several
GPUs or has experts, the host takes longer to launch its kernels one by one than the device takes to run them.
Everything except attention is captured, so the graphs can be replayed for any mix of prompts and decodes. A
layer's graph begins after that layer's attention and ends before the next layer's attention. The graphs read
and write buffers that are allocated once. On several GPUs, longer passes are computed in two halves
(`engine.halves_graphs`). Short passes that contain only prompts have a single graph (`engine.prompt_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.model.decoder import Decoder
from engine.model.layers import Layer, LayerInput
from engine.progress import ProgressCallback
from engine.rank_messages import Progress
from kernels import KvPool, Residual


class LayerGraphs:
    """One rank's CUDA graphs for single layers. `sizes` lists the captured token counts. The last layer is
    not included, because it computes only some rows. Call `capture` once, then `run` for each pass that
    `fits` accepts. `decoder` must have several layers.
    """

    def __init__(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        self._ranks = decoder.ranks
        self._layers = decoder.layers[:-1]
        self.sizes = sorted(sizes)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        """For each captured number of tokens, the graph that precedes the first layer's attention, followed
        by the layers' graphs."""
        shard, rows = decoder.shard, self.sizes[-1]
        width = decoder.config.head_dim
        made: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        self._residual = torch.zeros((rows, decoder.config.hidden_size), **made)
        self._qkv = torch.empty((rows, (shard.heads + 2 * shard.kv_heads) * width), **made)
        # Zero-filled, because padding rows are read before anything is written to them.
        self._attended = torch.zeros((rows, shard.heads * width), **made)
        # Expert choices are not counted for padding rows, and all rows are padding until `run` is called.
        self._live = torch.full((rows,), -1, dtype=torch.int64, device=decoder.device)

    def capture(self, progress: ProgressCallback) -> None:
        """Capture the graphs for all sizes, largest first. All ranks must call this method."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(reversed(self.sizes)):
                progress(Progress("warm up", done, len(self.sizes), "graphs", "layers of prompt passes"))
                self._capture_size(size, pool)
        torch.cuda.current_stream().wait_stream(stream)

    def fits(self, tokens: int) -> bool:
        return tokens in self._graphs

    def run(self, residual: Residual, inputs: LayerInput, kv: Sequence[KvPool]) -> Residual:
        """Run all layers except the last and return the residual. `kv` has one pool per layer."""
        rows = len(residual.values)
        values, qkv, attended = self._residual[:rows], self._qkv[:rows], self._attended[:rows]
        before, *graphs = self._graphs[rows]
        values.copy_(residual.values)
        self._live[:rows].copy_(inputs.kv_slots)
        before.replay()
        for layer, pool, graph in zip(self._layers, kv, graphs, strict=False):
            layer.attention(qkv, inputs, pool, attended)
            graph.replay()
        return Residual(values)

    def _capture_size(self, size: int, pool: Any) -> None:
        """Capture the graphs for one size. To load the kernels, the code before the first layer's attention
        and one layer of each kind are run first."""
        for index in (-1, *first_of_each_kind(self._layers)):
            self._part(index, size)()
        parts = [self._part(index, size) for index in range(-1, len(self._layers))]
        self._graphs[size] = [captured(part, pool) for part in parts]

    def _part(self, index: int, rows: int) -> Callable[[], None]:
        """Return a function that computes a layer from the result of its attention up to and including the
        next layer's qkv. With index -1, the function computes only the first layer's qkv."""
        values, qkv, attended = self._residual[:rows], self._qkv[:rows], self._attended[:rows]
        layers, ranks, live = self._layers, self._ranks, self._live[:rows]
        following = layers[index + 1] if index + 1 < len(layers) else None

        def run() -> None:
            residual = Residual(values)
            if index >= 0:
                layer = layers[index]
                o, down = layer.attention.o, layer.mlp.down
                residual = o.add_to(residual, attended, layer.post_norm, layer.eps, ranks)
                next_gain = None if following is None else following.input_norm
                activated = layer.activate(residual, live)
                residual = down.add_to(residual, activated, next_gain, layer.eps, ranks)
            if following is not None:
                following.attention.qkv.after_norm(residual, following.input_norm, following.eps, qkv)

        return run


def first_of_each_kind(layers: Sequence[Layer]) -> list[int]:
    """For each layer class, return the index of the first layer of that class."""
    kinds = [type(layer) for layer in layers]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def captured(part: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """Capture a function as a CUDA graph on the current stream. The graph allocates memory from `pool`."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    part()
    graph.capture_end()
    return graph
