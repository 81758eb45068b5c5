"""Defines launched steps, their result tensors, and functions that wait for the results and read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from engine.device_tables import PromptSlice
from engine.messages import TokenLogprob
from engine.model.experts import ExpertChoices
from engine.plan import StepPlan, StepTokens
from engine.sampler import SampledStep


@dataclass(slots=True)
class StepResults:
    """A step's results: on the device, or on the host if returned by `to_host`."""

    sampled: SampledStep
    logprob_rows: list[tuple[int, int]]
    """For each row of `sampled.logprobs`: the index of its sampling slot, and the requested number of
    alternatives, k."""
    prompts: list[tuple[PromptSlice, list[torch.Tensor]]]
    """The `Sampler.token_logprobs` results for each slice of prompt tokens whose log probabilities were
    requested. A slice may have several results, each covering some of its tokens."""
    finite: list[tuple[int, torch.Tensor]]
    """For each chunk that does not sample: its slot, and whether its last token's hidden state is finite.
    Checking the last token suffices, because its hidden state depends on all earlier tokens."""
    experts: ExpertChoices | None = None
    """The expert choices counted up to and including this step, or None if the step does not return them."""


LOSS_CHECK_S = 0.1
"""Interval, in seconds, between checks for a lost peer while waiting for a step on a CPU."""


class ThreadStep:
    """A step that runs on the CPU, in a worker thread. Implements `engine.core.LaunchedStep`.

    `check` raises an exception if a peer was lost. The worker thread may then remain blocked in a collective,
    because gloo detects the loss only when the peer's connections close.
    """

    def __init__(self, future: Future[tuple[StepTokens, float]], check: Callable[[], None]) -> None:
        self._future, self._check = future, check
        self.host_gap_us = 0.0

    def wait(self) -> StepTokens:
        while not self._future.done():
            with contextlib.suppress(TimeoutError):
                self._future.result(LOSS_CHECK_S)
            self._check()
        tokens, self.host_gap_us = self._future.result()
        return tokens

    def ready(self) -> bool:
        return self._future.done()


class StreamStep:
    """A step running on a CUDA stream, between the `began` and `ended` events. Implements
    `engine.core.LaunchedStep`.

    `previous_ended` is the previous step's `ended` event, or None for the first step. The gap between the two
    steps includes the time to prepare this step's input on the host. `check` raises an exception if the
    results are invalid because a peer was lost.
    """

    def __init__(
        self,
        plan: StepPlan,
        results: StepResults,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        previous_ended: torch.cuda.Event | None,
        check: Callable[[], None],
    ) -> None:
        self._plan, self._results = plan, results
        self._began, self._ended, self._previous_ended = began, ended, previous_ended
        self._check = check
        self.host_gap_us = 0.0

    def wait(self) -> StepTokens:
        self._ended.synchronize()
        self._check()
        if self._previous_ended is not None:
            self.host_gap_us = max(0.0, 1e3 * self._previous_ended.elapsed_time(self._began))
            self._previous_ended = None
        return read_results(self._plan, self._results)

    def ready(self) -> bool:
        return self._ended.query()


def to_host(results: StepResults) -> StepResults:
    """Start copying results to pinned host memory. To wait for the copies, record an event after this call
    and wait for it."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    logprobs = results.sampled.logprobs
    sampled = SampledStep(copy(results.sampled.token_ids), None if logprobs is None else copy(logprobs))
    prompts = [(prompt, [copy(part) for part in parts]) for prompt, parts in results.prompts]
    finite = [(slot, copy(flag)) for slot, flag in results.finite]
    experts = results.experts
    if experts is not None:
        experts = ExpertChoices(experts.layers, copy(experts.counts))
    return StepResults(sampled, results.logprob_rows, prompts, finite, experts)


def read_results(plan: StepPlan, results: StepResults) -> StepTokens:
    """Convert a step's results, already copied to the host, to a `StepTokens` message for the scheduler."""
    token_ids: list[int] = results.sampled.token_ids.tolist()
    logprobs: list[TokenLogprob | None] | None = None
    if results.sampled.logprobs is not None:
        logprobs = [None] * len(token_ids)
        with_logprobs = zip(results.logprob_rows, results.sampled.logprobs.tolist(), strict=True)
        for (index, top), numbers in with_logprobs:
            logprobs[index] = _token_logprob(token_ids[index], numbers, top)
    following = {chunk.slot: [*chunk.token_ids[1:], chunk.next_token or 0] for chunk in plan.chunks}
    prompts = {}
    for prompt, parts in results.prompts:
        rows = [numbers for part in parts for numbers in part.tolist()]
        prompts[prompt.slot] = [
            _token_logprob(token, numbers, prompt.top)
            for token, numbers in zip(following[prompt.slot], rows, strict=False)
        ]
    non_finite = [slot for slot, finite in results.finite if not finite]
    experts = None
    if results.experts is not None:
        experts = dict(zip(results.experts.layers, results.experts.counts.tolist(), strict=True))
    return StepTokens(token_ids, logprobs, prompts, non_finite, experts)


def _token_logprob(token_id: int, numbers: list[float], top: int) -> TokenLogprob:
    """Convert a result row of `Sampler.token_logprobs`, keeping only the `top` most likely alternatives."""
    width = (len(numbers) - 1) // 2
    best = min(top, width)
    ids = [int(x) for x in numbers[1 + width : 1 + width + best]]
    return TokenLogprob(token_id, numbers[0], list(zip(ids, numbers[1 : 1 + best], strict=True)))
