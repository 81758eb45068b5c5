"""Sends single requests from the tests in `tests.system.attacks`, one after another, alongside other traffic.
They are the attacks that a running service must withstand without an operator's help: ambiguous framing, huge
and deeply nested bodies, fields that are expensive to process, other spellings of paths, and conversations
that make a hostile chat template run too long or use too much memory.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tests.system.attacks.conftest import Target
from tests.system.attacks.test_event_loop import ATTACKS, HEADERS
from tests.system.attacks.test_framing import AMBIGUOUS_HEADERS, ambiguous
from tests.system.attacks.wire import Address, connect, post
from tests.system.test_authentication import FRONT_RULES, METHODS, concrete, spellings

_MIN_TIMEOUT_S = 5.0
"""Minimum time, in seconds, to wait for an answer. A request that is still running when the time of the
attacks is over is abandoned after this time."""
_SLOW = ("many prompts",)
"""Attacks that are omitted, because each of them would keep a CPU replica busy for minutes."""


class Attack(NamedTuple):
    """A class of attacks."""

    name: str
    pause_s: float
    """Pause, in seconds, between the end of one request and the next request."""
    requests: Callable[[str], list[Callable[[], bytes]]]
    """Returns the functions that send the requests of this class. Its argument is the header with the
    attackers' key."""
    address: Callable[[Target], Address]


def _framing(authorization: str) -> list[Callable[[], bytes]]:
    return [partial(ambiguous, headers) for headers in AMBIGUOUS_HEADERS]


def _bodies(authorization: str) -> list[Callable[[], bytes]]:
    def request(name: str) -> bytes:
        path, body = ATTACKS[name]
        headers = [f"{field}: {value}" for field, value in HEADERS.get(name, {}).items()]
        return post(path, body(), authorization, "Connection: close", *headers)

    return [partial(request, name) for name in ATTACKS if name not in _SLOW]


def _paths(authorization: str) -> list[Callable[[], bytes]]:
    def request(method: str, path: str) -> bytes:
        return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()

    paths = [spelled for _, path in FRONT_RULES for spelled in spellings(concrete(path))]
    return [partial(request, method, path) for path in paths for method in METHODS]


def _templates(authorization: str) -> list[Callable[[], bytes]]:
    def request(content: str) -> bytes:
        body = {"model": "hostile", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return post("/v1/chat/completions", body, authorization, "Connection: close")

    return [partial(request, "endless"), partial(request, "hungry")]


ATTACK_CLASSES = (
    Attack("framing", 3.0, _framing, lambda attacked: attacked.tcp),
    Attack("bodies", 3.0, _bodies, lambda attacked: attacked.unix),
    Attack("paths", 1.0, _paths, lambda attacked: attacked.tcp),
    # An endless template uses a CPU core for 5 s.
    Attack("templates", 60.0, _templates, lambda attacked: attacked.unix),
)


class SingleAttacks:
    """Sends the attacks from separate threads, one per class, until the time is over."""

    def __init__(self, attacked: Target, key: str, seconds: float) -> None:
        self.statuses: dict[str, Counter[str]] = {one.name: Counter() for one in ATTACK_CLASSES}
        """For each class, the number of requests by the status of their answers."""
        self._attacked, self._authorization = attacked, f"Authorization: Bearer {key}"
        self._ends_at = time.monotonic() + seconds
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in ATTACK_CLASSES]
        for thread in self._threads:
            thread.start()

    def failures(self) -> list[str]:
        """Wait until all attacks have ended. Return a message for each server error (status 5xx)
        except 503."""
        for thread in self._threads:
            thread.join()
        return [
            f"attacks of class {name}: {count} answers with status {status}"
            for name, statuses in self.statuses.items()
            for status, count in statuses.items()
            if status.startswith("5") and status != "503"
        ]

    def _run(self, attack: Attack) -> None:
        draw = random.Random(attack.name)
        address = attack.address(self._attacked)
        for request in _repeated(attack.requests(self._authorization), draw):
            self.statuses[attack.name][status_of(address, request(), self._ends_at)] += 1
            if self._ends_at - time.monotonic() < attack.pause_s:
                return
            time.sleep(attack.pause_s)


def _repeated(requests: list[Callable[[], bytes]], draw: random.Random) -> Iterator[Callable[[], bytes]]:
    """Yield all requests in random order, again and again."""
    while True:
        yield from draw.sample(requests, len(requests))


def status_of(address: Address, request: bytes, ends_at: float) -> str:
    """Send a request, read its answer, and return its status, or the name of the error if there is no answer.
    Disconnect if the answer is still incomplete at the monotonic time `ends_at`."""
    answer = b""
    try:
        with connect(address, max(_MIN_TIMEOUT_S, ends_at - time.monotonic())) as sock:
            # The service may refuse the request before it has been sent completely.
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request)
            while (piece := sock.recv(1 << 16)) and time.monotonic() < ends_at + _MIN_TIMEOUT_S:
                answer = answer or piece
    except OSError as error:
        if not answer:
            return type(error).__name__
    return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "no answer"
