"""Builds server-sent events from prepared strings. A JSON encoder would be too slow, because building events
takes most of a front's CPU time per token. A token costs one list append when it arrives. When its stream is
flushed, the token shares the cost of one chunk with the stream's other new tokens. Streams are flushed
whenever the event loop has processed the messages in a replica's channel. While the client's socket is full,
no events are built. When the socket accepts data again, each sample's waiting tokens are written as one
event.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from appliance.front.answers import answer_head, usage
from appliance.front.errors import internal_error
from appliance.front.generation import Generation
from appliance.front.logprobs import PromptLogprobs, logprobs_event, tokens_at_once
from appliance.front.sample import Sample

log = logging.getLogger(__name__)

MAX_HELD_OUTPUTS = 65_536
"""Maximum number of outputs held for a client that is not reading. Each output has one or a few tokens. If
the limit is exceeded, the request is ended."""
MAX_HELD_LOGPROB_OUTPUTS = 4_096
"""Maximum number of outputs with log probabilities that are held for a client that is not reading. Such an
output may occupy a kilobyte."""

_MAX_COST = 2048
"""Maximum cost of one flush. A flush of this cost takes about 10 ms. Each event, each log probability, and
every 512 characters of echoed text cost 1."""
_CHARACTERS_PER_COST = 512

_encode = msgspec.json.Encoder().encode


class EventStream:
    """Writes one generation's output to the client's connection, starting when `open` is called and ending
    when `done` is set."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.done = asyncio.Event()
        """Set when the last event has been written or the client has disconnected."""
        self.wrote_at = 0.0
        """Arrival time of the latest token that has been written, in seconds on the monotonic clock."""
        self._connection = generation.context.connection
        self._state = generation.state
        self._is_open = False
        self._waiting: list[Sample] = []
        self._held = 0
        self._echoed: dict[int, PromptLogprobs] = {}
        """For each sample, the log probabilities of its echoed prompt."""
        self._prepare()
        generation.on_progress = self.progress
        generation.on_end = self.ended
        generation.on_fallback = self._prepare

    def _prepare(self) -> None:
        """Prepare the parts shared by all events. Must be called before the first output arrives."""
        generation = self.generation
        self._task = task = generation.task
        self._max_held = MAX_HELD_OUTPUTS if task.logprobs is None else MAX_HELD_LOGPROB_OUTPUTS
        self._unfinished = len(generation.samples)
        head = _encode(answer_head(generation, chunk=True))[:-1]
        # The fixed parts of a chunk: the part before the choice, the part between the beginning of the choice
        # and the text, and the part after the text.
        self._head = b"data: " + head + b',"choices":['
        before_text = b',"delta":{"content":' if task.chat else b',"text":'
        self._before_text = [
            self._head + b'{"index":%d' % sample.index + before_text for sample in generation.samples
        ]
        self._close = b"}" if task.chat else b""
        # Chunks that contain fields other than the text are built individually.
        self._is_plain = not (task.return_token_ids or task.continuous_usage)
        self._after_text = self._close + b',"logprobs":null,"finish_reason":null}' + self._tail()

    # ── called by `Generation` ──

    def progress(self, sample: Sample) -> None:
        """Schedule a flush, because an output has been added to the sample."""
        if not sample.waiting:
            sample.waiting = True
            self._waiting.append(sample)
        if not self._is_open:
            return
        if self._connection.writable:
            self._state.flush_soon(self)
        else:
            self._held += 1
            if self._held == self._max_held + 1:
                self.generation.too_slow()

    def ended(self) -> None:
        """Finish the stream, because the generation has ended."""
        if self.generation.left:
            self._finish()
        elif self._is_open:
            self._state.flush_soon(self)

    # ── writing to the client ──

    def open(self) -> None:
        """Start writing events. The response head must already have been written."""
        self._is_open = not self.done.is_set()
        self._connection.on_writable = self.flush
        self.flush()

    def flush(self) -> None:
        """Write the waiting events, unless the client's socket is full."""
        if not self._is_open or not self._connection.writable:
            return
        generation = self.generation
        try:
            self._held = 0
            events: list[bytes] = []
            spent = 0
            waiting, self._waiting = self._waiting, []
            for position, sample in enumerate(waiting):
                if spent >= _MAX_COST:
                    self._waiting += waiting[position:]
                    break
                sample.waiting = False
                spent += self._build(sample, events)
            last = False
            if spent >= _MAX_COST and self._waiting:
                # This stream's remaining events are written after other streams have been flushed.
                self._state.flush_soon(self)
            elif generation.failure is not None or not self._unfinished:
                events.append(self._last_event())
                last = True
            if events:
                data = b"".join(events) if len(events) > 1 else events[0]
                record = generation.record
                if record is not None:
                    record(data)
                # Only a recorded stream continues after its client has disconnected.
                if record is None or not self._connection.disconnected:
                    self._connection.write_chunk(data)
                self.wrote_at = generation.last_token_at
                if generation.first_bytes_at is None:
                    generation.first_bytes_at = time.monotonic()
            if last:
                # Report the request's end now, because clients disconnect after reading the last event
                # without waiting for the end of the response.
                if generation.failure is not None:
                    generation.settle(generation.failure.status, generation.failure.message)
                else:
                    generation.settle(200)
                self._finish()
        except Exception:
            # An error in one stream must not affect others waiting to be flushed.
            log.exception("request %s: failed to create the stream's events", generation.context.request_id)
            generation.record = None
            error = internal_error()
            generation.settle(error.status, error.message)
            generation.client_disconnected()
            self._connection.abort()

    def _last_event(self) -> bytes:
        failure = self.generation.failure
        if failure is not None:
            return b"data: " + failure.document() + b"\n\n"
        counts = b""
        if self._task.include_usage:
            counts = self._head + b'],"usage":' + _encode(usage(self.generation)) + b"}\n\n"
        return counts + b"data: [DONE]\n\n"

    def _finish(self) -> None:
        """Write no further events, and mark the stream as done."""
        self._is_open = False
        self.done.set()

    def _build(self, sample: Sample, events: list[bytes]) -> int:
        """Append the sample's next events to `events` and return their cost. Events beyond the limit are left
        for the next flush."""
        cost = 1
        if not sample.begun:
            if (
                self._task.echoes_logprobs
                and sample.prompt.logprobs is None
                and self.generation.failure is None
            ):
                # A prompt's log probabilities arrive with the first output of its first sample.
                self._wait(sample)
                return cost
            if not self._begin(sample, events):
                self._wait(sample)
                return _MAX_COST
            sample.begun = True
            cost += len(sample.prompt.echo_text) // _CHARACTERS_PER_COST
        counted, sample.counted = sample.counted, sample.delivered
        self.generation.delivered_tokens += sample.counted - counted
        pieces = sample.pieces
        if sample.entries is None and self._is_plain:
            if pieces:
                text = pieces[0] if len(pieces) == 1 else "".join(pieces)
                pieces.clear()
                events.append(self._before_text[sample.index] + _encode(text) + self._after_text)
        elif pieces or sample.entries or (self._task.return_token_ids and sample.counted > counted):
            entries = sample.entries and sample.entries[: tokens_at_once(self._task)]
            logprobs = logprobs_event(self._task, entries, None)
            token_ids = self._token_ids(sample.token_ids[counted : sample.counted])
            events.append(self._event(sample, "".join(pieces), logprobs, token_ids))
            pieces.clear()
            if sample.entries and entries:
                del sample.entries[: len(entries)]
                if sample.entries:
                    self._wait(sample)
                    return _MAX_COST
                cost += len(entries) * (1 + (self._task.logprobs or 0))
        if sample.finish_reason:
            self._unfinished -= 1
            events.append(
                self._head
                + b'{"index":%d' % sample.index
                + (b',"delta":{}' if self._task.chat else b',"text":""')
                + b',"logprobs":null,"finish_reason":"%b"' % sample.finish_reason.encode()
                + self._token_ids([])
                + b"}"
                + self._tail()
            )
        return cost

    def _wait(self, sample: Sample) -> None:
        sample.waiting = True
        self._waiting.append(sample)

    def _begin(self, sample: Sample, events: list[bytes]) -> bool:
        """Append the events that precede a sample's text. Return False if some are left for the next
        flush."""
        is_first = sample.index not in self._echoed
        prompt_ids = b""
        if self._task.return_token_ids and is_first and not (self._task.chat and sample.index):
            prompt_ids = b',"prompt_token_ids":' + _encode(sample.prompt.token_ids)
        if self._task.chat:
            events.append(
                self._head
                + b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},' % sample.index
                + b'"logprobs":null,"finish_reason":null}'
                + self._tail(prompt_ids)
            )
        elif self._task.echoes_logprobs:
            echoed = self._echoed.get(sample.index)
            if echoed is None:
                echoed = PromptLogprobs(self._task.model.tokenizer, sample.prompt)
                self._echoed[sample.index] = echoed
            logprobs = logprobs_event(self._task, [], echoed)
            text = sample.prompt.echo_text if is_first else ""
            events.append(self._event(sample, text, logprobs, prompt_ids))
            return echoed.is_complete
        elif self._task.echo or prompt_ids:
            events.append(self._event(sample, sample.prompt.echo_text, b"null", prompt_ids))
        return True

    def _event(self, sample: Sample, text: str, logprobs: bytes, more: bytes = b"") -> bytes:
        """Return a chunk with this text. `more` contains additional fields of the choice."""
        return (
            self._before_text[sample.index]
            + _encode(text)
            + self._close
            + b',"logprobs":'
            + logprobs
            + b',"finish_reason":null'
            + more
            + b"}"
            + self._tail()
        )

    def _token_ids(self, token_ids: list[int]) -> bytes:
        """Return a choice's `token_ids` field if requested."""
        return b',"token_ids":' + _encode(token_ids) if self._task.return_token_ids else b""

    def _tail(self, more: bytes = b"") -> bytes:
        """Return the part of a chunk after the choice. `more` contains additional fields of the chunk."""
        if not self._task.include_usage:
            return b"]" + more + b"}\n\n"
        counts = _encode(usage(self.generation)) if self._task.continuous_usage else b"null"
        return b"]" + more + b',"usage":' + counts + b"}\n\n"
