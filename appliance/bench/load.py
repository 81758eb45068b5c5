"""Defines the requests that client processes send and the records that they report. All times are in seconds
of `time.monotonic`, which is the same in all processes on a machine."""

from __future__ import annotations

import json
import math
import random
from typing import Final, Literal, NewType

import msgspec

STOPPED: Final = "stopped"
"""Kind of failure recorded for requests that are still open after `Load.stop_after_s` seconds."""
HttpFailure = NewType("HttpFailure", str)
"""Kind of failure recorded for a response with an error status (see `http_failure`)."""
FailureKind = Literal["", "connect", "closed", "timeout", "protocol", "error event", "stopped"] | HttpFailure
"""Kind of failure; empty if the request succeeded."""


def http_failure(status: int) -> HttpFailure:
    """Return the kind of failure for a response with this status, such as "http 503"."""
    return HttpFailure(f"http {status}")


class Target(msgspec.Struct, frozen=True):
    """The server that receives the requests: an address or a Unix socket."""

    host: str = ""
    port: int = 0
    tls_name: str = ""
    """Name that the server's certificate must contain. If empty, TLS is not used."""
    socket: str = ""
    """Path of a Unix socket. If empty, `host` and `port` are used."""
    trusted_uids: frozenset[int] = frozenset()
    """Users who may own the process that listens on the socket (`appliance.ownership`). If empty, the owner
    is not checked."""
    authority: str = "bench"
    """Value of the Host header."""
    prefix: str = "/v1"
    api_key: str = ""

    def __str__(self) -> str:
        if self.socket:
            return self.socket
        return f"{'https' if self.tls_name else 'http'}://{self.authority}{self.prefix}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return an HTTP request as bytes."""
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.authority}",
            "User-Agent: appliance-bench",
            "Accept: text/event-stream, application/json",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one benchmark run. If `arrivals` is set, request i is sent `arrivals[i]` seconds after
    the start (open loop). Otherwise, `concurrency` streams run concurrently, each sending one request after
    another (closed loop)."""

    target: Target
    model: str
    vocab_size: int
    """Prompts consist of random token ids below this number."""
    prompt_tokens: int
    output_tokens: int
    seed: str
    requests: int
    temperature: float = 0.0
    top_p: float = 1.0
    concurrency: int = 0
    arrivals: tuple[float, ...] = ()
    timeout_s: float = 600.0
    """Time limit of each request, in seconds."""
    stop_after_s: float = math.inf
    """Time limit for the run, measured from its start. Requests that are still open at that time are ended
    and counted as stopped."""

    @property
    def streams(self) -> int:
        """Maximum number of concurrent requests."""
        return min(self.concurrency, self.requests) or self.requests

    def numbers(self, worker: int, workers: int) -> list[int]:
        """Return the indices of this worker's requests. Streams are distributed evenly: a worker gets every
        `workers`-th stream."""
        return [number for number in range(self.requests) if number % self.streams % workers == worker]

    def body(self, number: int) -> bytes:
        """Return a completion request's body as bytes. The prompt is determined by the seed and `number`. No
        two prompts share a prefix that is long enough to hit a prefix cache."""
        draw = random.Random(f"{self.seed}/{number}")
        body: dict[str, object] = {
            "model": self.model,
            "prompt": draw.choices(range(self.vocab_size), k=self.prompt_tokens),
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.top_p != 1.0:
            body["top_p"] = self.top_p
        encoded = json.dumps(body, separators=(",", ":")).encode()
        return self.target.request("POST", f"{self.target.prefix}/completions", encoded)


class Record(msgspec.Struct):
    """The measurements of one request, whether it succeeded or failed."""

    began_at: float
    """Time at which the request was sent or, in an open-loop run, should have been sent."""
    late_s: float
    """How late the request was sent, in seconds."""
    ended_at: float
    first_at: float | None = None
    """Time at which the first chunk with a token arrived."""
    gaps_s: list[float] = []
    """Times between consecutive chunks of the response."""
    tokens: int | None = None
    """Number of output tokens in the server's `usage`, or None if the server did not report it."""
    prompt_tokens: int | None = None
    failure: FailureKind = ""
    message: str = ""

    @property
    def chunks(self) -> int:
        """Number of chunks that contained tokens."""
        return 0 if self.first_at is None else 1 + len(self.gaps_s)

    @property
    def output_tokens(self) -> int:
        """Number of output tokens reported by the server or, failing that, the number of chunks."""
        return self.chunks if self.tokens is None else self.tokens


class BenchProgress(msgspec.Struct):
    """A client process's report, sent several times a second and once at the end."""

    records: list[Record]
    """Records of the requests that have finished since the last report."""
    running: int
    chunks: int
    """Number of chunks received since the start of the run."""
    cpu_share: float
    """CPU time of the client process, divided by the elapsed time."""
    is_done: bool
