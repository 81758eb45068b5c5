"""From a request's body to a job: template, tokens, limits of the model, sampling parameters."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from appliance.classes import service_class
from appliance.front.box import Box
from appliance.front.call import Call
from appliance.front.encoding import do_work, text_memory, too_much_work
from appliance.front.errors import ApiError, invalid
from appliance.front.job import Job, Prompt
from appliance.front.keeping import Message, Text
from appliance.front.models import LoadedModel
from appliance.front.schemas import ChatMessage, ChatRequest, CompletionRequest, GenerationRequest
from appliance.messages import Identity
from appliance.text.cuts import PIECE_CHARACTERS
from appliance.text.encoder import LoneSurrogateError, TooManyTokensError
from appliance.text.fair_queue import TooMuchWorkError
from appliance.text.stop import StopSet, StopStringsError
from appliance.text.template_messages import ChatTemplateError, TemplateBoundError
from engine.messages import SamplingParams

MOST_SEQUENCES = 1024
"""Prompts times samples in one request."""

MAX_SENT_BIASES = 65_536
"""Prompts times entries of `logit_bias`: each prompt is sent to the replica with a copy of its biases."""
MAX_ECHOED = 262_144
"""Tokens of prompts in one answer, or their log probabilities."""
MAX_TOKENS_SHOWN = 524_288
"""Tokens in the answer of /tokenize."""
MAX_VARIABLES_BYTES = 65_536
"""Of `chat_template_kwargs` as JSON."""

_HIDE_INLINE_CHARACTERS = 4096
"""Looking for control tokens in more characters is not done on the event loop: 2.5 µs each at worst."""

_NO_LIMIT = 1 << 20
"""Tokens to generate where the model's length is not known yet: the engine ends an answer at its own."""

_RESERVED_VARIABLES = frozenset(["messages", "tools", "documents", "add_generation_prompt"])


def named_model(box: Box, call: Call, body: GenerationRequest) -> LoadedModel:
    """The model that the request names. Raises `ApiError` if there is none, or it is not for this caller."""
    call.model = body.model[:200]
    call.stream = bool(body.stream)
    return box.catalog.get(body.model, call.identity)


async def chat_job(box: Box, model: LoadedModel, call: Call, body: ChatRequest) -> Job:
    """Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    context = _context(call.identity, model)
    token_ids = await chat_tokens(
        box, model, call, body.messages, variables=body.chat_template_kwargs, context=context
    )
    limit = body.max_completion_tokens or body.max_tokens
    field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    _count(call, len(token_ids))
    prompt = Prompt(0, token_ids, _room(call.identity, context, token_ids, limit, "messages", field))
    return _job(
        call,
        body,
        model,
        [prompt],
        chat=True,
        may_lower=limit is None,
        asked=[_conversation(body.messages)],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


async def completion_job(box: Box, model: LoadedModel, call: Call, body: CompletionRequest) -> Job:
    """Raises `ApiError`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", "is not supported by this server unless equal to n", "unsupported_parameter")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1 without echo")
    if len(body.prompt) * (body.n or 1) > MOST_SEQUENCES:
        raise invalid("n", f"{len(body.prompt)} prompts times n make more than {MOST_SEQUENCES} answers")
    if len(body.prompt) * len(body.logit_bias) > MAX_SENT_BIASES:
        raise invalid(
            "logit_bias",
            f"has {len(body.logit_bias)} tokens for {len(body.prompt)} prompts: the product may be at most "
            f"{MAX_SENT_BIASES}; send fewer prompts in a request",
        )
    context = _context(call.identity, model)
    texts = [text for text in body.prompt if isinstance(text, str)]
    if texts:
        tokens = await _encode_texts(box, model, call, texts, context)
    else:
        tokens = [check_token_ids(model, ids, "prompt") for ids in body.prompt if isinstance(ids, list)]
    _count(call, sum(map(len, tokens)))
    if body.echo:
        _check_echo(tokens, body.logprobs, body.n or 1)
    prompts = []
    for index, token_ids in enumerate(tokens):
        room = _room(
            call.identity, context, token_ids, body.max_tokens, _prompt_param(index, tokens), "max_tokens"
        )
        prompt = Prompt(index, token_ids, room)
        if body.echo:
            prompt.echo_text = texts[index] if texts else await decode(box, model, call, token_ids)
        prompts.append(prompt)
    return _job(
        call,
        body,
        model,
        prompts,
        chat=False,
        may_lower=body.max_tokens is None,
        asked=list(body.prompt),
        logprobs=body.logprobs,
        echo=bool(body.echo),
        discard_output=body.max_tokens == 0,
    )


