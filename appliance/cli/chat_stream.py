"""An API client for the `chat` command. It lists models and streams one answer at a time over `api.sock`."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from appliance.cli.failure import Failure
from appliance.client import not_running, unix_connection

_READ_BYTES = 64 << 10


class AnswerError(Exception):
    """Raised if the service does not answer or the answer is cut off. The message gives the reason."""


class Piece(NamedTuple):
    """A piece of an answer's text."""

    text: str


class End(NamedTuple):
    """The end of an answer, with statistics."""

    finish_reason: str
    completion_tokens: int | None
    """Number of generated tokens, or None if not reported by the service."""
    ttft_s: float | None
    """Time in seconds from the request to the first text."""
    tokens_per_s: float | None
    """Tokens generated per second between the first text and the end of the answer."""


class ChatClient:
    """Sends requests to the service in one run directory. Use it as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._socket = run_dir / "api.sock"

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing, because no connection stays open between requests."""

    def models(self) -> list[str]:
        """Return the model names. Raises Failure if the service does not answer."""
        try:
            with closing(self._connected(10.0)) as connection:
                connection.request("GET", "/v1/models")
                response = connection.getresponse()
                content = response.read()
        except (OSError, HTTPException) as error:
            raise Failure(
                f"the service on {self._socket} is not responding ({error or type(error).__name__}); "
                f"show its state with: appliance status --run-dir {self._run_dir}"
            ) from error
        if response.status != 200:
            raise Failure(_refusal(response.status, content))
        try:
            return [str(model["id"]) for model in json.loads(content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(
                f"{self._socket} does not serve the Appliance API: it returned no list of models"
            ) from error

    def answer(self, body: dict[str, Any]) -> Generator[Piece | End, None, None]:
        """Stream the answer to a chat completion request. Closing the iterator cancels the request. Raises
        AnswerError if the service refuses the request or sends an error event, or if the connection breaks.
        """
        asked = time.monotonic()
        first: float | None = None
        finish_reason, tokens = "", None
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json"}
        try:
            # Set no read timeout: the request may be queued, and the service itself limits the waiting time.
            with closing(self._connected(None)) as connection:
                connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise AnswerError(_refusal(response.status, response.read()))
                for event in _objects(events(iter(lambda: response.read1(_READ_BYTES), b""))):
                    if (usage := event.get("usage")) is not None:
                        tokens = usage.get("completion_tokens")
                    for choice in event.get("choices", ()):
                        finish_reason = choice.get("finish_reason") or finish_reason
                        if text := choice.get("delta", {}).get("content"):
                            first = first or time.monotonic()
                            yield Piece(text)
        except (OSError, HTTPException) as error:
            raise AnswerError(f"disconnected from the service: {error or type(error).__name__}") from error
        if not finish_reason:
            raise AnswerError("the answer is incomplete: the service closed the connection")
        yield _end(finish_reason, tokens, asked, first)

    def _connected(self, timeout_s: float | None) -> HTTPConnection:
        """Check the service's owner and connect. Raises Failure if the connection fails, or UntrustedError if
        the owner is not trusted."""
        connection = unix_connection(self._socket, timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise Failure(str(not_running(self._socket, error))) from error
        return connection


def _end(finish_reason: str, tokens: int | None, asked: float, first: float | None) -> End:
    if first is None:
        return End(finish_reason, tokens, None, None)
    later = time.monotonic() - first
    rate = (tokens - 1) / later if tokens is not None and tokens > 1 and later > 0 else None
    return End(finish_reason, tokens, first - asked, rate)


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data fields of server-sent events
    (https://html.spec.whatwg.org/multipage/server-sent-events.html).

    Bytes are decoded line by line, so a character may be split across chunks. Comments and fields other than
    data are skipped. An event without a final blank line was cut off and is not yielded.
    """
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
                data = []
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" ").decode("utf-8", "replace"))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the complete lines of a byte stream. A line ends in LF or CRLF."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def _objects(data: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in server-sent events until the `[DONE]` event. Raises AnswerError for an error
    event."""
    for text in data:
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise AnswerError(f"the service sent an event that is not a JSON object: {text[:80]!r}")
        if (error := event.get("error")) is not None:
            raise AnswerError(str(error.get("message", error) if isinstance(error, dict) else error))
        yield event


def _refusal(status: int, content: bytes) -> str:
    """Return the message from an error response in OpenAI's format, or the HTTP status if there is no
    message."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode("utf-8", "replace").strip() or "the service gave no reason"
    return f"{message} (status {status})"
