"""Prompts in, tokens out, in this process: the whole engine without channels, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core import EngineCore, StepResult, StepTiming
from engine.messages import (
    Finished,
    Output,
    ReplicaSpec,
    SamplingParams,
    Submit,
    TokenLogprob,
)
from engine.parallel import single
from engine.runner import Progress, Runner
from engine.scheduling.scheduler import Scheduler

_ORIGIN = "generate"


@dataclass(slots=True)
class Generated:
    """One sample, complete."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    error: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


class LocalEngine:
    """A replica of one rank on this thread (steps run on the runner's).

    Raises what `engine.runner.Runner` raises.
    """

    def __init__(self, spec: ReplicaSpec, progress: Progress = lambda stage, fraction: None) -> None:
        self.runner = Runner(spec, single(), progress)
        self.info = self.runner.info()
        self.scheduler = Scheduler(
            max_rows=self.info.max_rows,
            step_tokens=self.info.step_tokens,
            mixed_tokens=spec.mixed_tokens,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            blocks=self.info.kv_blocks,
            prefix_cache=spec.prefix_cache,
        )
        self.core = EngineCore(self.scheduler, self.runner, overlap=spec.overlap)
        self.finished: list[Finished] = []
        """The ledger of all calls."""
        self.timings: list[StepTiming] = []
        """Of each step of all calls."""
        self._handles = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        n: int = 1,
        cache_salt: str = "",
    ) -> list[list[Generated]]:
        """All prompts at once; for each its n samples. `sampling` is one for all or one for each."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers: dict[int, list[Generated]] = {}
        for prompt, params in zip(prompts, each, strict=True):
            self._handles += 1
            answers[self._handles] = [Generated() for _ in range(n)]
            self.core.submit(
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
        """Ends the runner's thread."""
        self.runner.close()

    def _take(self, result: StepResult, answers: dict[int, list[Generated]]) -> None:
        self.finished.extend(result.finished)
        if result.timing is not None:
            self.timings.append(result.timing)
        for output in result.outputs.get(_ORIGIN, []):
            _append(answers[output.handle][output.sample], output)


def _append(sample: Generated, output: Output) -> None:
    sample.token_ids.extend(output.token_ids)
    sample.finish = output.finish
    sample.error = output.error
    sample.logprobs.extend(output.logprobs or [])
    if output.prompt_logprobs is not None:
        sample.prompt_logprobs = output.prompt_logprobs
    if output.cached_tokens is not None:
        sample.cached_tokens = output.cached_tokens