async def text_tokens(
    box: Box, model: LoadedModel, call: Call, text: str, add_special_tokens: bool
) -> list[int]:
    """The tokens of a text that is not to be answered. Raises `ApiError`."""
    try:
        with text_memory(box, call, len(text)):
            steps = model.tokenizer.encode_steps([text], add_special_tokens, MAX_TOKENS_SHOWN)
            return (await do_work(box, call, steps, len(text)))[0]
    except LoneSurrogateError as error:
        raise invalid("prompt", str(error)) from None
    except TooManyTokensError:
        raise _too_many_to_show("prompt") from None


async def decode(
    box: Box, model: LoadedModel, call: Call, token_ids: list[int], skip_special: bool = True
) -> str:
    """The text of token ids, which the model knows."""
    steps = model.tokenizer.decode_steps(token_ids, skip_special)
    return await do_work(box, call, steps, len(token_ids), inline=PIECE_CHARACTERS)


async def chat_tokens(
    box: Box,
    model: LoadedModel,
    call: Call,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
    context: Context | None = None,
) -> list[int]:
    """The prompt of a conversation, in which only the template makes control tokens; without `context`, for a
    client that only wants to see its tokens. Raises `ApiError`."""
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise invalid("chat_template_kwargs", f"{name!r} cannot be set here")
    shown: Any = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content,
        }
        | ({"name": message.name} if message.name is not None else {})
        for message in messages
    ]
    size = sum(len(message.content) + len(message.name or "") for message in messages)
    if variables:
        size += _checked_size(variables)
    shield = model.tokenizer.shield()
    try:
        with text_memory(box, call, size):
            shown, variables = await do_work(
                box, call, shield.hide([shown, variables]), size, inline=_HIDE_INLINE_CHARACTERS
            )
            text = await model.template.render(call.identity.tenant, shown, add_generation_prompt, variables)
            max_tokens = MAX_TOKENS_SHOWN if context is None else context.max_prompt_tokens
            steps = model.tokenizer.encode_rendered_steps(text, shield, add_special_tokens, max_tokens)
            return (await do_work(box, call, steps, len(text)))[0]
    except TooMuchWorkError as error:
        raise too_much_work(error) from None
    except TemplateBoundError as error:
        raise invalid("messages", str(error), "chat_template_bound") from None
    except (ChatTemplateError, LoneSurrogateError) as error:
        raise invalid("messages", shield.restore(str(error))) from None
    except TooManyTokensError as error:
        if context is None:
            raise _too_many_to_show("messages") from None
        raise _too_long(context, "messages", error.tokens) from None


async def _encode_texts(
    box: Box, model: LoadedModel, call: Call, texts: list[str], context: Context
) -> list[list[int]]:
    size = sum(map(len, texts))
    try:
        with text_memory(box, call, size):
            steps = model.tokenizer.encode_steps(texts, True, context.max_prompt_tokens)
            return await do_work(box, call, steps, size)
    except LoneSurrogateError as error:
        raise invalid("prompt", str(error)) from None
    except TooManyTokensError as error:
        raise _too_long(context, _prompt_param(error.index, texts), error.tokens) from None


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


def _count(call: Call, prompt_tokens: int) -> None:
    call.prompt_tokens = prompt_tokens
    call.work_tokens = max(call.work_tokens, prompt_tokens)


def _prompt_param(index: int, prompts: Sequence[object]) -> str:
    return "prompt" if len(prompts) == 1 else f"prompt[{index}]"


def check_token_ids(model: LoadedModel, token_ids: list[int], param: str) -> list[int]:
    """The ids, if the model knows them all, or if nobody knows yet what it knows. Raises a 400."""
    most = model.served.vocab_size - 1
    if most >= 0 and token_ids and (min(token_ids) < 0 or max(token_ids) > most):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= most)
        shown = str(wrong) if abs(wrong) < 1 << 64 else "a huge number"
        raise invalid(param, f"token id {shown} is not one of the model's, 0 to {most}")
    return token_ids


def _conversation(messages: Sequence[ChatMessage]) -> list[Message]:
    """As it is kept: role, content and, where there is one, name of each message."""
    return [
        {"role": message.role, "content": message.content}
        | ({"name": message.name} if message.name is not None else {})
        for message in messages
    ]


