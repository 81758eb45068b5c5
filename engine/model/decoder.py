"""Defines one rank's shard of the decoder, which is the same for all supported model families.

The decoder is a pre-norm transformer with a paged KV cache. The attention heads, the MLP and the vocabulary
are split across the ranks. Each layer contains two all-reduces, so every rank has the same complete hidden
states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.config import ModelConfig
from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS, ModelDType
from engine.model.experts import ExpertChoices, ExpertsLayer
from engine.model.halves import run_in_halves, split_attention
from engine.model.kinds import LAYER_KINDS
from engine.model.layers import LayerInput, ParameterFactory, WeightShard, run_layer
from engine.model.rotary import rotary_table
from engine.model.weight_fit import WeightFit
from engine.parallel import Ranks
from engine.progress import ProgressCallback
from engine.rank_memory import RankMemory
from engine.rank_messages import Progress
from kernels import KvPool, Ops, Residual

if TYPE_CHECKING:
    from engine.halves_graphs import HalvesGraphs
    from engine.layer_graphs import LayerGraphs

TORCH_DTYPES: dict[ModelDType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Torch dtypes, keyed by model dtype name."""

Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Decoder:
    """One rank's shard of a model. The weights are uninitialised until `engine.model.loader` fills them.

    `max_model_len` is the maximum sequence length, or None for the checkpoint's maximum
    (`ModelConfig.context_length`). With `fp8`, the layers' matrices are e4m3 with one scale per output; the
    embeddings and the output matrix are not quantised. With `fp8_blocks`, there is one scale per block
    instead, which only the reference implementation supports. With `kv_fp8`, the KV cache is e4m3 with one
    scale per token and head. `memory` allocates the weights; None means that torch allocates them.

    Raises UnsupportedError if the model cannot be split across the ranks or does not support `max_model_len`,
    and WeightsTooLarge if the weights do not fit on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_model_len: int | None = None,
        fp8: bool = False,
        fp8_blocks: bool = False,
        kv_fp8: bool = False,
        memory: RankMemory | None = None,
    ) -> None:
        factory = ParameterFactory(ops, dtype, device, fp8, fp8_blocks, memory)
        self.config = config
        self.ranks = ranks
        self.ops = ops
        self.dtype = dtype
        self.kv_fp8 = kv_fp8
        self.device = device
        self.halves_graphs: HalvesGraphs | None = None
        self.layer_graphs: LayerGraphs | None = None
        """CUDA graphs of parts of passes that contain prompts. Used only with several GPUs or with
        experts."""
        self.max_model_len = config.resolve_length(max_model_len)
        self.shard = config.shard(ranks.size, ranks.rank)
        name = next(name for name, each in TORCH_DTYPES.items() if each == dtype)
        self.fit = WeightFit(config, self.shard, name, fp8, device, ranks.size, fp8_blocks, memory)
        self.fit.check()
        with self.fit.explained():
            self.embedding = factory.empty(self.shard.vocab, config.hidden_size)
            self.layers = [
                LAYER_KINDS[kind](config, self.shard, factory, index)
                for index, kind in enumerate(config.layer_kinds)
            ]
            self.final_norm = factory.empty(config.hidden_size)
            tied = config.tie_word_embeddings
            self.head = self.embedding if tied else factory.empty(self.shard.vocab, config.hidden_size)
        self.cos_sin = rotary_table(config, self.max_model_len).to(device)

    def with_layers(self, indices: list[int]) -> Decoder:
        """Return a decoder with only the given layers. Both decoders share all parameters."""
        part = copy.copy(self)
        part.layers = [self.layers[index] for index in indices]
        part.halves_graphs = part.layer_graphs = None
        return part

    def representative(self, kv: list[KvPool]) -> tuple[Decoder, list[KvPool]]:
        """Return a decoder with just enough layers to launch every kernel of this one, together with those
        layers' KV pools."""
        layers = self.config.representative_layers()
        return self.with_layers(layers), [kv[layer] for layer in layers]

    # ── computation ──────────────────────────────────────────────────────────────────────────────

    def forward(self, inputs: ForwardInput, kv: list[KvPool]) -> torch.Tensor:
        """Run a forward pass and return its hidden states: `[tokens, hidden]`. If `inputs.logits_attention`
        is given, only the rows of its tokens are returned. The pass writes its keys and values to `kv`, which
        has one pool per layer. The final norm is applied later, by `logits`, and only to the rows that need
        logits. The number of tokens that choose each expert is added to `expert_choices`.
        """
        ops, ranks, logits_attention = self.ops, self.ranks, inputs.logits_attention
        first = self.shard.first_vocab if ranks.size > 1 else None
        residual = Residual(ranks.all_reduce(ops.embedding(inputs.token_ids, self.embedding, first)))
        plan = ops.plan_attention(inputs.attention)
        counting = self.config.experts is not None
        live = inputs.kv_slots if counting else None  # a negative value marks padding
        every = LayerInput(ranks, self.cos_sin, inputs.positions, inputs.kv_slots, plan, live=live)
        last = every
        if logits_attention is not None:
            assert logits_attention.queries is not None
            live = logits_attention.lens - 1 if counting else None
            last = replace(
                every,
                attention_plan=ops.plan_attention(logits_attention),
                kept=logits_attention.queries,
                live=live,
            )
        next_gains = [*(layer.input_norm for layer in self.layers[1:]), None]
        calls = list(zip(self.layers, kv, next_gains, strict=True))
        overlap = ranks.overlap(len(inputs.token_ids))
        if overlap is not None and len(calls) > 1:
            # The last layer computes only some of the rows, so it runs on the full pass instead of in halves.
            halves, graphs = self._halves(inputs, every, overlap.split), self.halves_graphs
            if graphs is not None and graphs.fits(len(inputs.token_ids)):
                residual = graphs.run(residual, halves, kv)
            else:
                residual = run_in_halves(calls[:-1], residual, halves, overlap)
            calls = calls[-1:]
        elif self.layer_graphs is not None and self.layer_graphs.fits(len(inputs.token_ids)):
            residual = self.layer_graphs.run(residual, every, kv)
            calls = calls[-1:]
        for layer, pool, next_gain in calls:
            inputs_of_layer = last if next_gain is None else every
            residual = run_layer(layer.run(residual, inputs_of_layer, pool, next_gain), ranks)
        return residual.values

    def _halves(self, inputs: ForwardInput, whole: LayerInput, at: int) -> tuple[LayerInput, LayerInput]:
        """Split the layer inputs at token index `at` and return both parts."""
        first, second = (
            LayerInput(
                self.ranks,
                self.cos_sin,
                inputs.positions[part],
                inputs.kv_slots[part],
                self.ops.plan_attention(attention),
                live=None if whole.live is None else whole.live[part],
            )
            for part, attention in zip(
                (slice(0, at), slice(at, None)), split_attention(inputs.attention, at), strict=True
            )
        )
        return first, second

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of `hidden`, which contains rows of `forward`'s result:
        `[rows, vocabulary on this rank]` in the model's dtype. If `out` is given, the logits are written to
        it.

        Column i belongs to token `shard.first_vocab + i`. Every rank has the same number of columns: if the
        vocabulary size is not divisible by the number of ranks, columns from `shard.vocab_real` onwards are
        padding with undefined values. To get the complete logits, gather the columns of all ranks
        (`all_gather_last_dim`), and keep the first `config.vocab_size` columns.
        """
        eps = self.config.rms_norm_eps
        return self.ops.norm_linear(Residual(hidden), self.final_norm, eps, self.head, None, out)

    def expert_choices(self) -> ExpertChoices | None:
        """Return a copy of the expert choice counts, or None if the model has no experts."""
        layers = {
            index: layer.mlp.choices
            for index, layer in enumerate(self.layers)
            if isinstance(layer, ExpertsLayer)
        }
        return ExpertChoices(list(layers), torch.stack(list(layers.values()))) if layers else None

    def reset_expert_choices(self) -> None:
        for layer in self.layers:
            if isinstance(layer, ExpertsLayer):
                layer.mlp.choices.zero_()

    # ── the cache ────────────────────────────────────────────────────────────────────────────────

    def kv_shape(self, blocks: int) -> tuple[int, int, int, int]:
        """Return the shape of one layer's keys in this rank's cache, which is also the shape of the
        values."""
        return blocks, self.shard.kv_heads, BLOCK_TOKENS, self.config.head_dim

    def allocate_kv(self, blocks: int, zeros: Zeros | None = None) -> list[KvPool]:
        """Allocate one zero-filled KV pool per layer. Attention reads whole blocks and masks the positions
        past the end of a sequence; the masked values may be arbitrary, but must be finite.

        `zeros` allocates a zero-filled tensor of a given shape and dtype; the default uses torch.
        """
        shape = self.kv_shape(blocks)
        made = zeros or self._zeros

        def numbers() -> torch.Tensor:
            return made(shape, torch.float8_e4m3fn if self.kv_fp8 else self.dtype)

        def scales() -> torch.Tensor | None:
            return made(shape[:3], torch.float32) if self.kv_fp8 else None

        return [KvPool(numbers(), numbers(), scales(), scales()) for _ in self.layers]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # ── weights ──────────────────────────────────────────────────────────────────────────────────

    def weight_shards(self) -> list[WeightShard]:
        """Return this rank's shards of all checkpoint tensors, in the order in which a forward pass uses
        them. Must not be called after `finish`, which changes the weights' layout."""
        config, shard = self.config, self.shard
        whole = (config.vocab_size, config.hidden_size)
        start, real = shard.first_vocab, shard.vocab_real
        weight_shards = [WeightShard("model.embed_tokens.weight", whole, self.embedding[:real], 0, start)]
        for index, layer in enumerate(self.layers):
            weight_shards.extend(layer.weight_shards(f"model.layers.{index}"))
        weight_shards.append(WeightShard("model.norm.weight", (config.hidden_size,), self.final_norm))
        if not config.tie_word_embeddings:
            weight_shards.append(WeightShard("lm_head.weight", whole, self.head[:real], 0, start))
        return weight_shards

    def finish(self, progress: ProgressCallback) -> None:
        """Clear the padding and pack the weights into the backend's layout. Call once, after filling all
        weights.

        If the backend packs weights, a tied output matrix becomes a separate copy of the embedding
        (`engine.sizing` counts both).
        """
        self.embedding[self.shard.vocab_real :] = 0
        self.head[self.shard.vocab_real :] = 0
        for done, layer in enumerate(self.layers):
            progress(Progress("convert", done, len(self.layers), "layers"))
            layer.pack()
        packed = self.ops.pack_weight(self.head)
        assert isinstance(packed, torch.Tensor)
        self.head = packed
