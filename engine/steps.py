"""Executes one step on a rank's device: runs a plan and returns the sampled tokens as tensors. Decode-only
steps and short prompt passes replay captured CUDA graphs, if there are any (`engine.graphs`,
`engine.prompt_graphs`). Otherwise, each kernel is launched separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.device_tables import PromptSlice, SlotTables, StepBatch, chunk_results
from engine.launched import StepResults
from engine.model.decoder import Decoder
from engine.model.experts import ExpertChoices
from engine.plan import StepPlan
from engine.sampler import LOGPROB_ROWS, SampledStep, Sampler
from engine.transfer import upload
from kernels import KvPool

if TYPE_CHECKING:
    from engine.graphs import DecodeGraphs
    from engine.prompt_graphs import PromptGraphs


EXPERT_CHOICES_S = 1.0
"""Minimum interval, in seconds, between two transfers of the expert choices to the host."""


@dataclass(slots=True)
class StepExecutor:
    """Executes steps with one model and its KV cache, device tables and graphs. Ranks that execute the same
    plans in the same order perform the same operations."""

    decoder: Decoder
    kv: list[KvPool]
    """One KV pool per layer."""
    tables: SlotTables
    sampler: Sampler
    graphs: DecodeGraphs | None = None
    prompt_graphs: PromptGraphs | None = None
    choices_due: float = 0.0
    """Earliest time at which a step may next return expert choices."""

    def run(self, plan: StepPlan, on_begin: Callable[[], object] = lambda: None) -> StepResults:
        """Launch a step on the current stream, after all earlier steps. On a CPU, the step has finished when
        this method returns.

        `on_begin` is called once the host has prepared the step, right before the device accesses the KV
        cache. Exceptions from torch propagate and leave the device tables invalid.
        """
        self.tables.apply(plan)
        if self.graphs is not None and not plan.chunks and self.graphs.fits(len(plan.decodes)):
            return self._replay_decodes(self.graphs, plan, on_begin)
        if self.prompt_graphs is not None and self.prompt_graphs.fits(plan):
            return self._replay_prompts(self.prompt_graphs, plan, on_begin)
        return self._run_eagerly(plan, on_begin)

    def _run_eagerly(self, plan: StepPlan, on_begin: Callable[[], object]) -> StepResults:
        batch = self.tables.step_batch(plan)
        on_begin()
        self._prepare_blocks(plan)
        hidden = self.decoder.forward(batch.forward, self.kv)
        index, count = batch.logits_indices, batch.sampled_logits
        wanted = hidden[:count] if index is None else hidden.index_select(0, index[:count])
        sampled = self.sampler.sample(self.decoder.logits(wanted), batch.sampling, self.tables)
        prompts = [(prompt, self._prompt_logprobs(hidden, batch, prompt)) for prompt in batch.prompts]
        finite = [
            (chunk.slot, hidden[result].isfinite().all())
            for chunk, result in zip(plan.chunks, chunk_results(batch.forward), strict=True)
            if not chunk.sample_slots
        ]
        return StepResults(
            sampled, batch.sampling.metadata.logprob_rows, prompts, finite, self._expert_choices()
        )

    def _expert_choices(self) -> ExpertChoices | None:
        """Return the expert choices, or None if this is not rank 0 or if the choices were returned less than
        EXPERT_CHOICES_S seconds ago."""
        now = time.monotonic()
        if self.decoder.ranks.rank != 0 or now < self.choices_due:
            return None
        self.choices_due = now + EXPERT_CHOICES_S
        return self.decoder.expert_choices()

    def _replay_decodes(
        self, graphs: DecodeGraphs, plan: StepPlan, on_begin: Callable[[], object]
    ) -> StepResults:
        graphs.set_slots(plan.decodes)
        on_begin()
        self._prepare_blocks(plan)
        logits = graphs.forward()
        batch = self.tables.decode_batch(plan, graphs.slots(), graphs.positions())
        if batch.metadata.processors is not None:
            sampled = self.sampler.sample(logits, batch, self.tables)
        else:
            token_ids = graphs.sample(batch.metadata.variant)
            sampled = SampledStep(token_ids, self.sampler.logprobs(logits, batch, token_ids))
        return StepResults(sampled, batch.metadata.logprob_rows, [], [], self._expert_choices())

    def _replay_prompts(
        self, graphs: PromptGraphs, plan: StepPlan, on_begin: Callable[[], object]
    ) -> StepResults:
        graphs.stage(plan)
        on_begin()
        self._prepare_blocks(plan)
        logits = graphs.forward()
        batch = self.tables.prompt_batch(plan)
        sampled = self.sampler.sample(logits, batch, self.tables)
        return StepResults(sampled, batch.metadata.logprob_rows, [], [], self._expert_choices())

    def _prepare_blocks(self, plan: StepPlan) -> None:
        """Clear and copy KV blocks as the plan requires."""
        if plan.clears:
            index = upload(np.array(plan.clears, dtype=np.int64), self.tables.device)
            for pool in self.kv:
                for tensor in pool.tensors():
                    tensor[index] = 0
        if plan.copies:
            pairs = np.array(plan.copies, dtype=np.int64).T.copy()
            source, destination = upload(pairs, self.tables.device)
            for pool in self.kv:
                for tensor in pool.tensors():
                    tensor[destination] = tensor[source]

    def _prompt_logprobs(
        self, hidden: torch.Tensor, batch: StepBatch, prompt: PromptSlice
    ) -> list[torch.Tensor]:
        """Return the `Sampler.token_logprobs` results for a range of prompt tokens, in parts of at most
        LOGPROB_ROWS rows."""
        assert batch.logits_indices is not None
        parts = []
        for first in range(0, len(prompt.targets), LOGPROB_ROWS):
            targets = prompt.targets[first : first + LOGPROB_ROWS]
            at = prompt.first + first
            rows = batch.logits_indices[at : at + len(targets)]
            logits = self.decoder.logits(hidden.index_select(0, rows))
            parts.append(self.sampler.token_logprobs(logits, targets, prompt.top))
        return parts
