"""Follows a stream of the admin API, reopening it if the service restarts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from appliance.calls import AdminError
from appliance.cli.failure import Failure
from appliance.client import ServiceNotRunningError

Value = TypeVar("Value")

_AWAY_S = 60.0
"""How long a command waits for the service to return after the command's stream breaks, in seconds."""
_RETRY_S = 0.5


def following(stream: Callable[[], Iterator[Value]]) -> Iterator[Value]:
    """Yield a stream's values, reopening the stream whenever it breaks. `stream` opens a stream that
    continues where the previous one ended. Raises Failure if the service does not return within a minute or
    refuses the call."""
    away_since: float | None = None
    while True:
        reason = "the service ended the stream"
        try:
            for value in stream():
                away_since = None
                yield value
            away_since = away_since or time.monotonic()
        except AdminError as error:
            if error.status != 503:
                raise Failure(str(error)) from error
            reason, away_since = str(error), away_since or time.monotonic()
        except ServiceNotRunningError as error:
            reason = str(error)
            if away_since is None:
                print("Disconnected from the service; reconnecting.", file=sys.stderr)
            away_since = away_since or time.monotonic()
        if time.monotonic() - away_since > _AWAY_S:
            raise Failure(reason)
        time.sleep(_RETRY_S)