class Context(NamedTuple):
    """How long a request may be, prompt and output together."""

    owner: str
    """Whose limit it is, for messages."""
    tokens: int
    """0: not known. Then either the model cannot be loaded, and the core refuses the request with the cause,
    or the engine knows it when the request's turn comes."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """At least one token is left for the answer. None: not known."""
        return self.tokens - 1 if self.tokens else None


def _context(identity: Identity, model: LoadedModel) -> Context:
    longest, allowed = model.served.max_model_len, identity.context_tokens
    if allowed is not None and (not longest or allowed < longest):
        return Context(f"tenant {identity.tenant!r}'s", allowed)
    return Context("this model's", longest)


def _too_long(context: Context, param: str, tokens: int | None) -> ApiError:
    count = f"more than {context.max_prompt_tokens}" if tokens is None else str(tokens)
    return ApiError(
        400,
        f"{context.owner} maximum context length is {context.tokens} tokens, prompt and answer together, but "
        f"{param} has {count} tokens; shorten it",
        param=param,
        code="context_length_exceeded",
    )


def _too_many_to_show(param: str) -> ApiError:
    return invalid(param, f"has more than {MAX_TOKENS_SHOWN} tokens; send it in parts")


def _room(
    identity: Identity, context: Context, token_ids: list[int], asked: int | None, param: str, field: str
) -> int:
    """The most tokens to generate after a prompt."""
    if not token_ids:
        raise invalid(param, "is empty: there is nothing to continue")
    if not context.tokens:
        return (identity.default_max_tokens or _NO_LIMIT) if asked is None else max(asked, 1)
    left = context.tokens - len(token_ids)
    if left < 1:
        raise _too_long(context, param, len(token_ids))
    if asked is not None and asked > left:
        raise ApiError(
            400,
            f"{context.owner} maximum context length is {context.tokens} tokens; {param} has "
            f"{len(token_ids)} tokens, which leaves {left}, but {field} asks for {asked}",
            param=field,
            code="context_length_exceeded",
        )
    return min(left, identity.default_max_tokens or left) if asked is None else max(asked, 1)


def _job(
    call: Call,
    body: GenerationRequest,
    model: LoadedModel,
    prompts: list[Prompt],
    *,
    chat: bool,
    may_lower: bool,
    asked: list[Text],
    logprobs: int | None,
    echo: bool = False,
    discard_output: bool = False,
) -> Job:
    try:
        stops = StopSet(body.stop) if body.stop else None
    except StopStringsError as error:
        raise invalid("stop", str(error).removeprefix("stop: ")) from None
    shortest = min(prompt.max_tokens for prompt in prompts)
    asked_class = call.asked_class or body.service_tier or ""
    call.request_class = service_class(asked_class, call.identity)
    return Job(
        model=model,
        chat=chat,
        prompts=prompts,
        n=body.n or 1,
        sampling=_sampling(body, model, logprobs, echo, shortest),
        stops=stops,
        logprobs=logprobs,
        echo=echo,
        discard_output=discard_output,
        stream=call.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        asked_class=asked_class,
        # A client that wants at least so many tokens must not be told of fewer.
        may_lower=may_lower and not body.min_tokens,
        asked=asked if call.identity.log_policy != "metadata" else [],
    )


def _sampling(
    body: GenerationRequest, model: LoadedModel, logprobs: int | None, echo: bool, shortest: int
) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    if top_p == 0.0:
        # Nothing but the likeliest token is left.
        temperature, top_p = 0.0, 1.0
    min_tokens = body.min_tokens or 0
    if min_tokens > shortest:
        raise invalid("min_tokens", f"is {min_tokens}, more than the {shortest} tokens that may be generated")
    check_token_ids(model, list(body.logit_bias), "logit_bias")
    stop_ids = check_token_ids(model, body.stop_token_ids or [], "stop_token_ids")
    if not body.ignore_eos:
        vocab_size = model.served.vocab_size or model.tokenizer.vocabulary_size
        known = [token_id for token_id in model.tokenizer.eos_ids if token_id < vocab_size]
        stop_ids = list(dict.fromkeys([*known, *stop_ids]))
    return SamplingParams(
        max_tokens=shortest,
        temperature=temperature,
        top_k=max(0, body.top_k or 0),
        top_p=top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or None,
        # Drawn here, so that a resubmission after a lost replica goes on with the same text.
        seed=secrets.randbits(63) if body.seed is None else body.seed & ((1 << 63) - 1),
        min_tokens=min_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=not stop_ids,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
