"""Prevents client text from becoming control tokens: in a conversation, only the chat template can produce
control tokens. In a chat template, `<|end|>` ends a message. In a message, the same characters are user text
and must not end it. In the rendered string, the two cannot be distinguished. Conversations are therefore
encoded in three steps:

1. Before rendering, a `Shield` replaces each special token's text in the client's texts with a placeholder.
   Placeholders are random digits, drawn for each request, because no template filter changes digits.
2. After rendering, all special tokens in the text come from the template. They are replaced with secret
   names, and the placeholders are replaced with the client's original text.
3. The text is encoded in one pass with a copy of the tokenizer, in which the special tokens have these secret
   names. The copy encodes all other text in the same way as the original tokenizer, whatever normalizer
   and pre-tokenizer it has.

Conversations that contain no special token's text skip these steps and are encoded as in transformers.

Two cases are not covered. First, a template may split a message or join it to other text, and the result may
contain the text of a special token. Second, the tokenizer cannot be copied if its merges combine ordinary
tokens into a special token. In that case, special tokens in messages act as control tokens, as in
transformers, and a warning is logged once.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Generator, Mapping
from typing import Any

import tokenizers

from appliance.text.encoder import Encoder, Steps

log = logging.getLogger(__name__)

_WINDOW_CHARACTERS = 4096
_STEP_CHARACTERS = 16 * _WINDOW_CHARACTERS
_NONCE_DIGITS = 20
_INDEX_DIGITS = 5
_NAME_EDGE = "\U00100000"
"""A private-use character: normalizers leave it unchanged, and pre-tokenizers split text at it."""


class ControlTokens:
    """One tokenizer's special tokens. Safe to use from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._encoder = Encoder(backend)
        texts = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self.texts = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        """Texts of the special tokens, longest first."""
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = max(map(len, self.texts), default=0)
        self._beginnings = sorted({text[:2] for text in self.texts})
        self._copy: _RenamedCopy | None = None
        # Make the copy in advance: reading a large vocabulary holds the GIL for a second.
        try:
            self._copy = _RenamedCopy(backend, self.texts)
        except Exception as error:  # The tokenizers library raises plain `Exception`.
            log.warning(
                "special tokens in message texts cannot be neutralised and act as control tokens: %s", error
            )

    def occurs_in(self, text: str) -> Generator[None, None, bool]:
        """Return whether a special token's text occurs in `text`. Yields between steps."""
        # First, search for just the first two characters of each special token. This search is fast, and it
        # suffices for nearly all texts.
        if not any(beginning in text for beginning in self._beginnings):
            return False
        for begin in range(0, len(text), _WINDOW_CHARACTERS):
            if self._search(text, begin) is not None:
                return True
            if begin % _STEP_CHARACTERS == 0:
                yield
        return False

    def replace_in(self, text: str, names: Mapping[str, str]) -> Generator[None, None, str]:
        """Replace the text of each special token in `text` with its entry in `names`. Yields between
        steps."""
        pieces: list[str] = []
        begin = window = 0
        while window < len(text):
            found = self._search(text, window)
            if found is None:
                window += _WINDOW_CHARACTERS
                yield
            else:
                pieces += (text[begin : found.start()], names[found[0]])
                begin = window = found.end()
                if len(pieces) % _STEP_CHARACTERS == 0:
                    yield
        pieces.append(text[begin:])
        return "".join(pieces)

    def _search(self, text: str, begin: int) -> re.Match[str] | None:
        """Return the first special token that starts within the search window at `begin`."""
        # Search one window at a time, because the regular expression engine holds the GIL. A search takes up
        # to 2.5 µs per character (measured with 256 special tokens and a text in which every second character
        # could begin a special token).
        end = begin + _WINDOW_CHARACTERS
        found = self._pattern.search(text, begin, end + self._longest)
        return found if found is not None and found.start() < end else None

    def encode_steps(
        self,
        text: str,
        shield: Shield,
        add_special_tokens: bool,
        max_tokens: int | None = None,
        longest_token_bytes: int | None = None,
    ) -> Steps:
        """Encode a rendered text in steps and return its token ids. Special tokens hidden by the shield are
        encoded as plain text."""
        encoder = self._encoder
        if self._copy is not None:
            text = yield from self.replace_in(text, self._copy.names)
            encoder = self._copy.encoder
            if longest_token_bytes is not None:
                longest_token_bytes = max(longest_token_bytes, self._copy.longest_name_bytes)
        plain = shield.restore(text)
        yield
        return (yield from encoder.steps([plain], add_special_tokens, max_tokens, longest_token_bytes))


class Shield:
    """Hides the special tokens in a request's texts from the chat template and the tokenizer."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._placeholders: dict[str, str] = {}
        """Maps each special token to its placeholder."""
        self._pattern: re.Pattern[str] | None = None
        """Matches placeholders."""

    @property
    def used(self) -> bool:
        """Whether any special token has been hidden."""
        return bool(self._placeholders)

    def hide(self, value: Any) -> Generator[None, None, Any]:
        """Return a copy of a JSON value in which placeholders replace the special tokens in all strings.
        Yields between steps."""
        if isinstance(value, str):
            return (yield from self._hide(value))
        if isinstance(value, list):
            hidden = []
            for item in value:
                hidden.append((yield from self.hide(item)))
            return hidden
        if isinstance(value, dict):
            entries = {}
            for key, item in value.items():
                name = yield from self.hide(key)
                entries[name] = yield from self.hide(item)
            return entries
        return value

    def _hide(self, text: str) -> Generator[None, None, str]:
        if not (yield from self._control.occurs_in(text)):
            return text
        if not self._placeholders:
            nonce = f"{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}}"
            self._placeholders = {
                special: f"{nonce}{index:0{_INDEX_DIGITS}}"
                for index, special in enumerate(self._control.texts)
            }
            self._pattern = re.compile(rf"{nonce}([0-9]{{{_INDEX_DIGITS}}})")
        return (yield from self._control.replace_in(text, self._placeholders))

    def restore(self, text: str) -> str:
        """Return `text` with each placeholder replaced by the text it hides."""
        if self._pattern is None:
            return text
        texts = self._control.texts
        return self._pattern.sub(
            lambda match: texts[int(match[1])] if int(match[1]) < len(texts) else match[0], text
        )


class _RenamedCopy:
    """A copy of a tokenizer in which the special tokens have secret names."""

    def __init__(self, backend: tokenizers.Tokenizer, texts: list[str]) -> None:
        """Copy a tokenizer. Raises ValueError if a token would get a different id in the copy. Errors from
        the tokenizers library are passed on."""
        secret = secrets.token_hex(16)
        self.names = {text: f"{_NAME_EDGE}{secret}{n}{_NAME_EDGE}" for n, text in enumerate(texts)}
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._renamed(token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed(text): token_id for text, token_id in model["vocab"].items()}
        else:  # A Unigram model's vocabulary is a list of (text, score) pairs in id order.
            model["vocab"] = [(self._renamed(text), score) for text, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._renamed(model["unk_token"])
        copy = tokenizers.Tokenizer.from_str(json.dumps(state))
        self.encoder = Encoder(copy)
        self.longest_name_bytes = max((len(name.encode()) for name in self.names.values()), default=0)
        for text, name in self.names.items():
            if copy.token_to_id(name) != backend.token_to_id(text):
                raise ValueError(f"{text!r} would not keep its id")

    def _renamed(self, text: str) -> str:
        return self.names.get(text, text)
