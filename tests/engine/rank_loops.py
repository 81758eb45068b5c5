"""Helpers for tests that run the loops of ranks on threads, with real channels."""

from __future__ import annotations

import threading
from typing import Any

from engine.messages import SamplingParams, Submit, pack_tokens
from engine.wire import Channel, socketpair

WAIT_S = 60.0


class Outcome:
    """Runs a function on a thread and stores the exception that it raises."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def channel_pair(ours: Any, theirs: Any) -> tuple[Channel[Any], Channel[Any]]:
    """Return the two ends of a channel: the test's end, which receives messages of type `ours`, and the
    rank's end, which receives messages of type `theirs`."""
    left, right = socketpair()
    return Channel(left, ours), Channel(right, theirs)


def submit(handle: int, most: int, prompt: int = 3) -> Submit:
    return Submit(
        handle=handle,
        request_id=f"request-{handle}",
        prompt=pack_tokens([3 + place % 3 for place in range(prompt)]),
        sampling=SamplingParams(max_tokens=most),
    )
