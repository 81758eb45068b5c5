"""Measures the host's CPU time per step for a submission with many samples of a long prompt.

    python -m tests.engine.scheduling.host_times --samples 128 --prompt 131000

No device is used: the block tables are updated on the host, and every sample generates token 1. The intake of
a submission consists of reading it from the front's channel and queueing it. After the loss of a replica, the
front sends a separate submission for every sample, and the slowest intake of these submissions is reported.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import msgspec
import torch

from engine.device_tables import SlotTables
from engine.garbage import settle_garbage
from engine.messages import BLOCK_TOKENS, DataInbound, SamplingParams, Submit, pack_tokens
from engine.plan import StepPlan, StepTokens
from engine.scheduling.scheduler import Scheduler
from engine.wire import Channel, socketpair
from tests.engine.scheduling.simulated_runner import sampling_slots

VOCAB = 1000


@dataclass(frozen=True)
class StepCost:
    """CPU time that the host needs for one step."""

    step: int
    plan_ms: float
    apply_ms: float
    collect_ms: float
    entries: int
    """Number of entries in the plan's block table updates: the new blocks, and the slots that share
    blocks."""
    plan_bytes: int

    @property
    def host_ms(self) -> float:
        return self.plan_ms + self.apply_ms + self.collect_ms


@dataclass(frozen=True)
class IntakeCost:
    """CPU time that the host needs for the intake of one submission."""

    read_ms: float
    queue_ms: float


def entries(plan: StepPlan) -> int:
    return len(plan.blocks) + sum(len(slots) for _, _, slots in plan.shares)


def measure(
    *, prompt: int, samples: int, slots: int, output: int = 70, cached: bool = False, resumed: bool = False
) -> tuple[IntakeCost, list[StepCost]]:
    """Run the submission to completion. Returns the cost of its intake and of each step. With `cached`, an
    earlier submission has left the prompt in the prefix cache. With `resumed`, another replica has already
    generated the first tokens of each sample, so every sample is a separate submission."""
    blocks = 2 * (prompt + output) // BLOCK_TOKENS + 4 * samples
    scheduler = Scheduler(
        max_num_seqs=slots,
        max_num_batched_tokens=8192,
        max_model_len=prompt + output,
        vocab_size=VOCAB,
        blocks=blocks,
    )
    tables = SlotTables(slots, -(-(prompt + output) // BLOCK_TOKENS), VOCAB, torch.device("cpu"))

    packed = pack_tokens([index % VOCAB for index in range(prompt)])

    def submission(handle: int, n: int, max_tokens: int, emitted: int = 0) -> Submit:
        return Submit(
            handle=handle,
            request_id="wide",
            prompt=packed,
            output_token_ids=[1] * emitted,
            n=n,
            sampling=SamplingParams(max_tokens=max_tokens),
        )

    if cached:
        scheduler.add("front", submission(1, 1, 1))
        _run(scheduler, tables)
    submits = [submission(2, samples, output)]
    if resumed:
        submits = [submission(2 + number, 1, output, emitted=10) for number in range(samples)]
    intakes = [_take_in(scheduler, submit) for submit in submits]
    slowest = max(intakes, key=lambda intake: intake.read_ms + intake.queue_ms)
    return slowest, _run(scheduler, tables)


def _take_in(scheduler: Scheduler, submit: Submit) -> IntakeCost:
    submit, read_ms = receive(submit)
    began = time.thread_time()
    scheduler.add("front", submit)
    return IntakeCost(read_ms, 1e3 * (time.thread_time() - began))


def receive(submit: Submit) -> tuple[Submit, float]:
    """Send a submission through a channel. Returns the received submission and the CPU time of the reads in
    milliseconds."""
    front, replica = socketpair()
    sender: Channel[object] = Channel(front, object)
    receiver: Channel[DataInbound] = Channel(replica, DataInbound)
    sender.send(submit)
    messages: list[DataInbound] = []
    seconds = 0.0
    while not messages:
        sender.flush()
        began = time.thread_time()
        messages = receiver.read()
        seconds += time.thread_time() - began
    sender.close()
    receiver.close()
    (received,) = messages
    assert isinstance(received, Submit)
    return received, 1e3 * seconds


def _run(scheduler: Scheduler, tables: SlotTables) -> list[StepCost]:
    """Run steps until no work is left. Returns the cost of each step."""
    costs: list[StepCost] = []
    while scheduler.has_work:
        began = time.thread_time()
        step = scheduler.schedule()
        planned = time.thread_time()
        assert step is not None
        tables.apply(step.plan)
        applied = time.thread_time()
        tokens = StepTokens([1] * len(sampling_slots(step.plan)), None, {})
        sampled = time.thread_time()
        scheduler.collect(step, tokens)
        scheduler.accounting.take()
        collected = time.thread_time()
        costs.append(
            StepCost(
                step.plan.step,
                1e3 * (planned - began),
                1e3 * (applied - planned),
                1e3 * (collected - sampled),
                entries(step.plan),
                len(msgspec.msgpack.encode(step.plan)),
            )
        )
        scheduler.check() if len(costs) % 20 == 0 else None
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--prompt", type=int, default=131_000)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--slots", type=int, default=256)
    options = parser.parse_args()
    # Run a small submission first, because a replica also runs steps before its first request.
    measure(prompt=100, samples=2, slots=4)
    settle_garbage()
    for kind, cached, resumed in (
        ("a new prompt", False, False),
        ("a cached prompt", True, False),
        ("a resumed request", False, True),
        ("a resumed request with a cached prompt", True, True),
    ):
        intake, costs = measure(
            prompt=options.prompt,
            samples=options.samples,
            slots=options.slots,
            cached=cached,
            resumed=resumed,
        )
        print(f"{kind}: reading {intake.read_ms:.2f} ms, queueing {intake.queue_ms:.2f} ms")
        print(f"{len(costs)} steps; the most expensive ones:")
        for cost in sorted(costs, key=lambda cost: -cost.host_ms)[:5]:
            print(
                f"step {cost.step}: {cost.host_ms:.2f} ms (plan {cost.plan_ms:.2f}, apply "
                f"{cost.apply_ms:.2f}, collect {cost.collect_ms:.2f}); {cost.entries} block table entries, "
                f"{cost.plan_bytes} bytes"
            )


if __name__ == "__main__":
    main()
