"""The channel on which rank 0 sends each plan to the other ranks, before rank 0 launches the step itself."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.config import UnsupportedError
from engine.messages import BLOCK_TOKENS
from engine.plan import StepPlan
from engine.wire import MAX_BACKLOG_BYTES, MAX_FRAME_BYTES, Channel, encode_frame

PLAN_TIMEOUT_S = 30.0
"""How long a peer may leave plans unread. A peer does not read while it launches a step, which may take as
long as a step of a long prompt."""

MAX_PLAN_BYTES = MAX_BACKLOG_BYTES
"""Maximum size of a plan's frame. Both ends are ranks of one replica, so it may exceed the limit for
fronts."""

_NUMBER_BYTES = 5
"""Size in msgpack of a number below 2³²."""
_SLOT_BYTES = 512
"""Upper bound for the size of a slot's part of a plan, without the request's lists: sampling parameters with
their names, the numbers of its chunk, and its entries in the plan's lists."""
_ENTRY_BYTES = 1 + 3 * _NUMBER_BYTES
"""Size of a block table entry: slot, index, block."""


def plan_channel(descriptor: int) -> Channel[Any]:
    """Return the receiving end of the channel from rank 0 to another rank."""
    return Channel(socket.socket(fileno=descriptor), StepPlan, MAX_PLAN_BYTES)


def largest_plan_bytes(
    *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, kv_blocks: int
) -> int:
    """Return an upper bound for the size of a plan's frame.

    The lists in the setups are limited by `engine.scheduling.admission.MAX_SETUP_NUMBERS`, or belong to a
    single sequence, whose lists, except for its output, arrived in one front's frame. In addition the plan
    has at most every slot once, with its whole block table, the tokens of a step, and every block once in
    `clears`. For 1024 slots of 131,072 tokens this is about 100 MB.
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
    """Sends plans to the other ranks without waiting for them.

    A plan is encoded once. The bytes that a peer's socket does not accept at once are written by a thread, in
    order. A peer is lost if its end is closed, or if it has not read anything for `timeout_s` while plans are
    waiting.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        on_lost: Callable[[str], None] = lambda reason: None,
        timeout_s: float = PLAN_TIMEOUT_S,
    ) -> None:
        """sockets: the ends of the plan channels to ranks 1 to N-1, in this order. on_lost: called once for
        each lost peer, with the reason, on any thread. It must not call this object."""
        self._encoder = msgspec.msgpack.Encoder()
        self._peers = [_Peer(rank, sock, on_lost, timeout_s) for rank, sock in enumerate(sockets, 1)]

    def send(self, plan: StepPlan) -> None:
        """Hand the plan over to every peer. Raises RankLost if a peer is lost."""
        frame = encode_frame(self._encoder, plan)
        for peer in self._peers:
            peer.send(plan.step, frame)

    def flush(self, step: int) -> None:
        """Wait until the plans up to `step` are written. Raises RankLost if a peer is lost.

        Must be called before this rank waits for the results of the step, because a peer that has only a part
        of the plan does not run the step.
        """
        for peer in self._peers:
            peer.flush(step)


class _Peer:
    """The plans for one peer that its socket has not accepted yet."""

    def __init__(
        self, rank: int, sock: socket.socket, on_lost: Callable[[str], None], timeout_s: float
    ) -> None:
        sock.setblocking(False)
        self._rank, self._sock, self._on_lost, self._timeout_s = rank, sock, on_lost, timeout_s
        self._unsent: deque[tuple[int, memoryview]] = deque()
        self._lost = ""
        self._changed = threading.Condition()
        """Protects all fields. Notified when a plan is written or the peer is lost."""

    def send(self, step: int, frame: bytes) -> None:
        with self._changed:
            busy = bool(self._unsent)
            self._unsent.append((step, memoryview(frame)))
            if not busy:
                self._write()
                if self._unsent:
                    threading.Thread(target=self._write_all, name="engine-plans", daemon=True).start()
            self._check()

    def flush(self, step: int) -> None:
        with self._changed:
            while not self._lost and self._unsent and self._unsent[0][0] <= step:
                self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self._lost:
            from engine.parallel import RankLost  # imported here because it loads torch

            raise RankLost(f"rank {self._rank} {self._lost}; restart the whole replica")

    def _write(self) -> None:
        """Write as much as the socket accepts."""
        try:
            while self._unsent:
                step, view = self._unsent[0]
                sent = self._sock.send(view)
                if sent < len(view):
                    self._unsent[0] = (step, view[sent:])
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(f"closed its plan channel ({error.strerror})")

    def _lose(self, reason: str) -> None:
        """Record that the peer is lost. The caller may be blocked in a collective, which `on_lost` ends."""
        self._lost = reason
        self._on_lost(f"rank {self._rank} {reason}")

    def _write_all(self) -> None:
        """Write plans until none is left. Runs on a thread."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            writable = poll.poll(1e3 * self._timeout_s)
            with self._changed:
                if writable:
                    self._write()
                else:
                    self._lose(f"did not read a plan for {self._timeout_s:g} s")
                self._changed.notify_all()
                if self._lost or not self._unsent:
                    return
