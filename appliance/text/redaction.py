"""Redacts secrets in texts that are stored according to a log policy. The time taken is proportional to the
text's length, whatever it contains: each pattern begins at a rare sequence (`@` or `://`) or at a long word
with a known prefix, and reads a limited number of characters around it. To preserve this property, operators
can add word prefixes (`[log] secret_prefixes`) but not regular expressions. Only secrets with a recognizable
form are found, so a password in ordinary prose is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from appliance.channel.front_settings import SecretKind

_KEY_PREFIXES = (
    *("ak-", "sk-", "pk-", "rk-", "sk_live_", "sk_test_", "rk_live_", "rk_test_"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "npm_", "pypi-"),
    *("xoxa-", "xoxb-", "xoxe-", "xoxp-", "xoxr-", "xoxs-", "AKIA", "ASIA", "AIza", "ya29.", "SG."),
)
_PIECE_CHARS = 4 << 10
# In JSON, the "n" of an escaped line break (\n) is not part of the following word.
_WORD = re.compile(r"(?:\\[nrt])?[A-Za-z0-9_.~+-]{16,}")
_SHORTER_WORD = re.compile(r"(?:\\[nrt])?[A-Za-z0-9_.~+-]{8,}")
_MARKS = "_.~+-"
"""Punctuation that may directly follow a secret without being part of it, such as a full stop or an emphasis
marker."""
_BEARER = re.compile(r"(?:\b|(?<=\\[nrt]))(bearer|basic)([ \t]{1,4})([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^\s/@:]{0,128}:)([^\s/]{1,256})@")
_ASSIGNED = re.compile(
    r"""(pass(?:word|wd|phrase)|(?<![A-Za-z])pwd|secret(?:[_-]?key)?|token|(?:api|access|account|private)[_-]?key)"""
    r"""((?:\\{0,3}["'])?[ \t]{0,3}[=:][ \t]{0,3})"""
    # A quoted password ends at the closing quotation mark and may contain spaces. The quotation marks may be
    # escaped.
    r"""(?:(\\{0,3}["'])(?:(?!\3)(?:\\.|[^\n\\])){6,1024}|(?!bearer\b|basic\b)[^\s"',;\\]{6,})""",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
_BEFORE_AT = re.compile(r"[A-Za-z0-9._%+-]{1,64}")
_AFTER_AT = re.compile(r"(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")
_CARD = re.compile(r"(?<![0-9.-])(?:[0-9][ -]?){12,18}[0-9](?![0-9])")


class Redacted(NamedTuple):
    """A text in which secrets have been replaced."""

    text: str
    secrets: int
    """Number of secrets replaced."""


class Redactor:
    """Replaces secrets of the chosen kinds in texts."""

    def __init__(self, kinds: Collection[SecretKind], prefixes: tuple[str, ...]) -> None:
        """Words that begin with one of `prefixes` are also treated as secrets."""
        steps: dict[SecretKind, Callable[[str], tuple[str, int]]] = {
            # Redact bearer tokens before passwords, because the password pattern would match only "Bearer" in
            # "token: Bearer abc".
            "bearer_tokens": lambda text: _BEARER.subn(r"\1\2[token redacted]", text),
            "passwords": _without_passwords,
            "keys": lambda text: _without_words(text, _WORD, _KEY_PREFIXES, "[key redacted]"),
            "emails": _without_emails,
            "cards": _without_cards,
        }
        self._across_lines = "private_keys" in kinds
        self._steps = [step for kind, step in steps.items() if kind in kinds]
        if prefixes:
            self._steps.append(
                lambda text: _without_words(text, _SHORTER_WORD, prefixes, "[secret redacted]")
            )

    def pieces(self, text: str) -> Iterator[Redacted]:
        """Replace each secret in the text with its kind in brackets. Yields the result in pieces of a few
        thousand characters, so that the caller can pause between pieces."""
        if self._across_lines:
            text, count = _PRIVATE_KEY.subn("[private key redacted]", text)
            yield Redacted("", count)
        for piece in _pieces(text):
            total = 0
            for step in self._steps:
                piece, count = step(piece)
                total += count
            yield Redacted(piece, total)


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in parts that end at a line break, so that other threads can run in between. No
    secret other than a private key spans several lines."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PIECE_CHARS) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _without_words(text: str, words: re.Pattern[str], prefixes: tuple[str, ...], put: str) -> tuple[str, int]:
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        word = match[0]
        bare = word[2 * word.startswith("\\") :]
        if not bare.startswith(prefixes):
            bare = bare.rpartition("..")[2].lstrip(_MARKS)
        # A JSON Web Token has three parts (five if it is encrypted) separated by dots. The first part is an
        # encoded JSON object, which starts with {".
        is_jwt = bare.startswith("eyJ") and bare.rstrip(_MARKS).count(".") in (2, 4)
        if not is_jwt and not bare.startswith(prefixes):
            return word
        count += 1
        return word[: len(word) - len(bare)] + put

    return words.sub(replaced, text), count


def _without_passwords(text: str) -> tuple[str, int]:
    text, in_urls = _URL_PASSWORD.subn(r"\1[password redacted]@", text)
    text, assigned = _ASSIGNED.subn(r"\1\2\3[password redacted]", text)
    return text, in_urls + assigned


def _without_emails(text: str) -> tuple[str, int]:
    pieces: list[str] = []
    count = taken = 0
    at = text.find("@")
    while at >= 0:
        # Search backwards from the @, so that each character is read only once.
        before = _BEFORE_AT.match(text[max(taken, at - 64) : at][::-1])
        after = _AFTER_AT.match(text, at + 1)
        if before is not None and after is not None:
            pieces += (text[taken : at - before.end()], "[e-mail redacted]")
            taken = after.end()
            count += 1
        at = text.find("@", at + 1)
    return "".join([*pieces, text[taken:]]), count


def _without_cards(text: str) -> tuple[str, int]:
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        digits = [int(character) for character in match[0] if character.isdigit()]
        if not _luhn(digits):
            return match[0]
        count += 1
        return "[card number redacted]"

    return _CARD.sub(replaced, text), count


def _luhn(digits: list[int]) -> bool:
    doubled = [
        digit if place % 2 == 0 else digit * 2 - 9 * (digit > 4) for place, digit in enumerate(digits[::-1])
    ]
    return sum(doubled) % 10 == 0
