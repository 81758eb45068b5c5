"""Converts a stream of token ids to text, emitting only complete characters. Most of a front process's CPU
time per token is spent here."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import tokenizers

from appliance.text.panics import raise_panic
from appliance.text.token_table import TokenTable

REPLACEMENT = "\ufffd"

# Maximum number of tokens held back while a stream's text ends in U+FFFD. No character consists of more
# tokens than this, so a longer sequence is invalid rather than incomplete. Its text is then emitted, to limit
# the memory and time per token.
_MAX_HELD_TOKENS = 32


class Detokenizer(Protocol):
    """Converts one stream of token ids to text. Ids outside the vocabulary produce no text, as in the
    `decode` method of `tokenizers`."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text completed by the given tokens, or "" while a character is incomplete."""

    def finish(self) -> str:
        """Return U+FFFD if a character is still incomplete at the end of the stream, otherwise "". Call this
        once, after the last push."""


class TableDetokenizer:
    """Converts tokens to text by table lookup, with an incremental UTF-8 decoder only for characters that
    span several tokens."""

    __slots__ = ("_bad_byte_each", "_entries", "_leading_strip", "_pending")

    def __init__(
        self, table: TokenTable, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        """`context` contains the visible ids that precede this stream; their text is not emitted. With a
        context, leading spaces are kept, and the stream can complete a character that begins in the
        context."""
        self._entries = table.shown if skip_special_tokens else table.shown_with_special
        self._leading_strip = 0 if context else table.leading_strip
        self._bad_byte_each = table.bad_byte_each
        self._pending = b""  # The first bytes of an incomplete character, at most three.
        self.push(context)

    def push(self, token_ids: Sequence[int]) -> str:
        entries = self._entries
        text = ""
        for token_id in token_ids:
            try:
                entry = entries[token_id]
            except IndexError:
                continue
            if entry.__class__ is str:
                if self._pending and entry:
                    text += self._flush()
                text += entry
            else:
                text += self._absorb(entry)  # type: ignore[arg-type]
        if self._leading_strip and text:
            return self._strip(text)
        return text

    def finish(self) -> str:
        return self._flush()

    def _absorb(self, data: bytes) -> str:
        data = self._pending + data
        if not self._bad_byte_each:
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            return text
        text = ""
        while True:
            try:
                end, used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                text += data[: error.start].decode() + REPLACEMENT * (error.end - error.start)
                data = data[error.end :]
            else:
                self._pending = data[used:]
                return text + end

    def _flush(self) -> str:
        pending, self._pending = self._pending, b""
        return REPLACEMENT * len(pending) if self._bad_byte_each else pending.decode("utf-8", "replace")

    def _strip(self, text: str) -> str:
        spaces = min(self._leading_strip, len(text) - len(text.lstrip(" ")))
        # While the stream has produced only spaces, also drop the leading spaces of the next text.
        self._leading_strip = self._leading_strip - spaces if spaces == len(text) else 0
        return text[spaces:]


class WindowDetokenizer:
    """Converts tokens to text with any decoder: decodes a short window of tokens with and without the new
    tokens, and emits the difference. The result is exact if the decoder's output for a token depends only on
    neighbouring tokens, as it does for all decoders in `tokenizers`. Nothing is emitted while the window's
    text ends in U+FFFD. text-generation-inference and vLLM use the same algorithm.
    """

    __slots__ = ("_backend", "_emitted", "_emitted_tokens", "_hidden", "_ids", "_skip")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        hidden: frozenset[int],
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        """`hidden` contains ids that are never shown. `context` contains the visible ids that precede this
        stream; their text is not emitted."""
        self._backend = backend
        self._hidden = hidden
        self._skip = skip_special_tokens
        self._ids = list(context)
        self._emitted_tokens = len(self._ids)
        # The emitted part of the window's text, except for an incomplete character at the end of the context:
        # that character is emitted once generated tokens complete it.
        self._emitted = self._decode(self._ids).rstrip(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        ids = self._ids
        ids += [i for i in token_ids if i not in self._hidden and self._backend.id_to_token(i) is not None]
        text = self._decode(ids)
        if text.endswith(REPLACEMENT) and len(ids) - self._emitted_tokens <= _MAX_HELD_TOKENS:
            return ""
        new = self._after_emitted(text)
        if new:
            # The most recently emitted text becomes the next window's context, so a window always begins with
            # visible text. Otherwise, the decoder would treat the window's first token as the beginning of
            # the whole text.
            del ids[: self._emitted_tokens]
            self._emitted_tokens = len(ids)
            self._emitted = self._decode(ids)
        return new

    def finish(self) -> str:
        return self._after_emitted(self._decode(self._ids))

    def _after_emitted(self, text: str) -> str:
        """Return the new part of the window's text, including a character that began in the context and is
        now complete."""
        emitted = self._emitted
        if not text.startswith(emitted):
            emitted = emitted.rstrip(REPLACEMENT)
        return text[len(emitted) :]

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=self._skip) if ids else ""
        except BaseException as error:
            raise_panic(error)
            raise
