"""One sample of a request. A sample collects tokens and text until they are written to the client."""

from __future__ import annotations

from typing import NamedTuple

from appliance.front.generation_task import GenerationTask, Prompt
from appliance.text.stream import TextStream
from engine.messages import FinishReason, Output, TokenLogprob


class LogprobEntry(NamedTuple):
    """A token's log probability, and the position of its text in the answer."""

    logprob: TokenLogprob
    offset: int
    """Offset of the token's text in the answer, in characters."""


class Sample:
    """One sample of a request. `finish_reason` is "" while the sample is running. `pieces` and `entries`
    contain output not yet written to the client."""

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
        """Index of this sample among the samples for the same prompt."""
        self.index = index
        """Index of this sample in the answer's `choices`."""
        self.token_ids: list[int] = []
        """All tokens generated so far, for resubmission to another replica."""
        self.pieces: list[str] = []
        self.kept_text: list[str] | None = [] if is_kept else None
        """The text generated so far, if the log policy keeps answers."""
        self.entries: list[LogprobEntry] | None = [] if wants_logprobs else None
        self.delivered = 0
        """Number of answer tokens, including end tokens but not tokens after a completed stop string."""
        self.cumulative_logprob = 0.0
        """Sum of the log probabilities that the replica reported for the delivered tokens."""
        self.counted = 0
        """Number of answer tokens that have been written to a stream."""
        self.finish_reason: FinishReason = ""
        self.begun = False
        """Whether this sample's first chunk in the stream has been built."""
        self.waiting = False
        """Whether this sample has output for the next flush of the stream."""
        self._text = text
        self._offset = len(prompt.echo_text)
        self._discard = discard
        self._includes_stop = includes_stop

    def take(self, output: Output) -> None:
        """Add an output from the replica to the sample. The output's finish reason must not be "error" or
        "cancelled". If a stop string is found, set this sample's `finish_reason` even if the output has
        none."""
        token_ids = output.token_ids
        finish_reason = output.finish_reason
        self.token_ids += token_ids
        if self._discard:
            self.finish_reason = "length"
            return
        # A stop token is counted and billed, but its text is included only on request.
        visible = token_ids[:-1] if finish_reason == "stop" and not self._includes_stop else token_ids
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
        elif finish_reason:
            self._end(finish_reason)
        if output.logprobs:
            needed = output.logprobs[: self.delivered - delivered]
            self.cumulative_logprob += sum(entry.logprob for entry in needed)

    def _end(self, finish_reason: FinishReason) -> None:
        tail = self._text.finish()
        self._add_text(tail.text)
        if tail.stopped is None and finish_reason == "stop" and not self._includes_stop:
            self.delivered += 1
        self.finish_reason = "stop" if tail.stopped is not None else finish_reason

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


def samples_of(task: GenerationTask, is_kept: bool) -> list[Sample]:
    """Return new samples for a task that has not started. `is_kept` is true if the log policy keeps
    answers."""
    stream = task.model.tokenizer.stream
    return [
        Sample(
            prompt,
            number,
            prompt.index * task.samples + number,
            stream(
                task.stops,
                task.include_stop,
                task.skip_special_tokens,
                context=prompt.token_ids[-16:] if task.continues_text else (),
                min_tokens=task.sampling.min_tokens,
            ),
            task.logprobs is not None,
            task.discard_output,
            is_kept,
            task.include_stop,
        )
        for prompt in task.prompts
        for number in range(task.samples)
    ]
