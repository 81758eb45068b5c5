"""Converts a sequence's token ids to text for the client, using the detokenizer and then the stop string
search."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from appliance.text.detokenizer import Detokenizer
from appliance.text.stop import StopMatcher


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The result of one `push` call.

    - `text` is empty while an incomplete character or the beginning of a stop string is held back.
    - `stopped` is the stop string that ended the stream, or None.
    - `tokens_delivered` is the number of pushed tokens that are part of the answer: all of them, or those up
      to and including the token that completed the stop string. Later tokens are not billed.
    """

    text: str
    stopped: str | None
    tokens_delivered: int


class TextStream:
    """A stream of text, created by `Tokenizer.stream`.

    `tokens_delivered` and `characters_decoded` are totals since the start of the stream. `characters_decoded`
    also counts text cut off at a stop string and text held back because it may become a stop string. If
    tokens are pushed one at a time, the value of `characters_decoded` before a push is the pushed token's
    `text_offset`.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "characters_decoded", "tokens_delivered")

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self.tokens_delivered = 0
        self.characters_decoded = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Convert the next tokens of the sequence. Tokens after a stop string are not delivered."""
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.push(token_ids)
            self.characters_decoded += len(text)
            delivered = len(token_ids)
            self.tokens_delivered += delivered
            return TextDelta(text, None, delivered)
        stopped = matcher.stopped
        emitted = ""
        delivered = 0
        for token_id in token_ids:
            if stopped is not None:
                break
            text = self._detokenizer.push((token_id,))
            self.characters_decoded += len(text)
            delivered += 1
            if text:
                may_stop = self.tokens_delivered + delivered > self._min_tokens
                text, stopped = matcher.push(text, may_stop)
                emitted += text
        self.tokens_delivered += delivered
        return TextDelta(emitted, stopped, delivered)

    def finish(self) -> TextDelta:
        """Return the held-back text, or an empty string after a stop string. Call this once, after the
        sequence has ended."""
        matcher = self._matcher
        if matcher is None:
            text = self._detokenizer.finish()
            self.characters_decoded += len(text)
            return TextDelta(text, None, 0)
        if matcher.stopped is not None:
            return TextDelta("", matcher.stopped, 0)
        text = self._detokenizer.finish()
        self.characters_decoded += len(text)
        emitted, stopped = matcher.push(text, self.tokens_delivered >= self._min_tokens)
        return TextDelta(emitted + matcher.finish(), stopped, 0)
