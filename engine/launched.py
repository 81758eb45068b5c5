"""Steps on their way: what a step computes, as tensors, and the waiting for it on the host."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from engine.device_tables import PromptSlice
from engine.messages import StepPlan, StepTokens, TokenLogprob
from engine.sampler import SampledStep


@dataclass(slots=True)
class StepResults:
    """What a step computed, as tensors; on the host when they are read."""

    sampled: SampledStep
    logprob_rows: list[tuple[int, int]]
    """(sampling row, k) of each row of `sampled.logprobs`."""
    prompts: list[tuple[PromptSlice, list[torch.Tensor]]]
    """With pieces of `Sampler.token_logprobs`."""
    finite: list[tuple[int, torch.Tensor]]
    """For each chunk without sample rows, its row and whether the numbers of its last token are finite: those
    depend on all before it."""


class Launched:
    """A step on its way; see `engine.core.Launched`."""

    host_gap_us = 0.0
    """After `wait`: microseconds from the end of the step in front to the beginning of this one's pass: what
    the host prepares in between counts. 0 of the first step."""

    def wait(self) -> StepTokens:
        """Block until the step's tokens are known. Raises what the step raised."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        raise NotImplementedError


class OnThread(Launched):
    """On the worker thread of a CPU."""

    def __init__(self, future: Future[tuple[StepTokens, float]]) -> None:
        self._future = future

    def wait(self) -> StepTokens:
        tokens, self.host_gap_us = self._future.result()
        return tokens

    def ready(self) -> bool:
        return self._future.done()


class OnStream(Launched):
    """On a GPU's stream, between the events `began` and `ended`. before: the end of the step in front."""

    def __init__(
        self,
        plan: StepPlan,
        results: StepResults,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        before: torch.cuda.Event | None,
    ) -> None:
        self._plan, self._results = plan, results
        self._began, self._ended, self._before = began, ended, before

    def wait(self) -> StepTokens:
        self._ended.synchronize()
        if self._before is not None:
            self.host_gap_us = max(0.0, 1e3 * self._before.elapsed_time(self._began))
            self._before = None
        return read(self._plan, self._results)

    def ready(self) -> bool:
        return self._ended.query()


def to_host(results: StepResults) -> StepResults:
    """Copies on their way to pinned memory; complete when an event recorded after this is."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", non_blocking=True)

    logprobs = results.sampled.logprobs
    sampled = SampledStep(copy(results.sampled.token_ids), None if logprobs is None else copy(logprobs))
    prompts = [(prompt, [copy(piece) for piece in pieces]) for prompt, pieces in results.prompts]
    finite = [(row, copy(each)) for row, each in results.finite]
    return StepResults(sampled, results.logprob_rows, prompts, finite)


def read(plan: StepPlan, results: StepResults) -> StepTokens:
    """What a step says, from results on the host."""
    token_ids: list[int] = results.sampled.token_ids.tolist()
    logprobs: list[TokenLogprob | None] | None = None
    if results.sampled.logprobs is not None:
        logprobs = [None] * len(token_ids)
        wanting = zip(results.logprob_rows, results.sampled.logprobs.tolist(), strict=True)
        for (index, top), numbers in wanting:
            logprobs[index] = _token_logprob(token_ids[index], numbers, top)
    following = {chunk.row: [*chunk.token_ids[1:], chunk.next_token or 0] for chunk in plan.chunks}
    prompts = {}
    for prompt, pieces in results.prompts:
        rows = [numbers for piece in pieces for numbers in piece.tolist()]
        prompts[prompt.row] = [
            _token_logprob(token, numbers, prompt.top)
            for token, numbers in zip(following[prompt.row], rows, strict=False)
        ]
    broken = [row for row, finite in results.finite if not finite]
    return StepTokens(token_ids, logprobs, prompts, broken)


def _token_logprob(token_id: int, numbers: list[float], top: int) -> TokenLogprob:
    """From a row of `Sampler.token_logprobs`, of which the first `top` alternatives were asked for."""
    width = (len(numbers) - 1) // 2
    best = min(top, width)
    ids = [int(x) for x in numbers[1 + width : 1 + width + best]]
    return TokenLogprob(token_id, numbers[0], list(zip(ids, numbers[1 : 1 + best], strict=True)))
