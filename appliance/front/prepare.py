"""From a request's body to a task: template, tokens, limits of the model, sampling parameters."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from appliance.classes import service_class
from appliance.front.app_state import AppState
from appliance.front.encoding import do_work, text_bytes, text_memory, too_much_work
from appliance.front.errors import ApiError, invalid
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.keeping import Message, Text
from appliance.front.models import LoadedModel
from appliance.front.request_context import RequestContext
from appliance.front.sampling import check_token_ids, sampling_params
from appliance.front.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from appliance.messages import Identity
from appliance.text.cuts import PIECE_CHARACTERS
from appliance.text.encoder import LoneSurrogateError, TooManyTokensError, UncuttableTextError
from appliance.text.fair_queue import TooMuchWorkError
from appliance.text.stop import StopSet, StopStringsError
from appliance.text.template_messages import ChatTemplateError, TemplateBoundError

MAX_SEQUENCES = 1024
"""Prompts times samples in one request."""
MAX_PROMPT_LOGPROBS = 131_072
"""Log probabilities of prompts in one answer with `prompt_logprobs`: to decode so many takes the event loop
40 ms."""
MAX_ANSWER_LOGPROBS = 262_144
"""Log probabilities of generated tokens in one answer that is not streamed: it is held until it is complete,
and each of them takes about 200 bytes."""
MAX_RETURNED_PROMPT_TOKENS = 1 << 20
"""Token ids of prompts in one answer with `return_token_ids`."""
MAX_SENT_NUMBERS = 262_144
"""Prompts times what `allowed_token_ids` and `bad_words` take: each prompt is sent to the replica with a
copy."""

_MARK_DIGITS = 20
"""Digits are what no filter of a template changes."""

MAX_SENT_BIASES = 65_536
"""Prompts times entries of `logit_bias`: each prompt is sent to the replica with a copy of its biases."""
MAX_ECHOED = 131_072
"""Tokens of prompts in one answer, or their log probabilities."""
MAX_TOKENS_SHOWN = 524_288
"""Tokens in the answer of /tokenize."""
MAX_VARIABLES_BYTES = 65_536
"""Of `chat_template_kwargs` as JSON."""

_MESSAGE_CHARACTERS = 16
"""What a message counts besides its text: looking for control tokens in its role and its field names takes as
long as in so many characters."""
HIDE_INLINE_CHARACTERS = 4096
"""Looking for control tokens in more characters is not done on the event loop: 2.5 µs each at worst."""

_NO_LIMIT = 1 << 20
"""Tokens to generate where the model's length is not known yet: the engine ends an answer at its own."""

_RESERVED_VARIABLES = frozenset(["messages", "tools", "documents", "add_generation_prompt"])


def named_model(state: AppState, context: RequestContext, body: GenerationRequest) -> LoadedModel:
    """The model that the request names. Raises `ApiError` if there is none, or it is not for this caller."""
    context.model = body.model[:200]
    context.stream = bool(body.stream)
    context.user = body.user or ""
    return state.catalog.get(body.model, context.identity)


