"""What one step does on a rank's device: a plan in, what was sampled out, as tensors.

Steps that only decode, and short ones of prompts, replay captured graphs where there are any
(`engine.graphs`, `engine.prompt_graphs`); all others are launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.device_tables import PromptSlice, SamplingBatch, SlotTables, StepBatch, ends_of
from engine.launched import StepResults
from engine.messages import StepPlan
from engine.model.decoder import Decoder
from engine.sampler import LOGPROB_ROWS, SampledStep, Sampler
from engine.transfer import upload
from kernels import KvPool

if TYPE_CHECKING:
    from engine.graphs import DecodeGraphs
    from engine.prompt_graphs import PromptGraphs


@dataclass(slots=True)
class Steps:
    """What steps work on. Equal plans in equal order do equal work on every rank."""

    decoder: Decoder
    kv: list[KvPool]
    """One for each layer."""
    tables: SlotTables
    sampler: Sampler
    graphs: DecodeGraphs | None = None
    prompt_graphs: PromptGraphs | None = None

    def run(self, plan: StepPlan, begins: Callable[[], object] = lambda: None) -> StepResults:
        """Launch a step after all before it, on the current stream; on a CPU, do it. `begins` is called when
        all is prepared, right before the device works on the cache. Raises what torch raises; the tables are
        void then."""
        self.tables.apply(plan)
        if self.graphs is not None and not plan.chunks and self.graphs.fits(len(plan.decodes)):
            return self._replay(self.graphs, plan, begins)
        if self.prompt_graphs is not None and self.prompt_graphs.fits(plan):
            return self._replay_prompts(self.prompt_graphs, plan, begins)
        return self._run_eagerly(plan, begins)

    def _run_eagerly(self, plan: StepPlan, begins: Callable[[], object]) -> StepResults:
        batch = self.tables.step_batch(plan)
        begins()
        self._ready_blocks(plan)
        hidden = self.decoder.forward(batch.forward, self.kv)
        index, count = batch.logit_index, batch.sampled_logits
        wanted = hidden[:count] if index is None else hidden.index_select(0, index[:count])
        sampled = self.sampler.sample(self.decoder.logits(wanted), batch.sampling, self.tables)
        prompts = [(each, self._prompt_logprobs(hidden, batch, each)) for each in batch.prompts]
        finite = [
            (chunk.row, hidden[end].isfinite().all())
            for chunk, end in zip(plan.chunks, ends_of(batch.forward), strict=True)
            if not chunk.sample_slots
        ]
        return StepResults(sampled, batch.sampling.needs.logprob_rows, prompts, finite)

    def _replay(self, graphs: DecodeGraphs, plan: StepPlan, begins: Callable[[], object]) -> StepResults:
        graphs.set_rows(plan.decodes)
        begins()
        self._ready_blocks(plan)
        logits = graphs.forward()
        batch = self.tables.decode_batch(plan, graphs.rows(), graphs.positions())
        return StepResults(self._sample(graphs, logits, batch), batch.needs.logprob_rows, [], [])

    def _replay_prompts(
        self, graphs: PromptGraphs, plan: StepPlan, begins: Callable[[], object]
    ) -> StepResults:
        graphs.stage(plan)
        begins()
        self._ready_blocks(plan)
        logits = graphs.forward()
        batch = self.tables.prompt_batch(plan)
        sampled = self.sampler.sample(logits, batch, self.tables)
        return StepResults(sampled, batch.needs.logprob_rows, [], [])

    def _sample(self, graphs: DecodeGraphs, logits: torch.Tensor, batch: SamplingBatch) -> SampledStep:
        if batch.needs.edits is not None:
            return self.sampler.sample(logits, batch, self.tables)
        token_ids = graphs.sample(batch.needs.variant)
        return SampledStep(token_ids, self.sampler.logprobs(logits, batch, token_ids))

    def _ready_blocks(self, plan: StepPlan) -> None:
        self._clear_blocks(plan.clears)
        self._copy_blocks(plan.copies)

    def _clear_blocks(self, blocks: list[int]) -> None:
        if not blocks:
            return
        index = upload(np.array(blocks, dtype=np.int64), self.tables.device)
        for pool in self.kv:
            for tensor in pool.tensors():
                tensor[index] = 0

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        source, destination = upload(np.array(copies, dtype=np.int64).T.copy(), self.tables.device)
        for pool in self.kv:
            for tensor in pool.tensors():
                tensor[destination] = tensor[source]

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: StepBatch, prompt: PromptSlice
    ) -> list[torch.Tensor]:
        assert batch.logit_index is not None
        pieces = []
        for first in range(0, len(prompt.targets), LOGPROB_ROWS):
            targets = prompt.targets[first : first + LOGPROB_ROWS]
            at = prompt.first + first
            rows = batch.logit_index[at : at + len(targets)]
            logits = self.decoder.logits(hidden.index_select(0, rows))
            pieces.append(self.sampler.token_logprobs(logits, targets, prompt.top))
        return pieces
