"""The channels through which rank 0 sends each plan to the other ranks before launching the step."""

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
from engine.plan import RankPlan
from engine.wire import MAX_BACKLOG_BYTES, MAX_FRAME_BYTES, Channel, encode_frame

PLAN_TIMEOUT_S = 30.0
"""Maximum time, in seconds, that a peer may leave plans unread. A peer does not read plans while launching a
step, which can take as long as computing a long prompt."""

MAX_PLAN_BYTES = MAX_BACKLOG_BYTES
"""Maximum size, in bytes, of a frame that contains a plan. It is higher than the limit for frames from
fronts, because both ends of a plan channel are ranks of the same replica, which trust each other."""

_NUMBER_BYTES = 5
"""Maximum msgpack size, in bytes, of a number below 2³²."""
_SLOT_BYTES = 512
"""Upper bound on the bytes that one slot adds to a plan, excluding the request's lists. It covers the
sampling parameters with their names, the numbers in the slot's chunk, and the slot's entries in the plan's
lists."""
_ENTRY_BYTES = 1 + 3 * _NUMBER_BYTES
"""Size in bytes of a block table entry: slot, index and block id."""


def plan_channel(descriptor: int) -> Channel[Any]:
    """Return the receiving end of the plan channel from rank 0 to another rank."""
    return Channel(socket.socket(fileno=descriptor), RankPlan, MAX_PLAN_BYTES)


def largest_plan_bytes(
    *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, kv_blocks: int
) -> int:
    """Return an upper bound on the size, in bytes, of a frame that contains a plan.

    If a step has several setups, their lists are limited by `engine.scheduling.admission.MAX_SETUP_NUMBERS`.
    A single setup's lists are limited by the size of the frame in which the front sent them, plus the
    sequence's output. Apart from the setups, the largest plan contains every slot with its complete block
    table, the tokens of one step, and every block in `clears`. For 1024 slots of 131,072 tokens, the bound is
    about 100 MB.
    """
    setups = MAX_FRAME_BYTES + _NUMBER_BYTES * max_model_len
    table = -(-max_model_len // BLOCK_TOKENS) * _ENTRY_BYTES
    return (
        setups + max_num_seqs * (_SLOT_BYTES + table) + _NUMBER_BYTES * (max_num_batched_tokens + kv_blocks)
    )


def check_plan_size(
    *, max_num_seqs: int, max_model_len: int, max_num_batched_tokens: int, kv_blocks: int
) -> None:
    """Raise UnsupportedError if a plan could exceed the size limit of a plan channel."""
    largest = largest_plan_bytes(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=kv_blocks,
    )
    if largest > MAX_PLAN_BYTES:
        raise UnsupportedError(
            f"max_num_seqs is {max_num_seqs} and max_model_len is {max_model_len}: a step's plan for the "
            f"other ranks could take {largest} bytes, but at most {MAX_PLAN_BYTES} can be sent",
            "lower one of the two",
        )


class PlanSender:
    """Sends plans to the other ranks without blocking.

    Each plan is encoded once. If a peer's socket does not accept all bytes immediately, a thread writes the
    rest in order. A peer is considered lost if it closes its end of the channel, or reads nothing for
    `timeout_s` seconds while plans are queued.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        on_failure: Callable[[str], None] = lambda reason: None,
        timeout_s: float = PLAN_TIMEOUT_S,
    ) -> None:
        """Create a sender for ranks 1 to N-1.

        `sockets` are rank 0's ends of the plan channels, in rank order. If a peer is lost, `on_failure` is
        called once with the reason, on any thread. The callback must not call methods of this object.
        """
        self._encoder = msgspec.msgpack.Encoder()
        self._peers = [_Peer(rank, sock, on_failure, timeout_s) for rank, sock in enumerate(sockets, 1)]

    def send(self, plan: RankPlan) -> None:
        """Queue the plan for every peer. Raises RankFailureError if a peer is lost."""
        frame = encode_frame(self._encoder, plan)
        for peer in self._peers:
            peer.send(plan.step, frame)

    def flush(self, step: int) -> None:
        """Block until all plans up to `step` are written. Raises RankFailureError if a peer is lost. Call
        this before waiting for the step's results, because a peer cannot run the step until it has received
        the complete plan.
        """
        for peer in self._peers:
            peer.flush(step)


class _Peer:
    """Queues the plans that a peer's socket has not accepted yet."""

    def __init__(
        self, rank: int, sock: socket.socket, on_failure: Callable[[str], None], timeout_s: float
    ) -> None:
        sock.setblocking(False)
        self._rank, self._sock, self._on_failure, self._timeout_s = rank, sock, on_failure, timeout_s
        self._unsent: deque[tuple[int, memoryview]] = deque()
        self._failure = ""
        self._changed = threading.Condition()
        """Protects all fields. Notified when a plan has been written or the peer is lost."""

    def send(self, step: int, frame: bytes) -> None:
        with self._changed:
            busy = bool(self._unsent)
            self._unsent.append((step, memoryview(frame)))
            if not busy:
                self._write()
                if self._unsent and not self._failure:
                    threading.Thread(target=self._write_all, name="engine-plans", daemon=True).start()
            self._check()

    def flush(self, step: int) -> None:
        with self._changed:
            while not self._failure and self._unsent and self._unsent[0][0] <= step:
                self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self._failure:
            from engine.parallel import RankFailureError  # imported here because it loads torch

            raise RankFailureError(f"rank {self._rank} {self._failure}; restart the whole replica")

    def _write(self) -> None:
        """Write as many queued bytes as the socket accepts."""
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
        """Record that the peer failed and call `on_failure`, so that the caller can abort a collective that
        waits for the peer."""
        self._failure = reason
        self._on_failure(f"rank {self._rank} {reason}")

    def _write_all(self) -> None:
        """Write plans until the queue is empty. Runs on a separate thread."""
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
                if self._failure or not self._unsent:
                    return