async def chat_task(
    state: AppState, model: LoadedModel, context: RequestContext, body: ChatRequest
) -> GenerationTask:
    """Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "cannot be true together with add_generation_prompt")
    length_limit = _length_limit(context.identity, model)
    token_ids = await chat_tokens(
        state,
        model,
        context,
        body.messages,
        body.add_generation_prompt is not False and not continues,
        variables=body.chat_template_kwargs,
        continue_final_message=continues,
        length_limit=_encoded_limit(body, length_limit),
    )
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit, default = _limits(context.identity, asked, None)
    _count(context, len(token_ids))
    token_ids = _truncated(body, length_limit, token_ids, limit)
    context.prompt_tokens = len(token_ids)
    prompt = Prompt(0, token_ids, _room(length_limit, token_ids, limit, default, "messages", field))
    return await _make_task(
        state,
        context,
        body,
        model,
        [prompt],
        chat=True,
        may_lower=limit is None,
        asked=[_conversation(body.messages)],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        continues_text=continues,
    )


async def completion_task(
    state: AppState, model: LoadedModel, context: RequestContext, body: CompletionRequest
) -> GenerationTask:
    """Raises `ApiError`."""
    n = body.n or 1
    best_of = body.best_of or n
    if best_of < n:
        raise invalid("best_of", f"is {best_of}, less than n, {n}: give at least n, or leave it out")
    if best_of > n and body.stream:
        raise invalid(
            "best_of",
            f"{best_of} answers, of which {n} are returned, cannot be streamed: leave out stream, or best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1 without echo")
    if len(body.prompt) * best_of > MAX_SEQUENCES:
        field, times = ("best_of", "best_of") if body.best_of else ("n", "n")
        raise invalid(
            field, f"{len(body.prompt)} prompts times {times} make more than {MAX_SEQUENCES} answers"
        )
    biases = len(body.logit_bias or ())
    if len(body.prompt) * biases > MAX_SENT_BIASES:
        raise invalid(
            "logit_bias",
            f"has {biases} tokens for {len(body.prompt)} prompts: the product may be at most "
            f"{MAX_SENT_BIASES}; send fewer prompts in a request",
        )
    length_limit = _length_limit(context.identity, model, 0 if body.max_tokens == 0 else 1)
    texts = [text for text in body.prompt if isinstance(text, str)]
    if texts:
        tokens = await _encode_texts(state, model, context, texts, _encoded_limit(body, length_limit))
    else:
        tokens = [check_token_ids(model, ids, "prompt") for ids in body.prompt if isinstance(ids, list)]
    _count(context, sum(map(len, tokens)))
    limit, default = _limits(context.identity, body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    whole = tokens
    keeps_bos = bool(texts) and model.tokenizer.adds_bos
    tokens = [_truncated(body, length_limit, ids, limit, keeps_bos) for ids in whole]
    context.prompt_tokens = sum(map(len, tokens))
    if body.echo:
        _check_echo(tokens, body.logprobs, n)
    prompts = []
    for index, token_ids in enumerate(tokens):
        room = _room(length_limit, token_ids, limit, default, _prompt_param(index, tokens), "max_tokens")
        prompt = Prompt(index, token_ids, room)
        if body.echo:
            if texts and len(token_ids) == len(whole[index]):
                prompt.echo_text = texts[index]
            else:
                skips = body.skip_special_tokens is not False
                prompt.echo_text = await decode(state, model, context, token_ids, skips)
        prompts.append(prompt)
    return await _make_task(
        state,
        context,
        body,
        model,
        prompts,
        chat=False,
        may_lower=limit is None,
        asked=list(body.prompt),
        logprobs=body.logprobs,
        best_of=best_of,
        continues_text=True,
        echo=bool(body.echo),
        discard_output=body.max_tokens == 0,
    )


async def text_tokens(
    state: AppState, model: LoadedModel, context: RequestContext, text: str, add_special_tokens: bool
) -> list[int]:
    """The tokens of a text that is not to be answered. Raises `ApiError`."""
    try:
        with text_memory(state, context, text_bytes([text])):
            steps = model.tokenizer.encode_steps([text], add_special_tokens, MAX_TOKENS_SHOWN)
            return (await do_work(state, context, steps, len(text)))[0]
    except (LoneSurrogateError, UncuttableTextError) as error:
        raise invalid("prompt", str(error)) from None
    except TooManyTokensError:
        raise _too_many_to_show("prompt") from None


async def decode(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    token_ids: list[int],
    skip_special: bool = True,
) -> str:
    """The text of token ids, which the model knows."""
    steps = model.tokenizer.decode_steps(token_ids, skip_special)
    return await do_work(state, context, steps, len(token_ids), inline=PIECE_CHARACTERS)


async def chat_tokens(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
    continue_final_message: bool = False,
    length_limit: LengthLimit | None = None,
) -> list[int]:
    """The prompt of a conversation, in which only the template makes control tokens. With
    `continue_final_message` it ends with the last message's text. It may be longer than `MAX_TOKENS_SHOWN`
    only where `length_limit` allows it. Raises `ApiError`."""
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise invalid("chat_template_kwargs", f"{name!r} cannot be set here")
    shown: Any = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.text,
        }
        | ({"name": message.name} if message.name is not None else {})
        for message in messages
    ]
    mark = f"{secrets.randbelow(10**_MARK_DIGITS):0{_MARK_DIGITS}}" if continue_final_message else ""
    shown[-1]["content"] += mark
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
            text = await model.template.render(
                context.identity.tenant, shown, add_generation_prompt, variables
            )
            if mark:
                text = _before_mark(text, mark)
            max_tokens = MAX_TOKENS_SHOWN if length_limit is None else length_limit.max_prompt_tokens
            steps = model.tokenizer.encode_rendered_steps(text, shield, add_special_tokens, max_tokens)
            return (await do_work(state, context, steps, len(text)))[0]
    except TooMuchWorkError as error:
        raise too_much_work(error) from None
    except TemplateBoundError as error:
        raise invalid("messages", str(error), "chat_template_bound") from None
    except (ChatTemplateError, LoneSurrogateError, UncuttableTextError) as error:
        raise invalid("messages", shield.restore(str(error))) from None
    except TooManyTokensError as error:
        if length_limit is None:
            raise _too_many_to_show("messages") from None
        raise _too_long(length_limit, "messages", error.tokens) from None


async def _encode_texts(
    state: AppState,
    model: LoadedModel,
    context: RequestContext,
    texts: list[str],
    length_limit: LengthLimit | None,
) -> list[list[int]]:
    size = sum(map(len, texts))
    try:
        with text_memory(state, context, text_bytes(texts)):
            max_tokens = MAX_TOKENS_SHOWN if length_limit is None else length_limit.max_prompt_tokens
            steps = model.tokenizer.encode_steps(texts, True, max_tokens)
            return await do_work(state, context, steps, size)
    except LoneSurrogateError as error:
        raise invalid("prompt", str(error)) from None
    except UncuttableTextError as error:
        raise invalid(_prompt_param(error.index, texts), str(error)) from None
    except TooManyTokensError as error:
        param = _prompt_param(error.index, texts)
        if length_limit is None:
            raise _too_many_to_show(param) from None
        raise _too_long(length_limit, param, error.tokens) from None


def conversation_size(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """Return the characters of a conversation, and the bytes of memory that they take. Messages without text
    count too: they take work and memory as well."""
    texts = [text for message in messages for text in (message.text, message.name) if text]
    others = len(messages) * _MESSAGE_CHARACTERS
    return others + sum(map(len, texts)), others + text_bytes(texts)


def _checked_size(variables: dict[str, Any]) -> int:
    """The bytes of further template variables as JSON. Raises a 400 for too many."""
    size = len(json.dumps(variables))
    if size > MAX_VARIABLES_BYTES:
        raise invalid("chat_template_kwargs", f"has {size} bytes; give at most {MAX_VARIABLES_BYTES}")
    return size


def _check_echo(tokens: list[list[int]], logprobs: int | None, n: int) -> None:
    """Refuse an answer that repeats too much. The log probabilities of prompts come from the engine in one
    message."""
    count = n * sum(map(len, tokens)) * (1 + (logprobs or 0))
    if count > MAX_ECHOED:
        raise invalid(
            "echo",
            f"n × prompt tokens × (1 + logprobs) is {count}; with echo it may be at most {MAX_ECHOED}: ask "
            "for fewer alternatives, or send fewer prompts in a request",
        )


def _count(context: RequestContext, prompt_tokens: int) -> None:
    context.prompt_tokens = context.encoded_tokens = prompt_tokens
    context.work_tokens = max(context.work_tokens, prompt_tokens)


def _prompt_param(index: int, prompts: Sequence[object]) -> str:
    return "prompt" if len(prompts) == 1 else f"prompt[{index}]"


def _before_mark(text: str, mark: str) -> str:
    """The rendered conversation up to the end of its last message. Raises `ApiError`."""
    end = text.rfind(mark)
    if end < 0:
        raise invalid(
            "continue_final_message",
            "the model's chat template does not write the last message as it is, so it cannot be continued",
        )
    return text[:end].replace(mark, "")


def _conversation(messages: Sequence[ChatMessage]) -> list[Message]:
    """As it is kept: role, content and, where there is one, name of each message."""
    return [
        {"role": message.role, "content": message.text}
        | ({"name": message.name} if message.name is not None else {})
        for message in messages
    ]


class LengthLimit(NamedTuple):
    """How long a request may be, prompt and output together."""

    owner: str
    """Whose limit it is, for messages."""
    tokens: int
    """0: not known. Then either the model cannot be loaded, and the core refuses the request with the cause,
    or the engine knows it when the request's turn comes."""

    answer_tokens: int = 1
    """How many tokens must be left for the answer."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """None: not known."""
        return self.tokens - self.answer_tokens if self.tokens else None


def _length_limit(identity: Identity, model: LoadedModel, answer_tokens: int = 1) -> LengthLimit:
    longest, allowed = model.served.max_model_len, identity.context_tokens
    if allowed is not None and (not longest or allowed < longest):
        return LengthLimit(f"tenant {identity.tenant!r}'s", allowed, answer_tokens)
    return LengthLimit("this model's", longest, answer_tokens)


def _too_long(length_limit: LengthLimit, param: str, tokens: int | None) -> ApiError:
    count = f"more than {length_limit.max_prompt_tokens}" if tokens is None else str(tokens)
    return ApiError(
        400,
        f"{length_limit.owner} maximum context length is {length_limit.tokens} tokens, prompt and answer "
        f"together, but {param} has {count} tokens; shorten it",
        param=param,
        code="context_length_exceeded",
    )


def _too_many_to_show(param: str) -> ApiError:
    return invalid(param, f"has more than {MAX_TOKENS_SHOWN} tokens; send it in parts")


def _encoded_limit(body: GenerationRequest, length_limit: LengthLimit) -> LengthLimit | None:
    """What bounds the prompt as it was sent: None where only its end is wanted."""
    return length_limit if body.truncate_prompt_tokens is None else None


def _limits(identity: Identity, asked: int | None, default: int | None) -> tuple[int | None, int | None]:
    """The most tokens that the client asks for, and the most where it asks for none: each None where only the
    model's length limits them."""
    if asked == -1:
        return None, None
    return asked, identity.default_max_tokens or default


