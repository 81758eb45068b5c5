"""From a request's body to a job: template, tokens, limits of the model, sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from appliance.classes import service_class
from appliance.front.box import Box
from appliance.front.call import Call
from appliance.front.errors import ApiError, invalid
from appliance.front.job import Job, Prompt
from appliance.front.keeping import Message, Text
from appliance.front.models import LoadedModel
from appliance.front.schemas import ChatMessage, ChatRequest, CompletionRequest, GenerationRequest
from appliance.messages import Identity
from appliance.text.chat_template import ChatTemplateError
from appliance.text.stop import StopSet, StopStringsError
from appliance.text.tokenizer import LoneSurrogateError
from engine.messages import SamplingParams

MOST_SEQUENCES = 1024
"""Prompts times samples in one request."""

_NO_LIMIT = 1 << 20
"""Tokens to generate where the model's length is not known yet: the engine ends an answer at its own."""

_RESERVED_VARIABLES = frozenset(["messages", "tools", "documents", "add_generation_prompt"])


def named_model(box: Box, call: Call, body: GenerationRequest) -> LoadedModel:
    """The model that the request names. Raises `ApiError` if there is none, or it is not for this caller."""
    call.model = body.model[:200]
    call.stream = bool(body.stream)
    return box.catalog.get(body.model, call.identity)


async def chat_job(model: LoadedModel, call: Call, body: ChatRequest) -> Job:
    """Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    token_ids = await chat_tokens(model, body.messages, variables=body.chat_template_kwargs)
    limit = body.max_completion_tokens or body.max_tokens
    field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    call.prompt_tokens = len(token_ids)
    prompt = Prompt(0, token_ids, _room(call.identity, model, token_ids, limit, "messages", field))
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


async def completion_job(model: LoadedModel, call: Call, body: CompletionRequest) -> Job:
    """Raises `ApiError`."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", "is not supported by this server unless equal to n", "unsupported_parameter")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1 without echo")
    if len(body.prompt) * (body.n or 1) > MOST_SEQUENCES:
        raise invalid("n", f"{len(body.prompt)} prompts times n make more than {MOST_SEQUENCES} answers")
    texts = [text for text in body.prompt if isinstance(text, str)]
    if texts:
        try:
            tokens = await model.tokenizer.encode_batch(texts)
        except LoneSurrogateError as error:
            raise invalid("prompt", str(error)) from None
    else:
        tokens = [check_token_ids(model, ids, "prompt") for ids in body.prompt if isinstance(ids, list)]
    call.prompt_tokens = sum(map(len, tokens))
    prompts = []
    for index, token_ids in enumerate(tokens):
        param = "prompt" if len(tokens) == 1 else f"prompt[{index}]"
        room = _room(call.identity, model, token_ids, body.max_tokens, param, "max_tokens")
        prompt = Prompt(index, token_ids, room)
        if body.echo:
            prompt.echo_text = texts[index] if texts else model.tokenizer.decode(token_ids)
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


async def chat_tokens(
    model: LoadedModel,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """The prompt of a conversation, in which only the template makes control tokens. Raises `ApiError`."""
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise invalid("chat_template_kwargs", f"{name!r} cannot be set here")
    shield = model.tokenizer.shield()
    shown = [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": shield.hide(message.content),
        }
        | ({"name": shield.hide(message.name)} if message.name is not None else {})
        for message in messages
    ]
    try:
        text = await model.template.render_async(
            shown, add_generation_prompt, variables=shield.hide(variables)
        )
        return await model.tokenizer.encode_rendered(text, shield, add_special_tokens)
    except (ChatTemplateError, LoneSurrogateError) as error:
        raise invalid("messages", shield.restore(str(error))) from None


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


def _room(
    identity: Identity, model: LoadedModel, token_ids: list[int], asked: int | None, param: str, field: str
) -> int:
    """The most tokens to generate after a prompt."""
    if not token_ids:
        raise invalid(param, "is empty: there is nothing to continue")
    whose, longest, allowed = "this model's", model.served.max_model_len, identity.context_tokens
    if allowed is not None and (not longest or allowed < longest):
        whose, longest = f"tenant {identity.tenant!r}'s", allowed
    if not longest:
        # Its configuration does not say: either it cannot be loaded, and the core refuses with the cause, or
        # the engine knows by the time that it is this request's turn.
        return (identity.default_max_tokens or _NO_LIMIT) if asked is None else max(asked, 1)
    left = longest - len(token_ids)
    if left < 1:
        raise ApiError(
            400,
            f"{whose} maximum context length is {longest} tokens, prompt and answer together, but "
            f"{param} has {len(token_ids)} tokens; shorten it",
            param=param,
            code="context_length_exceeded",
        )
    if asked is not None and asked > left:
        raise ApiError(
            400,
            f"{whose} maximum context length is {longest} tokens; {param} has {len(token_ids)} tokens, "
            f"which leaves {left}, but {field} asks for {asked}",
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
