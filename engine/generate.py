"""The whole engine in one process, without channels, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core import EngineCore, StepResult, StepTiming
from engine.messages import (
    Finished,
    FinishReason,
    Output,
    ReplicaSpec,
    SamplingParams,
    Submit,
    TokenLogprob,
)
from engine.parallel import single
from engine.progress import ProgressCallback
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler

_ORIGIN = "generate"


@dataclass(slots=True)
class GeneratedSample:
    """A complete sample."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = ""
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


class LocalEngine:
    """A replica of one rank, on the calling thread; on a CPU, steps run on the runner's thread.

    Raises the exceptions of `engine.runner.ModelRunner`.
    """

    def __init__(self, spec: ReplicaSpec, progress: ProgressCallback = lambda stage, fraction: None) -> None:
        self.runner = ModelRunner(spec, single(), progress)
        self.info = self.runner.info()
        self.scheduler = Scheduler(
            max_num_seqs=self.info.max_num_seqs,
            max_num_batched_tokens=self.info.max_num_batched_tokens,
            max_mixed_tokens=spec.max_mixed_tokens,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            blocks=self.info.kv_blocks,
            prefix_cache=spec.prefix_cache,
        )
        self.core = EngineCore(self.scheduler, self.runner, overlap=spec.overlap)
        self.finished: list[Finished] = []
        """Final counts of all calls."""
        self.timings: list[StepTiming] = []
        """Timings of the steps of all calls."""
        self._handles = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        n: int = 1,
        cache_salt: str = "",
    ) -> list[list[GeneratedSample]]:
        """Generate n samples for each prompt, all at once. `sampling` is one for all prompts, or a list with
        one for each."""
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
                    prompt_token_ids=list(prompt),
                    sampling=params,
                    n=n,
                    cache_salt=cache_salt,
                ),
            )
        while self.core.has_work:
            self._take(self.core.step(), answers)
        return list(answers.values())

    def close(self) -> None:
        """Stop the runner's thread."""
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