def _truncated(
    body: GenerationRequest,
    length_limit: LengthLimit,
    token_ids: list[int],
    limit: int | None,
    keeps_first: bool = False,
) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt: its last tokens, after the first one if that is to
    stay."""
    most: int | None = body.truncate_prompt_tokens
    if most == -1:
        most = max(1, length_limit.tokens - (1 if limit is None else limit)) if length_limit.tokens else None
    if most is None or len(token_ids) <= most:
        return token_ids
    if keeps_first:
        return [token_ids[0], *token_ids[len(token_ids) - most + 1 :]]
    return token_ids[len(token_ids) - most :]


def _room(
    length_limit: LengthLimit,
    token_ids: list[int],
    asked: int | None,
    default: int | None,
    param: str,
    field: str,
) -> int:
    """The most tokens to generate after a prompt."""
    if not token_ids:
        raise invalid(param, "is empty: there is nothing to continue")
    if not length_limit.tokens:
        return (default or _NO_LIMIT) if asked is None else max(asked, length_limit.answer_tokens)
    left = length_limit.tokens - len(token_ids)
    if left < length_limit.answer_tokens:
        raise _too_long(length_limit, param, len(token_ids))
    if asked is not None and asked > left:
        raise ApiError(
            400,
            f"{length_limit.owner} maximum context length is {length_limit.tokens} tokens; {param} has "
            f"{len(token_ids)} tokens, which leaves {left}, but {field} asks for {asked}",
            param=field,
            code="context_length_exceeded",
        )
    return min(left, default or left) if asked is None else max(asked, length_limit.answer_tokens)


async def _make_task(
    state: AppState,
    context: RequestContext,
    body: GenerationRequest,
    model: LoadedModel,
    prompts: list[Prompt],
    *,
    chat: bool,
    may_lower: bool,
    asked: list[Text],
    logprobs: int | None,
    best_of: int | None = None,
    continues_text: bool = False,
    echo: bool = False,
    discard_output: bool = False,
) -> GenerationTask:
    n = body.n or 1
    best_of = best_of or n
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if logprobs is not None and not body.stream:
        _limit_answer_logprobs(prompts, best_of * (1 + logprobs), may_lower, chat)
    _check_prompt_logprobs(body, prompt_tokens * (1 if chat else n))
    if body.return_token_ids and prompt_tokens * (1 if chat else n) > MAX_RETURNED_PROMPT_TOKENS:
        raise invalid(
            "return_token_ids",
            f"the answer would have {prompt_tokens * n} token ids of prompts, more than "
            f"{MAX_RETURNED_PROMPT_TOKENS}; send fewer prompts, or lower n",
        )
    try:
        stops = StopSet(body.stop) if body.stop else None
    except StopStringsError as error:
        raise invalid("stop", str(error).removeprefix("stop: ")) from None
    of_prompts = [k for k in (logprobs if echo else None, body.prompt_logprobs) if k is not None]
    sampling = await sampling_params(
        state,
        context,
        body,
        model,
        max_tokens=min(prompt.max_tokens for prompt in prompts),
        # Answers are compared by the log probabilities of their tokens.
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=max(of_prompts, default=None),
    )
    numbers = len(sampling.allowed_tokens) // 8 + sum(map(len, sampling.bad_words))
    if len(prompts) * numbers > MAX_SENT_NUMBERS:
        raise invalid(
            "allowed_token_ids" if sampling.allowed_tokens else "bad_words",
            f"is too long for {len(prompts)} prompts; send fewer prompts in a request",
        )
    asked_class = context.asked_class or body.service_tier or ""
    context.request_class = service_class(asked_class, context.identity)
    options = body.stream_options
    return GenerationTask(
        model=model,
        chat=chat,
        prompts=prompts,
        n=n,
        best_of=best_of,
        sampling=sampling,
        stops=stops,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        continues_text=continues_text,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        echo=echo,
        discard_output=discard_output,
        stream=context.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        asked_class=asked_class,
        # A client that wants at least so many tokens must not be told of fewer.
        may_lower=may_lower and not body.min_tokens,
        asked=asked if context.identity.log_policy != "metadata" else [],
    )


def _limit_answer_logprobs(prompts: list[Prompt], each: int, may_lower: bool, chat: bool) -> None:
    """Bound the log probabilities of an answer that is not streamed and has `each` of them for a token of
    each prompt's output. Where the client gave no limit of tokens, the default is lowered. Raises a 400."""
    total = each * sum(prompt.max_tokens for prompt in prompts)
    most = MAX_ANSWER_LOGPROBS // (each * len(prompts))
    if total <= MAX_ANSWER_LOGPROBS:
        return
    if not may_lower or not most:
        raise invalid(
            "top_logprobs" if chat else "logprobs",
            f"the answer could have {total} log probabilities (samples × max_tokens × (1 + alternatives)); "
            f"without stream it may have {MAX_ANSWER_LOGPROBS}: stream it, or lower one of the three",
        )
    for prompt in prompts:
        prompt.max_tokens = min(prompt.max_tokens, most)


def _check_prompt_logprobs(body: GenerationRequest, prompt_tokens: int) -> None:
    """Raise a 400 where the log probabilities of so many prompt tokens are too many, or would be streamed."""
    if body.prompt_logprobs is None:
        return
    if body.stream:
        raise invalid("prompt_logprobs", "cannot be streamed: leave out stream, or prompt_logprobs")
    shown = prompt_tokens * (body.prompt_logprobs + 1)
    if shown > MAX_PROMPT_LOGPROBS:
        raise invalid(
            "prompt_logprobs",
            f"the answer would have {shown} log probabilities of prompts, more than {MAX_PROMPT_LOGPROBS}; "
            "send shorter prompts, or ask for fewer alternatives or answers",
        )
