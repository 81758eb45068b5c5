"""Runs the engine in the calling process, without a core or front processes. Used by tests and benchmarks."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.assembly import build_core
from engine.core import StepResult, StepTiming
from engine.launch import RANK_ENVIRONMENT
from engine.messages import (
    FinishReason,
    Output,
    ReplicaSpec,
    SamplingParams,
    Submit,
    TokenLogprob,
    pack_tokens,
)
from engine.other_ranks import OtherRanks
from engine.parallel import RankFailureError
from engine.progress import ProgressCallback, no_progress
from engine.rank_messages import Finished, MemoryChanged
from engine.replica import build_runner
from engine.sleeping import SleepControl

_ORIGIN = "generate"


@dataclass(slots=True)
class GeneratedSample:
    """A finished sample and its statistics."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = ""
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


class LocalEngine:
    """A replica that runs rank 0 on the calling thread. On a CPU, the steps run on the runner's own thread.

    Other ranks, if any, run in separate processes, as in a served replica.

    The constructor raises the same exceptions as `engine.runner.ModelRunner`. With several ranks, it also
    raises OSError if a process cannot be started, and RankFailureError if a rank exits.
    """

    def __init__(self, spec: ReplicaSpec, progress: ProgressCallback = no_progress) -> None:
        self.others: OtherRanks | None = None
        if spec.tensor_parallel_size > 1:
            os.environ |= {**RANK_ENVIRONMENT, **os.environ}
            self.others = OtherRanks(spec)
            spec = self.others.spec
        try:
            self.runner = build_runner(spec, 0, progress)
            self.info = self.runner.info()
            abandon = self.runner.ranks.abandon
            if self.others is not None:
                self.others.on_exit(abandon)
            plans = self.others.plans if self.others else []
            self.core = build_core(spec, self.info, self.runner, plans, abandon)
        except BaseException as error:
            if self.others is not None:
                cause = self.explain(error) if isinstance(error, RankFailureError) else ""
                self.others.stop()
                if cause:
                    raise RankFailureError(cause) from error
            raise
        self._sleeping = SleepControl(self.core, self.runner)
        self.scheduler = self.core.scheduler
        self.finished: list[Finished] = []
        """Final token counts of all submissions, accumulated over all `generate` calls."""
        self.timings: list[StepTiming] = []
        """Timing of each step, accumulated over all `generate` calls."""
        self._handles = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        n: int = 1,
        cache_salt: str = "",
    ) -> list[list[GeneratedSample]]:
        """Generate n samples for each prompt. All prompts are submitted together. `sampling` is either one
        set of parameters for all prompts, or a list with one entry per prompt."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers: dict[int, list[GeneratedSample]] = {}
        for prompt, params in zip(prompts, each, strict=True):
            self._handles += 1
            answers[self._handles] = [GeneratedSample() for _ in range(n)]
            self.scheduler.add(
                _ORIGIN,
                Submit(
                    handle=self._handles,
                    request_id=f"generate-{self._handles}",
                    prompt=pack_tokens(prompt),
                    sampling=params,
                    n=n,
                    cache_salt=cache_salt,
                ),
            )
        while self.core.has_work:
            self._take(self.core.step(), answers)
        return list(answers.values())

    def change_memory(self, asleep: bool) -> MemoryChanged:
        """Put the replica to sleep if `asleep` is true, otherwise wake it. All sequences must have
        finished."""
        self._sleeping.request(asleep)
        while (changed := self._sleeping.poll()) is None:
            select.select([self._sleeping], [], [])
        return changed

    def explain(self, error: Exception) -> str:
        """Return why a rank was lost. `error` is the exception that rank 0 raised as a result."""
        return str(error) if self.others is None else self.others.explain(error)

    def close(self) -> None:
        """Stop the other ranks and the runner's thread."""
        self._sleeping.close()
        if self.others is not None:
            self.others.stop()
            if self.info.backend == "cuda":
                # Closing an NCCL group requires all ranks, and the others have exited.
                return
        self.runner.close()

    def _take(self, result: StepResult, answers: dict[int, list[GeneratedSample]]) -> None:
        self.finished.extend(result.finished)
        if result.timing is not None:
            self.timings.append(result.timing)
        for output in result.outputs.get(_ORIGIN, []):
            _append(answers[output.handle][output.sample], output)


def _append(sample: GeneratedSample, output: Output) -> None:
    sample.token_ids.extend(output.token_ids)
    sample.finish_reason = output.finish_reason
    sample.error = output.error
    sample.logprobs.extend(output.logprobs or [])
    if output.prompt_logprobs is not None:
        sample.prompt_logprobs = output.prompt_logprobs
    if output.cached_tokens is not None:
        sample.cached_tokens = output.cached_tokens
