"""One sample of a request: tokens come in, text piles up until it is answered or streamed."""

from __future__ import annotations

from typing import NamedTuple

from appliance.front.generation_task import Prompt
from appliance.text.stream import TextStream
from engine.messages import Output, TokenLogprob


class LogprobEntry(NamedTuple):
    """A token's log probability and where its text begins in the answer."""

    logprob: TokenLogprob
    offset: int
    """Characters."""


class Sample:
    """`finish_reason` is "" while it runs, then "stop" or "length". What `pieces` and `entries` hold has not
    been handed to the client yet."""

    __slots__ = (
        "_discard",
        "_includes_stop",
        "_offset",
        "_text",
        "begun",
        "counted",
        "cumulative_logprob",
        "delivered",
        "entries",
        "finish_reason",
        "index",
        "kept_text",
        "number",
        "pieces",
        "prompt",
        "token_ids",
        "waiting",
    )

    def __init__(
        self,
        prompt: Prompt,
        number: int,
        index: int,
        text: TextStream,
        wants_logprobs: bool,
        discard: bool,
        is_kept: bool = False,
        includes_stop: bool = False,
    ) -> None:
        self.prompt = prompt
        self.number = number
        """Among the samples of its prompt."""
        self.index = index
        """In the answer."""
        self.token_ids: list[int] = []
        """Everything generated: what a resubmission needs."""
        self.pieces: list[str] = []
        self.kept_text: list[str] | None = [] if is_kept else None
        """The whole text so far, where it is to be kept."""
        self.entries: list[LogprobEntry] | None = [] if wants_logprobs else None
        self.delivered = 0
        """Tokens that the answer needed: up to the one that completed a stop string, end tokens included."""
        self.cumulative_logprob = 0.0
        """Of the delivered tokens, where the engine gave their log probabilities."""
        self.counted = 0
        """Of these, what a stream has handed over."""
        self.finish_reason = ""
        self.begun = False
        """The stream's first chunk for it has been made."""
        self.waiting = False
        """It has something for the stream's next flush."""
        self._text = text
        self._offset = len(prompt.echo_text)
        self._discard = discard
        self._includes_stop = includes_stop

    def take(self, output: Output) -> None:
        """Take an output that ends with neither "error" nor "cancelled". Then `finish_reason` may be set
        though the output's is not: a stop string was found."""
        token_ids = output.token_ids
        finish = output.finish_reason
        self.token_ids += token_ids
        if self._discard:
            self.finish_reason = "length"
            return
        # A stop token is generated, counted and billed, but no part of the text unless that was asked for.
        visible = token_ids[:-1] if finish == "stop" and not self._includes_stop else token_ids
        delivered = self.delivered
        if self.entries is None:
            delta = self._text.push(visible)
            self._add_text(delta.text)
            self.delivered += delta.tokens_delivered
            stopped = delta.stopped
        else:
            stopped = self._push_each(visible, output.logprobs or [])
        if stopped is not None:
            self.finish_reason = "stop"
        elif finish:
            self._end(finish)
        if output.logprobs:
            needed = output.logprobs[: self.delivered - delivered]
            self.cumulative_logprob += sum(entry.logprob for entry in needed)

    def _end(self, finish: str) -> None:
        tail = self._text.finish()
        self._add_text(tail.text)
        if tail.stopped is None and finish == "stop" and not self._includes_stop:
            self.delivered += 1
        self.finish_reason = "stop" if tail.stopped is not None else finish

    def _add_text(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            if self.kept_text is not None:
                self.kept_text.append(text)

    def _push_each(self, token_ids: list[int], logprobs: list[TokenLogprob]) -> str | None:
        entries = self.entries
        for position, token_id in enumerate(token_ids):
            offset = self._offset + self._text.characters_decoded
            delta = self._text.push((token_id,))
            self._add_text(delta.text)
            self.delivered += delta.tokens_delivered
            if entries is not None and position < len(logprobs):
                entries.append(LogprobEntry(logprobs[position], offset))
            if delta.stopped is not None:
                return delta.stopped
        return None
