"""The channel on which rank 0 sends each plan to the other ranks, before rank 0 launches the step itself."""

from __future__ import annotations

import socket
from typing import Any

from engine.config import UnsupportedError
from engine.core import LaunchedStep, StepRunner
from engine.messages import BLOCK_TOKENS
from engine.plan import StepPlan
from engine.wire import MAX_BACKLOG_BYTES, MAX_FRAME_BYTES, Channel

MAX_PLAN_BYTES = MAX_BACKLOG_BYTES
"""Maximum size of a plan's frame. Both ends are ranks of one replica, so it may exceed the limit for
fronts."""

_NUMBER_BYTES = 5
"""Size in msgpack of a number below 2³²."""
_SLOT_BYTES = 512
"""Upper bound for a slot's part of a plan without the request's lists: sampling parameters with their names,
the numbers of its chunk, its entries in the plan's lists."""
_ENTRY_BYTES = 1 + 3 * _NUMBER_BYTES
"""Size of a block table entry: slot, index, block."""


def plan_channel(descriptor: int) -> Channel[Any]:
    """Return an end of the channel from rank 0 to another rank."""
    return Channel(socket.socket(fileno=descriptor), StepPlan, MAX_PLAN_BYTES)


def largest_plan_bytes(
    *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, kv_blocks: int
) -> int:
    """Return an upper bound for the size of a plan's frame.

    The setups carry at most the lists of one sequence, which arrived in a front's frame except for its
    output, or less (`engine.scheduling.admission.MAX_SETUP_NUMBERS`). In addition the plan has at most every
    slot once, with its whole block table, the tokens of a step, and every block once in `clears`. For 1024
    slots of 131,072 tokens this is about 100 MB.
    """
    setups = MAX_FRAME_BYTES + _NUMBER_BYTES * max_model_len
    table = -(-max_model_len // BLOCK_TOKENS) * _ENTRY_BYTES
    return (
        setups + max_num_seqs * (_SLOT_BYTES + table) + _NUMBER_BYTES * (max_num_batched_tokens + kv_blocks)
    )


def check_plan_size(
    *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, kv_blocks: int
) -> None:
    """Raise UnsupportedError if a plan could exceed the limit of a plan channel."""
    largest = largest_plan_bytes(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=kv_blocks,
    )
    if largest > MAX_PLAN_BYTES:
        raise UnsupportedError(
            f"max_num_seqs is {max_num_seqs} and max_model_len is {max_model_len}: a step's plan for the "
            f"other ranks could take {largest} bytes, but at most {MAX_PLAN_BYTES} can be sent; "
            "lower one of the two"
        )


class PlanSender:
    """A runner that sends each plan to the other ranks before it launches the step. peers: channels to those
    ranks."""

    def __init__(self, runner: StepRunner, peers: list[Channel[Any]]) -> None:
        self._runner = runner
        self._peers = peers

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for peer in self._peers:
            peer.send(plan)
        # The whole plan must be sent before this rank can block in the step: a peer that has received only
        # part of the plan would wait for the rest, while this rank's collectives wait for the peer. The peer
        # can always receive, because everything that it runs before was already launched here.
        for peer in self._peers:
            peer.drain()
        return self._runner.launch(plan)
