"""Tests of rank 0's loop, with real channels."""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from engine import leader, wire
from engine.core import EngineCore
from engine.leader import LeaderLoop
from engine.messages import Cancel, Output, SamplingParams, StepFrame
from engine.plan import Chunk, MemoryPlan, RankPlan, StepPlan, StepTokens
from engine.rank_messages import (
    AskBlocks,
    Attach,
    BlockUse,
    LongStep,
    MemoryChanged,
    RankInbound,
    RankOutbound,
    Report,
    Sleep,
    Stop,
    Wake,
)
from engine.replica import follow
from engine.scheduling.scheduler import Scheduler
from engine.sleeping import SleepControl
from engine.step_forecast import StepForecast
from engine.wire import Channel, socketpair
from tests.engine.rank_loops import WAIT_S, Outcome, channel_pair, submit
from tests.engine.scheduling.simulated_runner import VOCAB, SimulatedRunner, SimulatedStep


def a_forecast() -> StepForecast:
    return StepForecast(parameters=1000, attention_width=64, on_gpu=False)


def engine_of_four_slots() -> EngineCore:
    """Return an engine with four slots on a simulated device."""
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=2000, vocab_size=VOCAB, blocks=80
    )
    return EngineCore(scheduler, SimulatedRunner(4, 80))


class SlowMemory:
    """Simulated memory whose operations complete only when the test allows it."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.futures: list[Future[MemoryChanged]] = []

    def change_memory(self, asleep: bool) -> Future[MemoryChanged]:
        self.asked.append(asleep)
        self.futures.append(Future())
        return self.futures[-1]


def loop_of(
    control: Channel[Any], forecast: StepForecast | None = None, memory: SlowMemory | None = None
) -> LeaderLoop:
    """Return rank 0's loop over a simulated device."""
    engine = engine_of_four_slots()
    return LeaderLoop(engine, control, forecast or a_forecast(), SleepControl(engine, memory or SlowMemory()))


class Served:
    """Rank 0's loop over a simulated device, with one front."""

    def __init__(self) -> None:
        self.core, control = channel_pair(RankOutbound, RankInbound)
        self.reports: list[Report] = []
        self.changes: list[MemoryChanged] = []
        self.blocks: list[BlockUse] = []
        self.memory = SlowMemory()
        self.replica = loop_of(control, memory=self.memory)
        self.loop = Outcome(self.replica.run)

    def attach(self, name: str, send_buffer: int = 1 << 16) -> socket.socket:
        ours, theirs = socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.core.send(Attach(name), (theirs.fileno(),))
        theirs.close()
        return ours

    def wait_for(self, condition: Any) -> Any:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            assert self.loop.error is None, self.loop.error
            self._read()
            found = [report for report in self.reports if condition(report)]
            if found:
                return found[0]
            time.sleep(0.01)
        raise AssertionError(
            f"none of {len(self.reports)} reports satisfies the condition; the last is {self.reports[-1:]}"
        )

    def wait_for_change(self) -> MemoryChanged:
        """Return the next reply to Sleep or Wake."""
        until(lambda: (self._read(), self.changes)[1])
        return self.changes.pop(0)

    def _read(self) -> None:
        for message in self.core.read():
            if isinstance(message, MemoryChanged):
                self.changes.append(message)
            elif isinstance(message, BlockUse):
                self.blocks.append(message)
            else:
                self.reports.append(message)

    def stop(self) -> None:
        self.core.send(Stop())
        self.loop.thread.join(WAIT_S)
        assert not self.loop.thread.is_alive()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def receive(front: Channel[Any], enough: Callable[[list[Output]], bool]) -> list[Output]:
    """Read outputs, and return them as soon as `enough` returns true for them."""
    outputs: list[Output] = []
    deadline = time.monotonic() + WAIT_S
    while not enough(outputs):
        assert time.monotonic() < deadline, f"only {len(outputs)} outputs were received"
        select.select([front], [], [], 0.1)
        outputs += [output for frame in front.read() for output in frame.outputs]
    return outputs


