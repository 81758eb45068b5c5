"""Parses what people type for the fields of an action: numbers, classes, lists, and "none" for no limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from appliance.classes import CLASS_NAMES
from appliance.cli.failure import CommandLineError
from appliance.cli.options import is_decimal
from appliance.cli.times import span_s

MAX_RATE = 1e15
"""Requests or tokens per minute or day; above it, a float no longer counts single ones."""
MAX_COUNT = 10**12
"""Requests or tokens."""
MAX_DAYS = 36525.0

Parse = Callable[[str, str], Any]


def given_fields(options: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the options that were given, of those that `kind` has as fields, as its values.

    Raises CommandLineError.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {
        name: _value(name, text, type(None) in get_args(types[name]))
        for name, text in options.items()
        if name in _PARSERS and name in types and text is not None
    }


def _value(name: str, text: str, may_lift: bool) -> Any:
    flag, parse, expected = _PARSERS[name]
    if may_lift and text == "none":
        return None
    try:
        return parse(text, flag)
    except ValueError:
        lifted = ", or none" if may_lift else ""
        raise CommandLineError(f"{flag} {text[:40]!r} cannot be used: write {expected}{lifted}") from None


def _number(low: float, high: float, example: str) -> tuple[Parse, str]:
    def parse(text: str, flag: str) -> float:
        plain = text.replace("_", "")
        if not is_decimal(plain) or not low <= float(plain) <= high:
            raise ValueError(text)
        return float(plain)

    return parse, f"a number, {low:g} to {high:g}, such as {example}"


def _count(text: str, flag: str) -> int:
    plain = text.replace("_", "")
    if not (plain.isascii() and plain.isdigit() and len(plain) < 20 and 1 <= int(plain) <= MAX_COUNT):
        raise ValueError(text)
    return int(plain)


def _class(text: str, flag: str) -> int:
    names = [name.removeprefix("P") for name in CLASS_NAMES]
    return names.index(text.upper().removeprefix("P"))


def _list(text: str, flag: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _text(text: str, flag: str) -> str:
    return text


_RATE = _number(1e-6, MAX_RATE, "600 or 0.5")
_COUNT: tuple[Parse, str] = (_count, f"a whole number, 1 to {MAX_COUNT:,}, such as 8")
_CLASS: tuple[Parse, str] = (_class, "P0, P1, P2 or P3")
_PARSERS: dict[str, tuple[str, Parse, str]] = {
    "weight": ("--weight", *_number(0.001, 1000, "2.5")),
    "highest_class": ("--highest-class", *_CLASS),
    "default_class": ("--default-class", *_CLASS),
    "default_max_tokens": ("--default-max-tokens", *_COUNT),
    "requests_per_minute": ("--requests-per-minute", *_RATE),
    "tokens_per_minute": ("--tokens-per-minute", *_RATE),
    "tokens_per_day": ("--tokens-per-day", *_RATE),
    "burst_s": ("--burst", span_s, "a span"),
    "concurrent_requests": ("--concurrent", *_COUNT),
    "queued_requests": ("--queued", *_COUNT),
    "context_tokens": ("--context", *_COUNT),
    "kv_share": ("--kv-share", *_number(1e-6, 1, "0.25")),
    "cache_group": ("--cache-group", _text, "a name"),
    "log_policy": ("--log-policy", _text, "metadata, hashes or full"),
    "log_days": ("--log-days", *_number(1e-6, MAX_DAYS, "30")),
    "scopes": ("--scopes", _list, "a list"),
    "models": ("--models", _list, "a list"),
}
