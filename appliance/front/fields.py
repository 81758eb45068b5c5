"""Field types of the request models that JSON Schema's usual types do not cover.

They validate by hand where pydantic's unions would try every branch on every element of a hostile list.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

from appliance.front.refused_fields import UNSUPPORTED

MOST_PROMPTS = 1024
MOST_LOGIT_BIASES = 1024
MOST_STOPS = 16
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""As many as the largest known vocabulary has tokens: ids are less, too."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
"""Of one bad word. Words are tokenized twice, see `appliance.front.bad_words`."""
MAX_USER_CHARS = 512
"""Of `user`, which is held as long as the request runs and is written to the request log."""


def _error(kind: str, message: str) -> PydanticCustomError:
    # Text from a client must not be taken for a template.
    return PydanticCustomError(kind, "{message}", {"message": message})


def _integral(value: Any) -> Any:
    # To JSON Schema, 5.0 is an integer.
    return int(value) if type(value) is float and value.is_integer() else value


INTEGRAL = BeforeValidator(_integral)
"""After an integer's bounds, so that they stay in the JSON schema."""


class _FailFast:
    """pydantic's own FailFast is not hashable, so `| None` cannot follow it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema: dict[str, Any] = dict(handler(source))
        return cast(core_schema.CoreSchema, schema | {"fail_fast": True})


FAIL_FAST = _FailFast()
"""Of a list's type: validation ends at the first wrong item, not after a quarter of a million of them."""


def _ids(value: Any) -> list[int] | None:
    """A list of integers, or None if it is something else."""
    if not isinstance(value, list):
        return None
    kinds = set(map(type, value))
    if kinds <= {int}:
        return value
    if kinds <= {int, float} and all(item.is_integer() for item in value if type(item) is float):
        return list(map(int, value))
    return None


def _user(value: str) -> str:
    if len(value) > MAX_USER_CHARS:
        raise _error(
            "too_long",
            f"has {len(value)} characters; give at most {MAX_USER_CHARS}, such as a hash of a longer name",
        )
    return value


User = Annotated[str, Field(json_schema_extra={"maxLength": MAX_USER_CHARS}), AfterValidator(_user)]


def _not_zero(value: int) -> int:
    if value == 0:
        raise _error("range", "must be at least 1, or -1")
    return value


PositiveOrMinusOne = Annotated[
    int,
    Field(ge=-1),
    AfterValidator(_not_zero),
    INTEGRAL,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]}),
]


def _only_text_format(value: Any) -> None:
    if value is None or (isinstance(value, dict) and value.get("type") == "text"):
        return
    kind = value.get("type") if isinstance(value, dict) else value
    raise _error(
        UNSUPPORTED,
        f'type {str(kind)[:40]!r} is not supported by this server; use {{"type": "text"}} and describe the '
        "format in the prompt",
    )


ResponseFormat = Annotated[
    None,
    PlainValidator(_only_text_format),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"type": "string", "const": "text"}},
                    "required": ["type"],
                },
                {"type": "null"},
            ],
            "description": "Only text.",
        }
    ),
]


def _no_tool_choice(value: Any) -> None:
    if value is None or value == "none":
        return
    shown = repr(value[:40]) if isinstance(value, str) else "an object"
    raise _error(
        UNSUPPORTED, f"{shown} is not supported by this server; tools are not available: leave it out"
    )


ToolChoice = Annotated[
    None,
    PlainValidator(_no_tool_choice),
    WithJsonSchema(
        {"anyOf": [{"const": "none"}, {"type": "null"}], "description": "Tools are not available."}
    ),
]


def _content(value: Any, info: ValidationInfo) -> str:
    if isinstance(value, str):
        return value
    if value is None and info.data.get("role") == "assistant":
        return ""
    if value is None:
        raise _error("missing", "is required")
    if not isinstance(value, list):
        raise _error("string_type", "must be a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = repr(kind)[:60]
            raise _error(UNSUPPORTED, f"part {index} has type {shown}; this server takes text parts only")
        text = part.get("text")
        if not isinstance(text, str):
            raise _error("string_type", f"part {index} needs a string in 'text'")
        texts.append(text)
    return "\n".join(texts)


Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema(
        {
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
                {"type": "null"},
            ],
            "description": "Text, or text parts, which are joined by line breaks. In an assistant's message "
            "null, or no content at all, is an empty text.",
        }
    ),
]


def _stops(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if value is None or strings == []:
        return ()
    if not isinstance(strings, (list, tuple)) or not all(
        isinstance(string, str) for string in strings[: MOST_STOPS + 1]
    ):
        raise _error("string_type", "must be a string or a list of strings")
    if len(strings) > MOST_STOPS:
        raise _error("too_long", f"has {len(strings)} strings; give at most {MOST_STOPS}")
    return tuple(strings)


Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": 4096},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 4096},
                    "maxItems": MOST_STOPS,
                },
                {"type": "null"},
            ]
        }
    ),
]


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _error("dict_type", "must be an object from token ids to numbers")
    if len(value) > MOST_LOGIT_BIASES:
        raise _error("too_long", f"has {len(value)} tokens; give at most {MOST_LOGIT_BIASES}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise _error("int_parsing", f"{key[:20]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _error("range", f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MOST_LOGIT_BIASES,
                },
                {"type": "null"},
            ],
            "description": "Added to the logits of these token ids.",
        }
    ),
]


def _allowed_token_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    ids = _ids(value)
    if not ids:
        raise _error(
            "token_ids", "must be a list of token ids that is not empty; leave it out to allow all tokens"
        )
    if len(ids) > MAX_ALLOWED_TOKEN_IDS:
        raise _error("too_long", f"has {len(ids)} token ids; give at most {MAX_ALLOWED_TOKEN_IDS}")
    if min(ids) < 0 or max(ids) >= MAX_ALLOWED_TOKEN_IDS:
        raise _error("range", f"has a token id that is not from 0 to {MAX_ALLOWED_TOKEN_IDS - 1}")
    return ids


AllowedTokenIds = Annotated[
    list[int] | None,
    PlainValidator(_allowed_token_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                    "minItems": 1,
                    "maxItems": MAX_ALLOWED_TOKEN_IDS,
                },
                {"type": "null"},
            ]
        }
    ),
]


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value[: MAX_BAD_WORDS + 1]):
        raise _error("string_type", "must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise _error("too_long", f"has {len(value)} words; give at most {MAX_BAD_WORDS}")
    for index, word in enumerate(value):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise _error(
                "too_long", f"word {index} has {len(word)} characters; give 1 to {MAX_BAD_WORD_CHARS}"
            )
    return tuple(value)


BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_bad_words),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS},
                    "maxItems": MAX_BAD_WORDS,
                },
                {"type": "null"},
            ]
        }
    ),
]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _error(
            "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    single = _ids(value)
    if single is not None:
        return [single]
    if len(value) > MOST_PROMPTS:
        raise _error("too_long", f"has {len(value)} prompts; give at most {MOST_PROMPTS}")
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds == {list}:
        lists = [_ids(ids) for ids in value]
        if all(lists):
            return [ids for ids in lists if ids]
    raise _error(
        "prompt_type", "mixes types or has an empty list: give strings only, or lists of token ids only"
    )


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MOST_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MOST_PROMPTS},
            ],
            "description": "Text, token ids, or a list of either: each is answered `n` times.",
        }
    ),
]


def _token_ids(value: Any) -> list[int]:
    ids = _ids(value)
    if ids is None:
        raise _error("token_ids", "must be a list of token ids")
    return ids


TokenIds = Annotated[
    list[int],
    PlainValidator(_token_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
]
