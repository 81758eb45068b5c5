"""Encodes texts in short steps that release the GIL, and stops once a maximum number of tokens is
exceeded."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import tokenizers

from appliance.text.cuts import PIECE_CHARACTERS, can_be_cut, last_cut, split_text

Steps = Generator[None, None, list[list[int]]]
"""An encoding job: a generator that yields between steps and returns each text's token ids. Any thread may
run its next step."""


class LoneSurrogateError(ValueError):
    """Raised for a text with a lone surrogate at index `position`. UTF-8 cannot encode lone surrogates."""

    def __init__(self, text: str, position: int) -> None:
        super().__init__(
            f"text has a lone surrogate (U+{ord(text[position]):04X}) at character {position}; "
            "send a complete pair or valid UTF-8"
        )
        self.position = position


class TooManyTokensError(ValueError):
    """Raised for a text with too many tokens. Encoding stops as soon as the limit is exceeded."""

    def __init__(self, index: int, tokens: int | None, encoded_tokens: int) -> None:
        super().__init__(f"text {index} has too many tokens")
        self.index = index
        """Index of the text with too many tokens."""
        self.tokens = tokens
        """Number of tokens in the text, or None if encoding stopped early."""
        self.encoded_tokens = encoded_tokens
        """Total number of tokens in the texts that were encoded before the error."""


MAX_UNCUT_BYTES = 512 << 10
"""Maximum size, in UTF-8 bytes, of a piece of text that cannot be cut and so is encoded in one step. At this
size, the step takes at most 0.25 s (measured with random letters and the demo model's tokenizer). At 4 bytes
per token, a context of 131,072 tokens has this size."""
MAX_CACHED_WORDS = 500
"""Number of words whose tokens the tokenizers library caches per encoding thread. The longest cached words
have 256 characters and take 9 KB each. The library's default, 10,000 words, can take up to 89 MB per thread,
and this memory is not freed when the tokenizer is deleted. With this lower limit, encoding ordinary text
takes about 10% longer (tokenizers 0.23, demo model).
"""
_SHOWN_CHARACTERS = 20
_MAX_CHARACTER_BYTES = 4


class UncuttableTextError(ValueError):
    """Raised for a text with a piece that cannot be cut and is too long to encode in one step."""

    def __init__(self, index: int, piece: str, position: int, can_cut: bool, encoded_tokens: int) -> None:
        if can_cut:
            word = last_cut(piece[:PIECE_CHARACTERS])
            super().__init__(
                f"has a run of {len(piece) - word} characters, starting at character {position + word} "
                f"({piece[word : word + _SHOWN_CHARACTERS]!r}…), in which no space or punctuation follows a "
                f"letter, but such a run can have at most {MAX_UNCUT_BYTES} bytes: insert spaces, or send "
                "token ids"
            )
        else:
            super().__init__(
                f"has {len(piece)} characters, but this model's tokenizer cannot encode a text in parts, so "
                f"texts are limited to {MAX_UNCUT_BYTES} bytes: shorten the text, or send token ids"
            )
        self.index = index
        """Index of the text that cannot be encoded."""
        self.encoded_tokens = encoded_tokens
        """Total number of tokens in the texts that were encoded before the error."""


class Encoder:
    """Encodes texts with one `tokenizers` backend. Safe to use from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        _bound_cache(backend)
        self._affixes = _affixes(backend)
        self.cuts_texts = self._affixes is not None and can_be_cut(backend)
        """Whether long texts are encoded in pieces."""

    def steps(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_tokens: int | None = None,
        longest_token_bytes: int | None = None,
    ) -> Steps:
        """Encode `texts` in steps. Raises `LoneSurrogateError` or `UncuttableTextError` for a text that
        cannot be encoded, and `TooManyTokensError` as soon as a text has more than `max_tokens` tokens. A
        text whose size in bytes already implies too many tokens is not encoded at all."""
        for index, text in enumerate(texts):
            size = _utf8_bytes(text)
            if max_tokens is not None and longest_token_bytes and size > max_tokens * longest_token_bytes:
                raise TooManyTokensError(index, None, 0)
        encoded: list[list[int]] = []
        total = 0
        for first, group in _groups(texts):
            if len(group) == 1 and self.cuts_texts and len(group[0]) > PIECE_CHARACTERS:
                encoded.append(
                    (yield from self._in_pieces(group[0], add_special_tokens, first, max_tokens, total))
                )
            else:
                if len(group) == 1 and _is_too_long(group[0]):
                    raise UncuttableTextError(first, group[0], 0, self.cuts_texts, total)
                encoded += self._encode(group, add_special_tokens)
                yield
            for index in range(first, first + len(group)):
                total += len(encoded[index])
                if max_tokens is not None and len(encoded[index]) > max_tokens:
                    raise TooManyTokensError(index, len(encoded[index]), total)
        return encoded

    def _in_pieces(
        self, text: str, add_special_tokens: bool, index: int, max_tokens: int | None, before: int
    ) -> Generator[None, None, list[int]]:
        prefix, suffix = self._affixes if add_special_tokens and self._affixes else ([], [])
        ids = list(prefix)
        left = len(text)
        for piece in split_text(text):
            if _is_too_long(piece):
                raise UncuttableTextError(index, piece, len(text) - left, True, before + len(ids))
            ids += self._encode([piece], False)[0]
            left -= len(piece)
            if left and max_tokens is not None and len(ids) > max_tokens:
                raise TooManyTokensError(index, None, before + len(ids))
            yield
        return ids + suffix

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Use `encode_batch_fast`, because `encode` holds the GIL.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


def _bound_cache(backend: tokenizers.Tokenizer) -> None:
    """Limit the size of the tokenizer's word cache. Only BPE and Unigram models have one."""
    if isinstance(backend.model, tokenizers.models.BPE | tokenizers.models.Unigram):
        backend.model._resize_cache(MAX_CACHED_WORDS)


def _groups(texts: Sequence[str]) -> Generator[tuple[int, Sequence[str]], None, None]:
    """Yield groups of texts, each with the index of its first text. A group is encoded in one step."""
    first = characters = 0
    for index, text in enumerate(texts):
        if index > first and characters + len(text) > PIECE_CHARACTERS:
            yield first, texts[first:index]
            first, characters = index, 0
        characters += len(text)
    if first < len(texts):
        yield first, texts[first:]


def _affixes(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special tokens that encoding adds before and after a text, or None if it adds any
    elsewhere."""
    affixes = None
    for text in ("a", "1 b"):
        plain = backend.encode(text, add_special_tokens=False).ids
        whole = backend.encode(text, add_special_tokens=True).ids
        begins = [n for n in range(len(whole) - len(plain) + 1) if whole[n : n + len(plain)] == plain]
        if len(begins) != 1:
            return None
        found = whole[: begins[0]], whole[begins[0] + len(plain) :]
        if affixes not in (None, found):
            return None
        affixes = found
    return affixes


def _is_too_long(piece: str) -> bool:
    return len(piece) * _MAX_CHARACTER_BYTES > MAX_UNCUT_BYTES and _utf8_bytes(piece) > MAX_UNCUT_BYTES


def _utf8_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise LoneSurrogateError(text, error.start) from None
