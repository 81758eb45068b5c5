"""Converts the texts and conversations in requests to tokens, and tokens to text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from appliance.front.app_state import AppState
from appliance.front.encoding import do_work, text_bytes, text_memory, too_much_work
from appliance.front.errors import ApiError, invalid
from appliance.front.length_limits import MAX_TOKENS_SHOWN, LengthLimit, too_many_to_show
from appliance.front.models import LoadedModel
from appliance.front.request_context import RequestContext
from appliance.front.schemas import ChatMessage
from appliance.text.cuts import PIECE_CHARACTERS
from appliance.text.encoder import LoneSurrogateError, TooManyTokensError, UncuttableTextError
from appliance.text.fair_queue import TooMuchWorkError
from appliance.text.template_messages import ChatTemplateError, TemplateBoundError

MAX_VARIABLES_BYTES = 65_536
"""Maximum size of `chat_template_kwargs` as JSON, in bytes."""
HIDE_INLINE_CHARACTERS = 4096
"""Conversations with more characters than this are searched for control tokens in a separate thread. The
search takes up to 2.5 µs per character."""

_MESSAGE_CHARACTERS = 16
"""Number of characters that each message adds to a conversation's size, in addition to its text. Searching
the message's role and field names for control tokens takes as long as searching this many characters."""
_MARK_DIGITS = 20
"""Number of digits in the marker that is appended to the message to be continued. The marker consists of
digits because no chat template filter changes digits."""
_RESERVED_VARIABLES = frozenset(["messages", "tools", "documents", "add_generation_prompt"])


async def text_tokens(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    texts: list[str],
    *,
    add_special_tokens: bool = True,
    limit: LengthLimit | None = None,
) -> list[list[int]]:
    """Return the tokens of each text in the `prompt` field. If `limit` is None, the texts may have at most
    `MAX_TOKENS_SHOWN` tokens in total. Raises `ApiError` if they cannot be encoded."""
    try:
        with text_memory(state, context, text_bytes(texts)):
            steps = model.tokenizer.encode_steps(texts, add_special_tokens, _max_tokens(limit))
            return await do_work(state, context, steps, sum(map(len, texts)))
    except LoneSurrogateError as error:
        raise invalid("prompt", str(error)) from None
    except UncuttableTextError as error:
        raise invalid(prompt_param(error.index, texts), str(error)) from None
    except TooManyTokensError as error:
        raise _too_many(limit, prompt_param(error.index, texts), error.tokens) from None


async def chat_tokens(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None = None,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
    continue_final_message: bool = False,
    limit: LengthLimit | None = None,
) -> list[int]:
    """Return the prompt for a conversation. The prompt's control tokens come only from the chat template, not
    from messages.

    If `add_generation_prompt` is None, the chat template's default is used. If `continue_final_message` is
    set, the prompt ends with the text of the last message. If `limit` is None, the prompt may have at most
    `MAX_TOKENS_SHOWN` tokens. Raises `ApiError` if the conversation cannot be encoded.
    """
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise invalid("chat_template_kwargs", f"the variable {name!r} cannot be set in a request")
    shown: Any = [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in conversation(messages)
    ]
    mark = f"{secrets.randbelow(10**_MARK_DIGITS):0{_MARK_DIGITS}}" if continue_final_message else ""
    shown[-1]["content"] += mark
    generates = add_generation_prompt is not False and not continue_final_message
    size, memory = conversation_size(messages)
    if variables:
        variables_size = _checked_size(variables)
        size, memory = size + variables_size, memory + variables_size
    shield = model.tokenizer.shield()
    try:
        with text_memory(state, context, memory):
            shown, variables = await do_work(
                state, context, shield.hide([shown, variables]), size, inline=HIDE_INLINE_CHARACTERS
            )
            text = await model.template.render(context.identity.tenant, shown, generates, variables)
        if mark:
            text = _before_mark(text, mark)
        # A chat template can produce far more text than the messages contain.
        with text_memory(state, context, memory + text_bytes([text])):
            steps = model.tokenizer.encode_rendered_steps(
                text, shield, add_special_tokens, _max_tokens(limit)
            )
            return (await do_work(state, context, steps, len(text)))[0]
    except TooMuchWorkError as error:
        raise too_much_work(state, error) from None
    except TemplateBoundError as error:
        raise invalid("messages", str(error), "chat_template_bound") from None
    except (ChatTemplateError, LoneSurrogateError, UncuttableTextError) as error:
        raise invalid("messages", shield.restore(str(error))) from None
    except TooManyTokensError as error:
        raise _too_many(limit, "messages", error.tokens) from None


async def decode(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    token_ids: list[int],
    skip_special: bool = True,
    complete: bool = True,
) -> str:
    """Convert token ids to text. All ids must be in the model's vocabulary. If `complete` is false, an
    incomplete character at the end is omitted."""
    steps = model.tokenizer.decode_steps(token_ids, skip_special, complete)
    return await do_work(state, context, steps, len(token_ids), inline=PIECE_CHARACTERS)


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Return the messages as dicts with the role, the content and, if present, the name."""
    return [
        {"role": message.role, "content": message.text}
        | ({"name": message.name} if message.name is not None else {})
        for message in messages
    ]


def conversation_size(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """Return a conversation's length in characters and its size in memory, in bytes. Messages without text
    count too, because processing them takes time and memory."""
    texts = [text for message in messages for text in (message.text, message.name) if text]
    others = len(messages) * _MESSAGE_CHARACTERS
    return others + sum(map(len, texts)), others + text_bytes(texts)


def prompt_param(index: int, prompts: Sequence[object]) -> str:
    """Return the name by which error messages refer to one of a completion's prompts."""
    return "prompt" if len(prompts) == 1 else f"prompt[{index}]"


def _max_tokens(limit: LengthLimit | None) -> int | None:
    return MAX_TOKENS_SHOWN if limit is None else limit.max_prompt_tokens


def _too_many(limit: LengthLimit | None, param: str, tokens: int | None) -> ApiError:
    return too_many_to_show(param) if limit is None else limit.exceeded(param, tokens)


def _checked_size(variables: dict[str, Any]) -> int:
    """Return the template variables' size as JSON, in bytes. Raises a 400 if it exceeds the limit."""
    size = len(json.dumps(variables))
    if size > MAX_VARIABLES_BYTES:
        raise invalid(
            "chat_template_kwargs", f"takes {size} bytes as JSON; at most {MAX_VARIABLES_BYTES} are allowed"
        )
    return size


def _before_mark(text: str, mark: str) -> str:
    """Return the rendered conversation up to the marker at the end of its last message. Raises `ApiError` if
    the chat template has changed the marker."""
    end = text.rfind(mark)
    if end < 0:
        raise invalid(
            "continue_final_message",
            "the model's chat template changes the text of the last message, so that message cannot be "
            "continued",
        )
    return text[:end].replace(mark, "")
