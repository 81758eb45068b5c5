"""A fake replica for the front process tests. It implements the replica's side of the data channel, and a
script determines the tokens that it generates."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from engine.client import Channel
from engine.messages import Cancel, DataInbound, Output, StepFrame, Submit, TokenLogprob
from tests.prompts import prompt_of

Script = Callable[[Submit, int], list[int]]
"""A function that returns all output tokens of a sample, given the submission and the sample's index in the
request."""


@dataclass
class _Running:
    submit: Submit
    sample: int
    tokens: list[int]
    position: int
    first: bool = True


class FakeReplica:
    """The replica's side of the data channel. It must be used only on the harness's event loop."""

    def __init__(self, name: str, sock: socket.socket, script: Script, step_s: float) -> None:
        self.name = name
        self.script = script
        self.step_s = step_s
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.running: list[_Running] = []
        self.burst = 1
        """Number of tokens generated for each sample after every pause of `step_s`."""
        self.hold = False
        """Whether the replica is paused."""
        self.die_after: int | None = None
        """Number of steps after which the replica dies, or None if it does not die."""
        self.fail_with: str | None = None
        """Error that ends every submission, or None."""
        self.fail_refuses = True
        """Whether `fail_with` is reported as a refusal of the request's content."""
        self.channel: Channel[DataInbound] = Channel(sock, DataInbound)
        self.channel.listen(self._take, lambda: None)
        self.steps = 0
        """Number of steps that the replica has run."""
        self._task: asyncio.Task[None] | None = None

    def _take(self, message: DataInbound) -> None:
        if isinstance(message, Cancel):
            self.cancels.append(message)
            ended = [
                run
                for run in self.running
                if run.submit.handle == message.handle and message.sample in (None, run.sample)
            ]
            for run in ended:
                self.running.remove(run)
            self._send([Output(run.submit.handle, run.sample, [], "cancelled") for run in ended])
            return
        self.submits.append(message)
        samples = range(message.first_sample, message.first_sample + message.n)
        if self.fail_with is not None:
            self._send(
                [
                    Output(
                        message.handle,
                        sample,
                        [],
                        "error",
                        error=self.fail_with,
                        refused=self.fail_refuses,
                    )
                    for sample in samples
                ]
            )
            return
        for sample in samples:
            tokens = self.script(message, sample)
            self.running.append(_Running(message, sample, tokens, len(message.output_token_ids)))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._generate())

    async def _generate(self) -> None:
        while self.running and not self.channel.closed:
            await asyncio.sleep(self.step_s)
            for _ in range(self.burst):
                if self.running and not self.hold:
                    self.step()

    def step(self) -> None:
        """Generate one token for every running sample."""
        self.steps += 1
        if self.die_after is not None:
            self.die_after -= 1
            if self.die_after < 0:
                self.die()
                return
        outputs = [self._output(run) for run in self.running]
        self.running = [
            run for run, output in zip(self.running, outputs, strict=True) if not output.finish_reason
        ]
        self._send(outputs)

    def _output(self, run: _Running) -> Output:
        submit, sampling = run.submit, run.submit.sampling
        if not sampling.max_tokens:
            token_ids, token_id = [], -1
        else:
            token_ids = [token_id := run.tokens[run.position % len(run.tokens)]]
        run.position += 1
        stops = not sampling.ignore_eos and token_id in sampling.stop_token_ids
        finish_reason = "stop" if stops else "length" if run.position >= sampling.max_tokens else ""
        output = Output(submit.handle, run.sample, token_ids, finish_reason)
        if token_ids and sampling.logprobs is not None:
            output.logprobs = [_logprob(token_id, sampling.logprobs)]
        if run.first:
            run.first = False
            output.cached_tokens = 2
            if sampling.prompt_logprobs is not None and run.sample == submit.first_sample:
                later = [_logprob(i, sampling.prompt_logprobs) for i in prompt_of(submit)[1:]]
                output.prompt_logprobs = [None, *later]
        return output

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self.channel.send(StepFrame(self.steps, outputs))

    def die(self) -> None:
        """Close the channel, as if the process had been killed."""
        self.running.clear()
        self.channel.close()


def _logprob(token_id: int, alternatives: int) -> TokenLogprob:
    top = [(token_id, -0.25), *((other, -2.0 - other) for other in range(40, 60) if other != token_id)]
    return TokenLogprob(token_id, -0.25, top[:alternatives])
