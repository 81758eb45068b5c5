"""Types for request fields with more than one JSON form, or with limits that JSON Schema cannot express."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from appliance.front.validation import UNSUPPORTED, FieldError, as_integer, shown
from appliance.text.stop import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_PROMPTS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""Size of the largest known vocabulary: an upper bound on token ids and on the length of token id lists."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
"""Maximum length of a bad word, in characters. Each word is tokenized with and without a leading space."""
MAX_TEMPLATE_VARIABLES = 32
MAX_TEMPLATE_VARIABLE_DEPTH = 200
"""Maximum nesting depth of lists and objects. The depth is limited because template rendering is
recursive."""
MAX_TEMPLATE_VARIABLE_ITEMS = 32_768
"""Maximum number of values in `chat_template_kwargs`, including those nested in lists and objects."""

MAX_KEEP_ALIVE_S = 1e9
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(h|ms|m|s)?")
_DURATION = re.compile(r"[+-]?([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(h|ms|m|s))+)")
"""Matches a duration in Ollama's format: a number of seconds, or numbers with units."""

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _ids(value: Any) -> list[int] | None:
    """Return the value if it is a list of integers, otherwise None."""
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))
    if kinds <= {int}:
        return value
    if kinds <= {int, float} and all(item.is_integer() for item in value if type(item) is float):
        return list(map(int, value))
    return None


class PositiveOrMinusOne(int):
    """A request field that holds a count, or -1 for no limit."""

    json_schema: ClassVar[dict[str, Any]] = {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}

    @classmethod
    def parse(cls, value: Any) -> int:
        """Return the field's number. Raises FieldError if the value is not allowed."""
        number = as_integer(value)
        if number is None or (number < 1 and number != -1):
            raise FieldError(f"must be an integer of at least 1, or -1, not {shown(value)}")
        return number


class KeepAliveField(float):
    """A duration in seconds, or a string such as "10m". A negative duration means no limit."""

    json_schema: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "number", "minimum": -MAX_KEEP_ALIVE_S, "maximum": MAX_KEEP_ALIVE_S},
            {"type": "string", "pattern": f"^{_DURATION.pattern}$"},
        ]
    }

    @classmethod
    def parse(cls, value: Any) -> float:
        """Return the field's duration in seconds. Raises FieldError if the value is not allowed."""
        seconds = _seconds(value)
        if seconds is None or seconds > MAX_KEEP_ALIVE_S:
            raise FieldError(
                f'must be a number of seconds up to {MAX_KEEP_ALIVE_S:g}, or a string such as "30s", "10m" '
                f'or "1h30m", not {shown(value)}'
            )
        return seconds


def _seconds(value: Any) -> float | None:
    """Return the duration in seconds, or None if the value is not a valid duration."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_KEEP_ALIVE_S else None
    if not isinstance(value, str) or len(value) > 64 or not _DURATION.fullmatch(value):
        return None
    sign = -1.0 if value.startswith("-") else 1.0
    parts = _DURATION_PART.findall(value)
    return sign * sum(float(number) * _UNIT_S[unit or "s"] for number, unit in parts)


class TextFormatField:
    """The `response_format` field. Only the text format is supported."""

    json_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"type": {"type": "string", "const": "text"}},
        "required": ["type"],
    }

    @classmethod
    def parse(cls, value: Any) -> None:
        """Accept only the text format. Raises FieldError for any other value."""
        kind = value.get("type") if isinstance(value, dict) else value
        if not isinstance(value, dict) or kind != "text":
            raise FieldError(
                f'type {shown(kind)} is not supported by this server; use {{"type": "text"}} and '
                "describe the desired format in the prompt",
                UNSUPPORTED,
            )


class NoToolChoiceField:
    """The `tool_choice` or `function_call` field. Only "none" is supported."""

    json_schema: ClassVar[dict[str, Any]] = {"const": "none"}

    @classmethod
    def parse(cls, value: Any) -> None:
        """Accept only "none". Raises FieldError for any other value."""
        if value != "none":
            raise FieldError(
                f"{shown(value)} is not supported by this server; tools are not available, so omit this "
                "field",
                UNSUPPORTED,
            )


class ContentField(str):
    """The content of a message: a string, or a list of text parts."""

    json_schema: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    "required": ["type", "text"],
                },
            },
        ]
    }

    @classmethod
    def parse(cls, value: Any) -> str:
        """Return the message's text, joining multiple parts with line breaks. Raises FieldError if the value
        is not allowed."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise FieldError("must be a string or a list of text parts")
        texts: list[str] = []
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                raise FieldError(
                    f"part {index} has type {shown(kind)}; this server supports only text parts", UNSUPPORTED
                )
            text = part.get("text")
            if not isinstance(text, str):
                raise FieldError(f"part {index} must have a string in its 'text' field")
            texts.append(text)
        return "\n".join(texts)


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


class StopsField(tuple[str, ...]):
    """The `stop` field: a string, or a list of strings."""

    json_schema: ClassVar[dict[str, Any]] = {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]
    }

    @classmethod
    def parse(cls, value: Any) -> tuple[str, ...]:
        """Return the stop strings. Raises FieldError if the value is not allowed."""
        strings = [value] if isinstance(value, str) else value
        return _strings(strings, "must be a string or a list of strings", "strings", MAX_STOP_STRINGS)


