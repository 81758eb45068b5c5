"""Tests of the channels on which rank 0 sends plans to the other ranks."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from engine.core import EngineCore
from engine.parallel import RankFailureError
from engine.plan import Chunk, StepPlan, StepTokens
from engine.plan_channel import PlanSender
from engine.rank_messages import (
    RankInbound,
    RankOutbound,
)
from engine.replica import follow
from engine.scheduling.scheduler import Scheduler
from engine.wire import Channel, socketpair
from tests.engine.rank_loops import WAIT_S, Outcome, channel_pair, submit
from tests.engine.scheduling.simulated_runner import VOCAB


class FailsLater:
    """A stand-in for a step that fails after some time."""

    host_gap_us = 0.0

    def __init__(self) -> None:
        self._at = time.monotonic() + 0.2

    def ready(self) -> bool:
        return time.monotonic() >= self._at

    def wait(self) -> StepTokens:
        raise RuntimeError("the step failed")


class FailingRunner:
    def launch(self, plan: StepPlan) -> FailsLater:
        return FailsLater()


def test_a_failed_step_on_a_following_rank_is_detected_without_another_plan() -> None:
    core, control = channel_pair(RankOutbound, RankInbound)
    leader, plans = channel_pair(RankInbound, StepPlan)
    following = Outcome(follow, control, plans, FailingRunner())
    leader.send(StepPlan(1, [], [], [], [], []))
    following.thread.join(WAIT_S)
    assert str(following.error) == "the step failed"
    core.close()


class Together:
    """The device of one of two ranks. A step ends when both ranks have launched it, like a collective."""

    host_gap_us = 0.0

    def __init__(self, mine: threading.Event, other: threading.Event) -> None:
        self._mine, self._other = mine, other

    def launch(self, plan: StepPlan) -> Together:
        self._mine.set()
        return self

    def ready(self) -> bool:
        return self._other.is_set()

    def wait(self) -> StepTokens:
        assert self._other.wait(WAIT_S), "the other rank never ran the step"
        return StepTokens([7], None, {})


def narrow_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets with buffers of only a few kilobytes."""
    pair = socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return pair


def large_plan(step: int) -> StepPlan:
    """Return a plan that is many times larger than the buffers of the sockets from `narrow_pair`."""
    return StepPlan(step, [], [], [], [], [Chunk(0, 0, list(range(100_000)), [])])


def all_received(channel: Channel[Any], plans: int) -> list[StepPlan]:
    received: list[StepPlan] = []
    deadline = time.monotonic() + WAIT_S
    while len(received) < plans:
        assert time.monotonic() < deadline, f"{len(received)} of {plans} plans arrived"
        select.select([channel], [], [], 1.0)
        received += channel.read()
    return received


def test_rank_0_does_not_wait_for_a_peer_that_reads_slowly() -> None:
    left, right = narrow_pair()
    sender = PlanSender([left])
    small = StepPlan(3, [], [], [], [0, 1], [])
    sending = Outcome(lambda: [sender.send(plan) for plan in (large_plan(1), large_plan(2), small)])
    sending.thread.join(WAIT_S)
    assert not sending.thread.is_alive() and sending.error is None
    # The peer starts to read only now. All plans must arrive complete and in order.
    received = all_received(Channel(right, StepPlan), 3)
    assert received == [large_plan(1), large_plan(2), small]


def test_rank_0_waits_for_the_plan_of_a_step_and_not_for_later_plans() -> None:
    left, right = narrow_pair()
    sender = PlanSender([left])
    small = StepPlan(1, [], [], [], [0], [])
    sender.send(small)
    sender.send(large_plan(2))
    flushing = Outcome(sender.flush, 1)
    flushing.thread.join(WAIT_S)
    assert not flushing.thread.is_alive() and flushing.error is None
    flushing = Outcome(sender.flush, 2)
    flushing.thread.join(0.2)
    assert flushing.thread.is_alive(), "most of the second plan has not been written yet"
    assert all_received(Channel(right, StepPlan), 2) == [small, large_plan(2)]
    flushing.thread.join(WAIT_S)
    assert not flushing.thread.is_alive() and flushing.error is None


def test_a_plan_is_encoded_once_for_all_peers() -> None:
    pairs = [socketpair() for _ in range(3)]
    sender = PlanSender([left for left, _ in pairs])
    encoded = []

    class Counting:
        def encode(self, message: Any) -> bytes:
            encoded.append(message)
            return msgspec.msgpack.encode(message)

    sender._encoder = Counting()  # type: ignore[assignment]
    plan = StepPlan(1, [], [], [], [0], [])
    sender.send(plan)
    assert encoded == [plan]
    assert [all_received(Channel(right, StepPlan), 1) for _, right in pairs] == [[plan]] * 3


def test_a_peer_that_does_not_read_for_long_is_lost() -> None:
    left, right = narrow_pair()
    sender = PlanSender([left], timeout_s=0.2)
    sender.send(large_plan(1))
    with pytest.raises(
        RankFailureError, match=r"rank 1 did not read a plan for 0\.2 s; restart the whole replica"
    ):
        sender.flush(1)
    with pytest.raises(RankFailureError, match="rank 1 did not read"):
        sender.send(large_plan(2))
    right.close()


def test_a_peer_that_dies_during_a_plan_is_lost() -> None:
    left, right = narrow_pair()
    sender = PlanSender([left])
    sender.send(large_plan(1))
    flushing = Outcome(sender.flush, 1)
    right.close()
    flushing.thread.join(WAIT_S)
    assert isinstance(flushing.error, RankFailureError)
    assert "rank 1 closed its plan channel (Broken pipe)" in str(flushing.error)


def test_the_loss_of_a_peer_is_reported_once() -> None:
    left, right = socketpair()
    right.close()
    reasons: list[str] = []
    sender = PlanSender([left], reasons.append)
    with pytest.raises(RankFailureError):
        sender.send(large_plan(1))
    for thread in threading.enumerate():
        if thread.name == "engine-plans":
            thread.join(WAIT_S)
    assert reasons == ["rank 1 closed its plan channel (Broken pipe)"]


def test_a_step_with_a_large_plan_runs_on_both_ranks() -> None:
    core, control = channel_pair(RankOutbound, RankInbound)
    left, right = narrow_pair()
    arrived, launched = threading.Event(), threading.Event()
    following = Outcome(follow, control, Channel(right, StepPlan), Together(arrived, launched))
    scheduler = Scheduler(
        max_num_seqs=1, max_num_batched_tokens=50_000, max_model_len=60_000, vocab_size=VOCAB, blocks=1000
    )
    engine = EngineCore(scheduler, Together(launched, arrived), plans=PlanSender([left]))
    scheduler.add("front", submit(1, 1, prompt=50_000))
    timings = []

    def lead() -> None:
        while engine.has_work:
            timings.append(engine.step().timing)

    leading = Outcome(lead)
    leading.thread.join(2 * WAIT_S)
    assert leading.error is None and not leading.thread.is_alive()
    assert any(timing and timing.plan_us > 0 for timing in timings)
    core.close()
    following.thread.join(WAIT_S)
    assert following.error is None
