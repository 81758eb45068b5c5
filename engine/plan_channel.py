"""How plans get from rank 0 to the other ranks: whole, before rank 0 launches what they say."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from engine.config import UnsupportedError
from engine.messages import BLOCK_TOKENS, StepPlan
from engine.wire import MAX_BACKLOG_BYTES, MAX_FRAME_BYTES, Channel

if TYPE_CHECKING:
    from engine.launched import Launched
    from engine.runner import Runner

MAX_PLAN_BYTES = MAX_BACKLOG_BYTES
"""A channel closes on more. Both ends are this program, so it may be more than fronts may send."""

_NUMBER_BYTES = 5
"""Of msgpack, for a number below 2³²."""
_ROW_BYTES = 512
"""For all that a row has in a plan besides lists of the request's: parameters and their names, its chunk's
numbers, its places in lists."""
_ENTRY_BYTES = 1 + 3 * _NUMBER_BYTES
"""Of a block table: row, index, block."""


def plan_channel(descriptor: int) -> Channel[Any]:
    """An end of the channel from rank 0 to another rank."""
    return Channel(socket.socket(fileno=descriptor), StepPlan, MAX_PLAN_BYTES)


def largest_plan_bytes(*, max_rows: int, max_model_len: int, step_tokens: int, kv_blocks: int) -> int:
    """What no frame of a plan exceeds.

    Lists in setups: those of one sequence, which came in a front's frame but for its output, or fewer
    (`engine.scheduling.scheduler.MAX_SETUP_NUMBERS`). Besides these each row once, with its whole block table; a step's
    tokens; and every block once, to be cleared. With 1024 rows of 131,072 tokens that is about 100 MB.
    """
    setups = MAX_FRAME_BYTES + _NUMBER_BYTES * max_model_len
    table = -(-max_model_len // BLOCK_TOKENS) * _ENTRY_BYTES
    return setups + max_rows * (_ROW_BYTES + table) + _NUMBER_BYTES * (step_tokens + kv_blocks)


def check_plans(*, max_rows: int, max_model_len: int, step_tokens: int, kv_blocks: int) -> None:
    """Raises UnsupportedError where a plan could be too long for a channel."""
    largest = largest_plan_bytes(
        max_rows=max_rows, max_model_len=max_model_len, step_tokens=step_tokens, kv_blocks=kv_blocks
    )
    if largest > MAX_PLAN_BYTES:
        raise UnsupportedError(
            f"max_rows is {max_rows} and max_model_len {max_model_len}: what other ranks are told of a step "
            f"could take {largest} bytes, at most {MAX_PLAN_BYTES} can be sent; lower one of them"
        )


class PlanSender:
    """A runner that first tells the other ranks what it is about to run. peers: channels to them."""

    def __init__(self, runner: Runner, peers: list[Channel[Any]]) -> None:
        self._runner = runner
        self._peers = peers

    def launch(self, plan: StepPlan) -> Launched:
        """Hand `plan` to every other rank and launch it here."""
        for peer in self._peers:
            peer.send(plan)
        # Wholly, before this rank can come to wait for the step: its collectives wait for all ranks, and one
        # that has only the beginning of the plan waits for the rest. To take it a peer needs nothing more of
        # this rank, as all that it runs before was launched here.
        for peer in self._peers:
            peer.drain()
        return self._runner.launch(plan)
