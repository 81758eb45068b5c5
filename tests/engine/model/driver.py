"""Runs a decoder without a scheduler. Sequences are in shuffled blocks, and passes mix decodes and prompt
chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.families import read_config
from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.parallel import single
from engine.progress import no_progress
from kernels import AttentionInput, ChunkSpan, select_backend


@dataclass
class Sequence:
    """A sequence in the driver: its number of cached tokens and its blocks."""

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """A KV pool with a shuffled free list, so that the blocks in a block table are not in ascending order."""

    def __init__(self, decoder: Decoder, blocks: int, seed: int = 0) -> None:
        self.decoder = decoder
        self.kv = decoder.allocate_kv(blocks)
        # Fill the pool with garbage, because values past the end of a sequence must not be read.
        for index, pool in enumerate(self.kv):
            generator = torch.Generator().manual_seed(index)
            for tensor in (pool.keys, pool.values, pool.k_scales, pool.v_scales):
                if tensor is not None:
                    tensor.copy_(30.0 * torch.randn(tensor.shape, generator=generator))
        self.free = list(range(blocks))
        random.Random(seed).shuffle(self.free)

    def run(
        self,
        decodes: list[tuple[Sequence, int]],
        chunks: list[tuple[Sequence, list[int]]],
        padding: int = 0,
    ) -> torch.Tensor:
        """Run one pass and return the logits of every token, `[tokens of the pass, vocabulary]`, decodes
        first. Add `padding` rows at the end of the pass, for which no logits are returned."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[ChunkSpan] = []
        for sequence, token in decodes:
            token_ids.append(token)
            positions.append(sequence.length)
            slots += self._append(sequence, 1)
        for sequence, tokens in chunks:
            context = sequence.length
            first = len(token_ids)
            token_ids += tokens
            positions += range(context, context + len(tokens))
            slots += self._append(sequence, len(tokens))
            spans.append(ChunkSpan(first, len(tokens), context, len(decodes) + len(spans)))
        count = len(token_ids)
        everyone = [sequence for sequence, _ in [*decodes, *chunks]]
        columns = max(len(sequence.blocks) for sequence in everyone)
        tables = [s.blocks + [0] * (columns - len(s.blocks)) for s in everyone]
        inputs = ForwardInput(
            token_ids=torch.tensor(token_ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            kv_slots=torch.tensor(slots + [-1] * padding),
            attention=AttentionInput(
                block_table=torch.tensor(tables),
                slots=torch.arange(len(decodes)),
                lens=torch.tensor([sequence.length for sequence, _ in decodes], dtype=torch.int64),
                columns=max((len(sequence.blocks) for sequence, _ in decodes), default=0),
                chunks=spans,
            ),
        )
        hidden = self.decoder.forward(inputs, self.kv)
        logits = self.decoder.logits(hidden[:count])
        return self.decoder.ranks.all_gather_last_dim(logits)[:, : self.decoder.config.vocab_size]

    def _append(self, sequence: Sequence, count: int) -> list[int]:
        """Return KV slot indices for `count` more tokens, allocating blocks as needed."""
        slots = []
        for position in range(sequence.length, sequence.length + count):
            if position == len(sequence.blocks) * BLOCK_TOKENS:
                sequence.blocks.append(self.free.pop())
            slots.append(sequence.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS)
        sequence.length += count
        return slots


def teacher_forced(
    driver: Driver, tokens: list[int], prompt_lengths: list[int], chunk_sizes: list[int], decode_steps: int
) -> list[torch.Tensor]:
    """Run several sequences with the same `tokens` at the same time. Each sequence's prompt is computed in
    chunks of a different size. It is followed by `decode_steps` decodes, whose inputs are the next tokens of
    `tokens`. Returns each sequence's logits, `[prompt length + decode_steps, vocabulary]`."""
    sequences = [Sequence() for _ in prompt_lengths]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    end_positions = [length + decode_steps for length in prompt_lengths]
    while any(sequence.length < end for sequence, end in zip(sequences, end_positions, strict=True)):
        decodes: list[int] = []
        chunks: list[tuple[int, list[int]]] = []
        for index, sequence in enumerate(sequences):
            prompt = prompt_lengths[index]
            if sequence.length < prompt:
                stop = min(prompt, sequence.length + chunk_sizes[index])
                chunks.append((index, tokens[sequence.length : stop]))
            elif sequence.length < end_positions[index]:
                decodes.append(index)
        rows = driver.run(
            [(sequences[index], tokens[sequences[index].length]) for index in decodes],
            [(sequences[index], part) for index, part in chunks],
        )
        order = [(index, 1) for index in decodes] + [(index, len(part)) for index, part in chunks]
        for (index, _), part in zip(order, rows.split([count for _, count in order]), strict=True):
            logits[index].append(part)
    return [torch.cat(parts) for parts in logits]


def greedy(driver: Driver, prompt: list[int], count: int, chunk_size: int) -> tuple[list[int], list[float]]:
    """Generate `count` greedy tokens after `prompt`. Returns the tokens and, for each token, the gap between
    the top two logits."""
    sequence = Sequence()
    for start in range(0, len(prompt), chunk_size):
        rows = driver.run([], [(sequence, prompt[start : start + chunk_size])])
    tokens: list[int] = []
    gaps: list[float] = []
    while True:
        best = rows[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if len(tokens) == count:
            return tokens, gaps
        rows = driver.run([(sequence, tokens[-1])], [])


def load_decoder(folder: Path, *, quantised: bool = False, max_model_len: int | None = None) -> Decoder:
    """Return the checkpoint's decoder for one rank on a CPU, in float32. Its matrices are quantised if the
    checkpoint's matrices are, or if `quantised` is set."""
    config = read_config(folder)
    decoder = Decoder(
        config,
        single(),
        select_backend("cpu"),
        torch.float32,
        torch.device("cpu"),
        max_model_len=max_model_len,
        fp8=config.fp8 or quantised,
    )
    load(decoder, folder, no_progress)
    return decoder