class BadWordsField(tuple[str, ...]):
    """The `bad_words` field: a list of strings."""

    json_schema: ClassVar[dict[str, Any]] = {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS},
        "maxItems": MAX_BAD_WORDS,
    }

    @classmethod
    def parse(cls, value: Any) -> tuple[str, ...]:
        """Return the bad words. Raises FieldError if the value is not allowed."""
        words = _strings(value, "must be a list of strings", "words", MAX_BAD_WORDS)
        for index, word in enumerate(words):
            if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
                raise FieldError(
                    f"word {index} has {len(word)} characters; words must have 1 to {MAX_BAD_WORD_CHARS} "
                    "characters"
                )
        return words


def _strings(value: Any, kind: str, unit: str, max_count: int) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value[: max_count + 1]):
        raise FieldError(kind)
    if len(value) > max_count:
        raise FieldError(f"has {len(value)} {unit}; at most {max_count} are allowed")
    return tuple(value)


class LogitBiasField(dict[int, float]):
    """The `logit_bias` field: an object that maps token ids to numbers."""

    json_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIASES,
    }

    @classmethod
    def parse(cls, value: Any) -> dict[int, float]:
        """Return the biases, keyed by token id. Raises FieldError if the value is not allowed."""
        if not isinstance(value, dict):
            raise FieldError("must be an object that maps token ids to numbers")
        if len(value) > MAX_LOGIT_BIASES:
            raise FieldError(f"has {len(value)} tokens; at most {MAX_LOGIT_BIASES} are allowed")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise FieldError(f"{key[:20]!r} is not a token id")
            if type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise FieldError(f"the bias of token {key} must be a number from -100 to 100")
            biases[int(key)] = float(bias)
        return biases


class TokenIdsField(list[int]):
    """A list of token ids, which can be empty."""

    json_schema: ClassVar[dict[str, Any]] = _TOKEN_IDS

    @classmethod
    def parse(cls, value: Any) -> list[int]:
        """Return the token ids. Raises FieldError if the value is not allowed."""
        ids = _ids(value)
        if ids is None:
            raise FieldError("must be a list of token ids")
        return ids


class AllowedTokenIdsField(list[int]):
    """The `allowed_token_ids` field: a non-empty list of token ids."""

    json_schema: ClassVar[dict[str, Any]] = {**_TOKEN_IDS, "minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS}

    @classmethod
    def parse(cls, value: Any) -> list[int]:
        """Return the token ids. Raises FieldError if the value is not allowed."""
        ids = _ids(value)
        if not ids:
            raise FieldError("must be a non-empty list of token ids; omit this field to allow all tokens")
        if len(ids) > MAX_ALLOWED_TOKEN_IDS:
            raise FieldError(f"has {len(ids)} token ids; at most {MAX_ALLOWED_TOKEN_IDS} are allowed")
        if min(ids) < 0 or max(ids) >= MAX_ALLOWED_TOKEN_IDS:
            raise FieldError(f"has a token id outside the range from 0 to {MAX_ALLOWED_TOKEN_IDS - 1}")
        return ids


class PromptsField(list[str | list[int]]):
    """The `prompt` field: a string, a list of strings, a list of token ids (one prompt), or a list of lists
    of token ids."""

    json_schema: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
            {**_TOKEN_IDS, "minItems": 1},
            {
                "type": "array",
                "items": {**_TOKEN_IDS, "minItems": 1},
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
            },
        ],
    }

    @classmethod
    def parse(cls, value: Any) -> list[str] | list[list[int]]:
        """Return the prompts as a list of strings or a list of lists of token ids. Raises FieldError if the
        value is not allowed."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise FieldError(
                "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
            )
        single = _ids(value)
        if single is not None:
            return [single]
        if len(value) > MAX_PROMPTS:
            raise FieldError(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
        kinds = set(map(type, value))
        if kinds == {str}:
            return value
        if kinds == {list}:
            lists = [_ids(ids) for ids in value]
            if all(lists):
                return [ids for ids in lists if ids]
        raise FieldError(
            "mixes types or contains an empty list; use only strings, or only lists of token ids"
        )


class TemplateVariablesField(dict[str, Any]):
    """The `chat_template_kwargs` field: any JSON object."""

    json_schema: ClassVar[dict[str, Any]] = {"type": "object", "maxProperties": MAX_TEMPLATE_VARIABLES}

    @classmethod
    def parse(cls, value: Any) -> dict[str, Any]:
        """Return the template variables. Raises FieldError if the value is not allowed."""
        if not isinstance(value, dict):
            raise FieldError(f"must be an object, not {shown(value)}")
        if len(value) > MAX_TEMPLATE_VARIABLES:
            raise FieldError(f"has {len(value)} variables; at most {MAX_TEMPLATE_VARIABLES} are allowed")
        level: list[Any] = [value]
        items = 0
        for _ in range(MAX_TEMPLATE_VARIABLE_DEPTH):
            items += sum(map(len, level))
            if items > MAX_TEMPLATE_VARIABLE_ITEMS:
                raise FieldError(f"has more than {MAX_TEMPLATE_VARIABLE_ITEMS} values")
            level = [
                item
                for container in level
                for item in (container.values() if isinstance(container, dict) else container)
                if isinstance(item, (dict, list))
            ]
            if not level:
                return value
        raise FieldError(f"is nested too deeply; at most {MAX_TEMPLATE_VARIABLE_DEPTH} levels are allowed")
