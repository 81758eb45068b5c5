"""What the parent and its workers say to each other, over an `engine.client.Channel`. All times are seconds
of `time.monotonic`, which is one clock for all processes of a machine."""

from __future__ import annotations

import math

import msgspec

STOPPED = "stopped"
"""The failure of requests that were open when we gave a run up: they count as unfinished."""


class Target(msgspec.Struct):
    """Where requests go."""

    host: str = ""
    port: int = 0
    tls_name: str = ""
    """Non-empty: TLS, with this name expected in the certificate."""
    socket: str = ""
    """Non-empty: this Unix socket instead."""
    trusted_uids: list[int] = []
    """Non-empty: the users as whom the process behind the socket may run (`appliance.ownership`)."""
    authority: str = "bench"
    """Of the Host header."""
    prefix: str = "/v1"
    """Before `/completions`."""
    api_key: str = ""


class Prompting(msgspec.Struct):
    """How the bodies of requests are made."""

    model: str
    vocabulary: int
    """Prompts are random ids below this."""
    prompt_tokens: int
    output_tokens: int
    seed: str
    temperature: float = 0.0
    top_p: float = 1.0


class Plan(msgspec.Struct, tag=True):
    """One run, as far as this worker has part in it. With `concurrency`, so many requests run at once until
    all of `requests` were sent; with `arrivals`, each is sent when it is due, however many run."""

    target: Target
    prompting: Prompting
    requests: list[int]
    """Their numbers, which decide their prompts."""
    concurrency: int = 0
    arrivals: list[float] = []
    """Parallel to `requests`: when each is due, after the start."""
    timeout_s: float = 600.0
    ttft_limit_s: float = math.inf
    e2e_limit_s: float = math.inf
    """What `Progress.overdue` is measured by."""


class Go(msgspec.Struct, tag=True):
    """Begin."""

    at: float


class Stop(msgspec.Struct, tag=True):
    """Give up what runs, and send no more."""


class Ready(msgspec.Struct, tag=True):
    """The plan's requests are made; nothing was sent."""


class Record(msgspec.Struct):
    """One request, ended."""

    number: int
    began_at: float
    """When it was sent; in open loop when it was due, even if the client was late."""
    late_s: float
    """How much later than due it was sent."""
    ended_at: float
    first_at: float | None = None
    """The first chunk that carried a token."""
    gaps_s: list[float] = []
    """Between that and each later chunk."""
    tokens: int | None = None
    """As the server counted; None where it did not say."""
    prompt_tokens: int | None = None
    failure: str = ""
    """Its kind: connect, closed, timeout, protocol, error event, stopped, http 503, …; empty for success."""
    message: str = ""


class Progress(msgspec.Struct, tag=True):
    """Several times a second."""

    records: list[Record]
    """Since the last one."""
    running: int
    chunks: int
    """Of tokens, since the start."""
    overdue: int
    """Requests that run and had to have their first token, or their end, by now."""


class Done(msgspec.Struct, tag=True):
    """The run is over; everything was reported."""

    cpu_s: float
    """CPU time of the worker from Go to here."""
    wall_s: float


ToWorker = Plan | Go | Stop
ToParent = Ready | Progress | Done
