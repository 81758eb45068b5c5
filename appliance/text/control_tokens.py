"""Keeps control tokens out of what clients write: in a conversation, only the template makes them.

A chat template's `<|end|>` ends a message; the same characters inside a message are a user's text, and must
not be able to end it. The characters cannot be told apart once they are rendered into one string, so

1. before rendering, a `Shield` replaces each special token's text in what the client wrote by a placeholder
   (digits drawn for this request, which no filter of a template changes),
2. in the rendered text, the special tokens that are left are the template's own: they get names that nobody
   can guess, and the placeholders become the client's text again,
3. a twin of the tokenizer, which knows the special tokens by those names alone, encodes the whole in one
   pass: everything but the special tokens is as in the original, whatever its normalizer and pre-tokenizer.

Conversations that contain no special token's text skip all of this: they are encoded as transformers does.

What this does not see: a template that cuts a message apart or glues one to its own text in such a way that a
special token arises from the pieces. Where no twin can be made (a vocabulary whose merges make a special
token out of ordinary ones), special tokens in messages stay control tokens, as in transformers, and the log
says so once.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import tokenizers

log = logging.getLogger(__name__)

_NONCE_DIGITS = 20
_INDEX_DIGITS = 5
_NAME_EDGE = "\U00100000"
"""A private-use character: normalizers leave it alone, and no word goes on across it."""


class ControlTokens:
    """The special tokens of one tokenizer. Safe to use from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        texts = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._texts = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._beginnings = sorted({text[:2] for text in self._texts})
        self._twin: _Twin | None = None
        self._tried = False
        self._lock = threading.Lock()

    def find_in(self, text: str) -> bool:
        """Whether a special token's text occurs in `text`."""
        # Searching for two characters runs at memory speed, and nearly always decides.
        if not any(beginning in text for beginning in self._beginnings):
            return False
        return self._pattern.search(text) is not None

    def replace_in(self, text: str, names: Mapping[str, str]) -> str:
        """`text` with each special token's text replaced by its entry in `names`."""
        return self._pattern.sub(lambda match: names[match[0]], text)

    @property
    def texts(self) -> list[str]:
        """Longest first."""
        return self._texts

    def encode(self, text: str, shield: Shield, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered text; only special tokens outside of the shield's are control tokens.

        Takes about as long as loading the tokenizer when it is first called.
        """
        twin = self._made_twin()
        if twin is None:
            plain, backend = shield.restore(text), self._backend
        else:
            plain, backend = shield.restore(self.replace_in(text, twin.names)), twin.backend
        # Not `encode`: that one holds the GIL while it works.
        return backend.encode_batch_fast([plain], add_special_tokens=add_special_tokens)[0].ids

    def _made_twin(self) -> _Twin | None:
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._twin = _Twin(self._backend, self._texts)
                except Exception as error:  # the Rust extension raises nothing narrower
                    log.warning("special tokens in messages stay control tokens: %s", error)
            return self._twin


class Shield:
    """One request's: hides the special tokens in what a client wrote from the template and the tokenizer."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._placeholders: dict[str, str] = {}
        """By special token."""

    @property
    def used(self) -> bool:
        """Whether anything was hidden."""
        return bool(self._placeholders)

    def hide(self, value: Any) -> Any:
        """A JSON value with placeholders for the special tokens in its strings."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return value

    def _hide(self, text: str) -> str:
        if not self._control.find_in(text):
            return text
        if not self._placeholders:
            nonce = f"{secrets.randbelow(10**_NONCE_DIGITS):0{_NONCE_DIGITS}}"
            self._placeholders = {
                special: f"{nonce}{index:0{_INDEX_DIGITS}}"
                for index, special in enumerate(self._control.texts)
            }
        return self._control.replace_in(text, self._placeholders)

    def restore(self, text: str) -> str:
        """`text` with what was hidden."""
        for special, placeholder in self._placeholders.items():
            if placeholder in text:
                text = text.replace(placeholder, special)
        return text


class _Twin:
    """A copy of a tokenizer whose special tokens have names that nobody can guess."""

    def __init__(self, backend: tokenizers.Tokenizer, texts: list[str]) -> None:
        """Raises whatever the tokenizers library raises, and ValueError where an id would change."""
        secret = secrets.token_hex(16)
        self.names = {text: f"{_NAME_EDGE}{secret}{n}{_NAME_EDGE}" for n, text in enumerate(texts)}
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._renamed(token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed(text): token_id for text, token_id in model["vocab"].items()}
        else:  # Unigram: (text, score) in order of ids
            model["vocab"] = [(self._renamed(text), score) for text, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._renamed(model["unk_token"])
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        for text, name in self.names.items():
            if self.backend.token_to_id(name) != backend.token_to_id(text):
                raise ValueError(f"{text!r} would not keep its id")

    def _renamed(self, text: str) -> str:
        return self.names.get(text, text)
