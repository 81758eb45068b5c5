"""Tests of the client in a front process. The test simulates the replica."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.messages import (
    Cancel,
    DataInbound,
    Output,
    SamplingParams,
    StepFrame,
    Submit,
    TokenLogprob,
    pack_tokens,
)
from engine.wire import Channel, socketpair
from tests.engine.streaming_client import ReplicaDisconnectedError, StreamingClient


class Played:
    """A simulated replica's end of the channel. It answers each sample immediately with one token, unless
    `silent` is true."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        self.silent = False
        self.received: list[Any] = []
        self.channel: Channel[Any] = Channel(theirs, DataInbound)
        self.channel.listen(self._take, lambda: None)
        self.disconnected: list[list[int]] = []
        self.client = StreamingClient(ours, self.disconnected.append)

    def _take(self, message: Any) -> None:
        self.received.append(message)
        if isinstance(message, Submit) and not self.silent:
            outputs = [Output(message.handle, sample, [7], "length") for sample in range(message.n)]
            self.channel.send(StepFrame(1, outputs))

    def ask(self, n: int = 1) -> Submit:
        handle = self.client.next_handle()
        return Submit(
            handle=handle,
            request_id=f"r{handle}",
            prompt=pack_tokens([1]),
            n=n,
            sampling=SamplingParams(max_tokens=1),
        )


async def drain(played: Played, submit: Submit) -> int:
    return sum([len(output.token_ids) async for output in played.client.generate(submit)])


def test_a_channel_serves_thousands_of_requests_before_its_replica_dies() -> None:
    async def scenario() -> None:
        played = Played()
        for _ in range(2000):
            assert await drain(played, played.ask(n=2)) == 2
        played.silent = True
        waiting = asyncio.create_task(drain(played, played.ask()))
        while len(played.received) < 2001:
            await asyncio.sleep(0)
        played.channel.close()
        with pytest.raises(ReplicaDisconnectedError, match="closed while request r2001 was running"):
            await waiting
        assert played.disconnected == [[2001]]
        with pytest.raises(ReplicaDisconnectedError, match="closed before request r2002 was submitted"):
            await drain(played, played.ask())

    asyncio.run(scenario())


def test_closing_the_iterator_early_cancels_the_submission() -> None:
    async def scenario() -> None:
        played = Played()
        played.silent = True
        submit = played.ask()
        waiting = asyncio.create_task(drain(played, submit))
        while not played.received:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(60):
            while len(played.received) < 2:
                await asyncio.sleep(0)
        assert played.received == [submit, Cancel(submit.handle)]

    asyncio.run(scenario())


def test_prompt_logprobs_of_the_longest_prompts_fit_into_a_frame() -> None:
    """The logprobs of a token with 20 alternatives take 318 bytes, so the logprobs of 262,144 tokens exceed
    the default frame limit."""
    alternatives = [(1 << 17, -1.5)] * 20
    size = len(msgspec.msgpack.encode(TokenLogprob(1 << 17, -1.5, alternatives)))
    assert size == 318

    async def scenario() -> None:
        played = Played()
        played.silent = True
        submit = played.ask()
        answers: list[Output] = []
        played.client.submit(submit, answers.append)
        # Encode a string with the same number of bytes, because it is faster to build than the logprobs.
        played.channel.send(
            StepFrame(1, [Output(submit.handle, 0, [], "error", error="x" * (262_144 * size))])
        )
        async with asyncio.timeout(60):
            while not (answers or played.disconnected):
                await asyncio.sleep(0.01)
        assert not played.disconnected
        assert len(answers[0].error or "") == 262_144 * size

    asyncio.run(scenario())
