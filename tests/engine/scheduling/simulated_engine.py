"""An engine on the simulated runner, for tests of the scheduler."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core import EngineCore
from engine.messages import Output, SamplingParams, Submit, pack_tokens
from engine.plan import StepPlan, StepTokens
from engine.rank_messages import Finished
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import VOCAB, SimulatedRunner, SimulatedStep, alone

FRONT = "front-0"


class SimulatedEngine:
    """An engine on the simulated runner, which records all of its outputs."""

    def __init__(self, *, overlap: bool = True, runner: Any = None, **sizes: Any) -> None:
        sizes = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "max_model_len": 512,
            "blocks": 64,
            **sizes,
        }
        self.scheduler = Scheduler(vocab_size=VOCAB, **sizes)
        self.runner = runner or SimulatedRunner(sizes["max_num_seqs"], sizes["blocks"])
        self.core = EngineCore(self.scheduler, self.runner, overlap=overlap)
        self.outputs: list[Output] = []
        self.finished: list[Finished] = []
        self.handles = 0

    def submit(self, prompt: list[int] | bytes | int, *, front: str = FRONT, **fields: Any) -> Submit:
        """Submit `prompt`, which is given as tokens, as packed tokens or as a length. `fields` are fields of
        Submit or of SamplingParams."""
        self.handles += 1
        if isinstance(prompt, int):
            prompt = [(7 * self.handles + i) % VOCAB for i in range(prompt)]
        sampling = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
        submit = Submit(
            handle=self.handles,
            request_id=fields.pop("request_id", f"request-{self.handles}"),
            prompt=prompt if isinstance(prompt, bytes) else pack_tokens(prompt),
            sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
            **fields,
        )
        self.scheduler.add(front, submit)
        return submit

    def step(self) -> StepPlan | None:
        """Run one iteration of the step loop, and return the plan that it launched."""
        before = len(self.runner.plans)
        result = self.core.step()
        for outputs in result.outputs.values():
            self.outputs += outputs
        self.finished += result.finished
        self.scheduler.check()
        return self.runner.plans[-1] if len(self.runner.plans) > before else None

    def waited_for(self) -> bool:
        """Run one iteration of the step loop. Return whether the engine counted the idle time before its
        step."""
        self.runner.gap_us = 7.0
        timing = self.core.step().timing
        assert timing is not None and timing.idle_us in (0.0, 7.0)
        return timing.idle_us == 7.0

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish within the step limit")

    def told(self, submit: Submit, sample: int = 0) -> tuple[list[int], str]:
        """Return the tokens and the finish reason of a sample, as they were sent to its front process."""
        mine = [o for o in self.outputs if (o.handle, o.sample) == (submit.handle, sample)]
        return [token for o in mine for token in o.token_ids], mine[-1].finish_reason

    def expect_alone(self, submit: Submit) -> None:
        for sample in range(submit.first_sample, submit.first_sample + submit.n):
            expected = alone(submit, sample, self.scheduler.limits.max_model_len)
            assert self.told(submit, sample) == (expected.tokens, expected.finish_reason)


def first_tokens(submit_like: Submit, count: int) -> list[int]:
    sampling = msgspec.structs.replace(
        submit_like.sampling, stop_token_ids=(), max_tokens=count, min_tokens=0
    )
    return alone(msgspec.structs.replace(submit_like, sampling=sampling), 0, 10_000).tokens


both_overlaps = pytest.mark.parametrize("overlap", [False, True])


class AlwaysStop:
    """A runner that always samples token 0, even where min_tokens forbids it."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self.plans.append(plan)
        rows = len(plan.decodes) + sum(len(chunk.sample_slots) for chunk in plan.chunks)
        return SimulatedStep(StepTokens([0] * rows, None, {}))
