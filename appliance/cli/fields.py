"""What people type for the fields of an action: numbers, classes, lists, and "none" for no limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from appliance.classes import CLASS_NAMES
from appliance.cli.failure import Failure
from appliance.cli.times import span_s


def given_fields(options: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The options that were given, of those that `kind` has as fields, as its values. Raises Failure."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {
        name: _value(name, text, type(None) in get_args(types[name]))
        for name, text in options.items()
        if name in _PARSERS and name in types and text is not None
    }


def _value(name: str, text: Any, may_lift: bool) -> Any:
    flag, parse = _PARSERS[name]
    if may_lift and text == "none":
        return None
    try:
        value = parse(text, flag) if isinstance(text, str) else text
        if isinstance(value, float) and not math.isfinite(value):
            # In JSON it would become null, which lifts a limit.
            raise ValueError(text)
        return value
    except ValueError:
        lifted = ", or none" if may_lift else ""
        raise Failure(f"{flag} {str(text)!r} cannot be used: {_EXPECTED[parse]}{lifted}") from None


def _number(text: str, flag: str) -> float:
    return float(text)


def _count(text: str, flag: str) -> int:
    return int(text)


def _class(text: str, flag: str) -> int:
    number = int(text.upper().removeprefix("P"))
    if not 0 <= number < len(CLASS_NAMES):
        raise ValueError(text)
    return number


def _words(text: str, flag: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _text(text: str, flag: str) -> str:
    return text


_PARSERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "weight": ("--weight", _number),
    "highest_class": ("--highest-class", _class),
    "default_class": ("--default-class", _class),
    "default_max_tokens": ("--default-max-tokens", _count),
    "requests_per_minute": ("--requests-per-minute", _number),
    "tokens_per_minute": ("--tokens-per-minute", _number),
    "tokens_per_day": ("--tokens-per-day", _number),
    "burst_s": ("--burst", span_s),
    "concurrent_requests": ("--concurrent", _count),
    "queued_requests": ("--queued", _count),
    "context_tokens": ("--context", _count),
    "kv_share": ("--kv-share", _number),
    "cache_group": ("--cache-group", _text),
    "log_policy": ("--log-policy", _text),
    "log_days": ("--log-days", _number),
    "scopes": ("--scopes", _words),
    "models": ("--models", _words),
}
_EXPECTED: dict[Callable[[str, str], Any], str] = {
    _number: "write a number such as 600 or 0.5",
    _count: "write a whole number such as 8",
    _class: "write P0, P1, P2 or P3",
}