def test_a_front_that_never_reads_is_disconnected_and_its_requests_are_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    # The socket's buffer has space for only a few frames, so the front's outputs exceed the backlog limit.
    monkeypatch.setattr(wire, "MAX_BACKLOG_BYTES", 2000)
    silent: Channel[Any] = Channel(served.attach("front-0", send_buffer=1), StepFrame)
    for handle in range(1, 4):
        silent.send(submit(handle, 1900))
    report = served.wait_for(lambda report: report.disconnected_fronts)
    assert report.disconnected_fronts == ["front-0"]
    finished = [entry for each in served.reports for entry in each.finished]
    # The report omits submissions that were still unread in the channel, because the core itself reclaims
    # their credit.
    assert 1 <= len(finished) <= 3
    assert all(entry.finish_reason == ["cancelled"] for entry in finished)
    # The next front gets the same descriptor number. The loop must serve the next front's requests.
    follower: Channel[Any] = Channel(served.attach("front-1"), StepFrame)
    follower.send(submit(1, 5))
    outputs = receive(follower, lambda outputs: bool(outputs and outputs[-1].finish_reason))
    assert sum(len(output.token_ids) for output in outputs) == 5
    served.stop()


def test_a_backlog_for_a_front_is_sent_while_no_step_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader, "HEARTBEAT_S", 3600.0)
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0", send_buffer=1), StepFrame)
    asked = submit(1, 0, prompt=1900)
    front.send(msgspec.structs.replace(asked, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0)))
    served.wait_for(lambda report: report.finished)
    # The only output contains the logprobs of the whole prompt, and is several times larger than the socket
    # buffer.
    (output,) = receive(front, lambda outputs: bool(outputs))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 1900
    # No work is left. The loop must no longer poll the socket for writability, so that it can sleep.
    deadline = time.monotonic() + WAIT_S
    watched = served.replica._selector.get_map()
    while any(key.events != selectors.EVENT_READ for key in watched.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.stop()


def test_a_new_front_may_reuse_the_descriptor_number_of_a_closed_one() -> None:
    core, control = channel_pair(RankOutbound, RankInbound)
    loop = loop_of(control)
    (first, theirs), (second, its) = socketpair(), socketpair()
    core.send(Attach("front-0"), (theirs.fileno(),))
    loop._read_messages()
    theirs.close()
    number = loop._fronts["front-0"].fileno()
    loop._read_messages()
    # Both events are handled in the same iteration, the end of file first. The new front gets the old front's
    # descriptor number, because no lower number is free.
    first.shutdown(socket.SHUT_RDWR)
    core.send(Attach("front-1"), (its.fileno(),))
    fillers = [second.dup()]
    while fillers[-1].fileno() < number:
        fillers.append(second.dup())
    loop._read_messages()
    assert {name: channel.fileno() for name, channel in loop._fronts.items()} == {"front-1": number}
    for end in (first, second, its, *fillers):
        end.close()


def test_a_protocol_violation_disconnects_only_that_front() -> None:
    served = Served()
    broken = served.attach("front-0")
    well: Channel[Any] = Channel(served.attach("front-1"), StepFrame)
    broken.send(b"\xff" * 100)
    assert served.wait_for(lambda report: report.disconnected_fronts).disconnected_fronts == ["front-0"]
    well.send(submit(1, 5))
    served.wait_for(lambda report: report.finished)
    served.stop()


def test_an_attach_message_without_its_descriptor_disconnects_only_that_front() -> None:
    served = Served()
    served.core.send(Attach("front-0"))
    assert served.wait_for(lambda report: report.disconnected_fronts).disconnected_fronts == ["front-0"]
    well: Channel[Any] = Channel(served.attach("front-1"), StepFrame)
    well.send(submit(1, 5))
    served.wait_for(lambda report: report.finished)
    served.stop()


def test_while_steps_run_reports_are_more_frequent_than_gateways_require(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert leader.REPORT_S < 0.2
    monkeypatch.setattr(leader, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(leader, "REPORT_S", 0.01)
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0"), StepFrame)
    front.send(submit(1, 1900))
    # Only periodic reports are sent here, because one sequence decodes and no credit changes.
    seen = served.wait_for(lambda report: report.generated_tokens > 200)
    assert (seen.running, seen.finished) == (1, [])
    assert seen.blocks_used > 3
    served.stop()
    front.close()


def test_a_long_step_is_announced_before_rank_0_waits_for_it() -> None:
    core, control = channel_pair(RankOutbound, RankInbound)
    slow = StepForecast(parameters=10_000_000_000, attention_width=1, on_gpu=False)
    loop_of(control, slow)._announce(StepPlan(1, [], [], [], [], [Chunk(0, 0, list(range(64)), [0])]))
    fast = StepForecast(parameters=1000, attention_width=1, on_gpu=False)
    loop_of(control, fast)._announce(StepPlan(2, [], [], [], [0], []))
    (message,) = core.read()
    assert isinstance(message, LongStep) and message.expected_s > 1000


def test_reports_continue_during_an_operation_and_while_the_replica_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader, "HEARTBEAT_S", 0.02)
    served = Served()
    served.core.send(Sleep())
    until(lambda: served.memory.asked == [True])
    served.reports.clear()
    served.wait_for(lambda report: len(served.reports) > 3)
    assert served.changes == []
    served.memory.futures[0].set_result(MemoryChanged(True, freed_bytes=7))
    assert served.wait_for_change() == MemoryChanged(True, freed_bytes=7)
    served.reports.clear()
    served.wait_for(lambda report: len(served.reports) > 3)
    served.stop()


def test_a_submission_that_arrives_while_the_replica_sleeps_runs_when_it_is_awake() -> None:
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0"), StepFrame)
    served.core.send(Sleep())
    until(lambda: served.memory.asked == [True])
    served.memory.futures[0].set_result(MemoryChanged(True))
    assert served.wait_for_change().asleep
    front.send(submit(1, 5))
    served.wait_for(lambda report: report.waiting == 1)
    front.send(submit(2, 5))
    front.send(Cancel(2))
    # A cancelled submission must end even if no step runs.
    assert [output.finish_reason for output in receive(front, lambda outputs: bool(outputs))] == ["cancelled"]
    assert served.wait_for(lambda report: report.finished).running == 0
    served.core.send(Wake())
    until(lambda: served.memory.asked == [True, False])
    served.memory.futures[1].set_result(MemoryChanged(False))
    assert not served.wait_for_change().asleep
    outputs = receive(front, lambda outputs: bool(outputs and outputs[-1].finish_reason))
    assert sum(len(output.token_ids) for output in outputs) == 5
    served.stop()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step take 10 ms, so that a request for 1900 tokens is still running when the test continues,
    even on a busy machine."""

    def wait(step: SimulatedStep) -> StepTokens:
        time.sleep(0.01)
        return step.tokens

    monkeypatch.setattr(SimulatedStep, "wait", wait)


@pytest.mark.usefixtures("slow_steps")
def test_a_replica_with_unfinished_sequences_refuses_to_sleep_and_continues() -> None:
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0"), StepFrame)
    front.send(submit(1, 1900))
    served.wait_for(lambda report: report.running == 1)
    served.core.send(Sleep())
    assert served.wait_for_change() == MemoryChanged(False, problem="unfinished sequences: 1")
    assert served.memory.asked == []
    front.send(submit(2, 5))
    served.wait_for(lambda report: report.finished)
    served.stop()


@pytest.mark.usefixtures("slow_steps")
def test_a_closed_channel_is_reported_once_all_of_its_submissions_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the channel is reported, the core takes back the credit of the front's remaining submissions."""
    monkeypatch.setattr("engine.scheduling.results.MAX_RELEASED", 0)
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0"), StepFrame)
    for handle in range(1, 4):
        front.send(submit(handle, 1900))
    served.wait_for(lambda report: report.running == 3)
    front.close()
    reported = served.wait_for(lambda report: report.disconnected_fronts)
    until_then = served.reports[: served.reports.index(reported) + 1]
    assert sum(len(report.finished) for report in until_then) == 3
    served.stop()


def test_the_prefix_cache_is_empty_after_a_sleep_but_not_after_a_failed_one() -> None:
    served = Served()
    front: Channel[Any] = Channel(served.attach("front-0"), StepFrame)

    def cached_tokens(handle: int) -> int:
        front.send(submit(handle, 1, prompt=200))
        report = served.wait_for(lambda report: report.finished)
        served.reports.clear()
        return report.finished[0].cached_tokens

    assert [cached_tokens(1), cached_tokens(2)] == [0, 192]
    for number, outcome in enumerate(
        (MemoryChanged(False, problem="no host memory"), MemoryChanged(True), MemoryChanged(False))
    ):
        served.core.send(Wake() if number == 2 else Sleep())
        until(lambda number=number: len(served.memory.futures) > number)
        served.memory.futures[number].set_result(outcome)
        assert served.wait_for_change() == outcome
        if number == 0:
            assert cached_tokens(3) == 192
    assert [cached_tokens(4), cached_tokens(5)] == [0, 192]
    served.stop()


def test_an_operation_after_which_the_replica_cannot_continue_ends_the_loop() -> None:
    served = Served()
    served.core.send(Sleep())
    until(lambda: served.memory.futures)
    served.memory.futures[0].set_exception(RuntimeError("the driver failed"))
    served.loop.thread.join(WAIT_S)
    assert str(served.loop.error) == "the driver failed"


def test_another_rank_changes_its_memory_between_the_steps_around_the_plan() -> None:
    core, control = channel_pair(RankOutbound, RankInbound)
    leader, plans = channel_pair(RankInbound, RankPlan)
    events: list[object] = []

    class Recording:
        def launch(self, plan: StepPlan) -> SimulatedStep:
            events.append(plan.step)
            return SimulatedStep(StepTokens([], None, {}))

        def change_memory(self, asleep: bool) -> Future[MemoryChanged]:
            events.append(asleep)
            future: Future[MemoryChanged] = Future()
            future.set_result(MemoryChanged(asleep))
            return future

    following = Outcome(follow, control, plans, Recording())
    for plan in (step_plan(1), MemoryPlan(1, True), MemoryPlan(1, False), step_plan(2)):
        leader.send(plan)
    until(lambda: len(events) == 4)
    assert events == [1, True, False, 2]
    core.close()
    following.thread.join(WAIT_S)
    assert following.error is None


def step_plan(number: int) -> StepPlan:
    return StepPlan(number, [], [], [], [], [])


@pytest.mark.usefixtures("slow_steps")
def test_the_blocks_are_sent_on_request_while_steps_run_and_while_the_replica_is_idle() -> None:
    served = Served()
    front = Channel[Any](served.attach("front-0"), StepFrame)
    front.send(submit(1, most=1900))
    front.flush()
    served.wait_for(lambda report: report.running)
    served.core.send(AskBlocks())
    served.core.send(AskBlocks())
    until(lambda: (served._read(), served.blocks)[1])
    use = served.blocks.pop(0)
    assert [one.request_id for one in use.requests] == ["request-1"]
    assert 2 in use.states and len(use.states) == 80
    front.send(Cancel(1))
    front.flush()
    served.wait_for(lambda report: report.finished)
    served.blocks.clear()
    served.core.send(AskBlocks())
    until(lambda: (served._read(), served.blocks)[1])
    assert served.blocks[0].requests == [] and 2 not in served.blocks[0].states
    served.stop()
