"""Builds a generation task from tokenized prompts, including the sampling parameters, the service class, and
the limits common to chats and completions."""

from __future__ import annotations

from appliance.channel.classes import service_class
from appliance.front.app_state import AppState
from appliance.front.errors import invalid
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.keeping import Text
from appliance.front.length_limits import LengthLimit
from appliance.front.models import LoadedModel
from appliance.front.request_context import RequestContext
from appliance.front.sampling import sampling_params
from appliance.front.schemas import GenerationRequest
from appliance.text.stop import StopSet, StopStringsError
from engine.messages import SamplingParams

MAX_PROMPT_LOGPROBS = 131_072
"""Maximum number of prompt log probabilities in one answer with `prompt_logprobs`. Decoding this many
takes 40 ms on the event loop."""
MAX_ANSWER_LOGPROBS = 262_144
"""Maximum number of log probabilities of generated tokens in a non-streamed answer. These log probabilities
are held in memory until the answer is complete and take about 200 bytes each."""
MAX_RETURNED_PROMPT_TOKENS = 1 << 20
"""Maximum number of prompt token ids in an answer with `return_token_ids`."""
MAX_SENT_NUMBERS = 262_144
"""Maximum value of prompts × total length of `allowed_token_ids` and `bad_words`. Each prompt is sent to the
replica with its own copy of these lists."""


async def named_model(state: AppState, context: RequestContext, body: GenerationRequest) -> LoadedModel:
    """Return the model named by the request and keep it loaded until the request has been sent to the core.
    Raises `ApiError` if there is no such model or the caller may not use it."""
    context.model = body.model[:200]
    context.stream = bool(body.stream)
    context.user = body.user or ""
    connection = context.connection
    model = await state.catalog.find(
        body.model, context.identity, lambda: connection.disconnected, context.caller
    )
    context.prepared = state.catalog.prepare(model)
    return model


def count_prompt_tokens(context: RequestContext, tokens: int) -> None:
    """Record the total token count of a request's encoded prompts."""
    context.prompt_tokens = context.encoded_tokens = tokens
    context.work_tokens = max(context.work_tokens, tokens)


def encoding_limit(body: GenerationRequest, limit: LengthLimit) -> LengthLimit | None:
    """Return the maximum number of tokens in a prompt before truncation, or None if `truncate_prompt_tokens`
    will shorten the prompt."""
    return limit if body.truncate_prompt_tokens is None else None


async def make_task(
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
    """Return the task for a request with tokenized prompts. `may_lower` is true if the request sets no token
    limit, so that the default limit may be lowered. Raises `ApiError` if the request is invalid."""
    n = body.n or 1
    best_of = best_of or n
    if logprobs is not None and not body.stream:
        _limit_answer_logprobs(prompts, best_of * (1 + logprobs), may_lower, chat)
    _check_returned_prompts(body, sum(len(prompt.token_ids) for prompt in prompts) * (1 if chat else n))
    try:
        stops = StopSet(body.stop) if body.stop else None
    except StopStringsError as error:
        raise invalid("stop", str(error)) from None
    prompt_logprobs = [k for k in (logprobs if echo else None, body.prompt_logprobs) if k is not None]
    sampling = await sampling_params(
        state,
        context,
        body,
        model,
        max_tokens=min(prompt.max_tokens for prompt in prompts),
        # `best_of` ranks answers by their tokens' log probabilities, so the engine must return them.
        logprobs=0 if logprobs is None and best_of > n else logprobs,
        prompt_logprobs=max(prompt_logprobs, default=None),
    )
    _check_sent_numbers(sampling, len(prompts))
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
        keep_alive_s=body.keep_alive,
        # If the client sets `min_tokens`, do not lower the default limit, since the client could otherwise
        # get an error about a limit it did not set.
        may_lower=may_lower and not body.min_tokens,
        asked=asked if context.identity.log_policy != "metadata" else [],
    )


def _limit_answer_logprobs(prompts: list[Prompt], per_token: int, may_lower: bool, chat: bool) -> None:
    """Limit the number of log probabilities in a non-streamed answer. `per_token` counts the log
    probabilities per token position, summed over a prompt's samples. If the answer could contain too many,
    lower the default token limit. If the client has set the limit, raise a 400 instead.
    """
    total = per_token * sum(prompt.max_tokens for prompt in prompts)
    max_tokens = MAX_ANSWER_LOGPROBS // (per_token * len(prompts))
    if total <= MAX_ANSWER_LOGPROBS:
        return
    if not may_lower or not max_tokens:
        raise invalid(
            "top_logprobs" if chat else "logprobs",
            f"the answer could have {total} log probabilities (samples × max_tokens × (1 + "
            f"alternatives)), but without stream at most {MAX_ANSWER_LOGPROBS} are allowed; set stream, or "
            "lower one of the three values",
        )
    for prompt in prompts:
        prompt.max_tokens = min(prompt.max_tokens, max_tokens)


def _check_returned_prompts(body: GenerationRequest, prompt_tokens: int) -> None:
    """Raise a 400 if the answer would contain too much prompt data. `prompt_tokens` counts a prompt's tokens
    once for each choice that contains them."""
    if body.return_token_ids and prompt_tokens > MAX_RETURNED_PROMPT_TOKENS:
        raise invalid(
            "return_token_ids",
            f"the answer would contain {prompt_tokens} prompt token ids, more than the limit of "
            f"{MAX_RETURNED_PROMPT_TOKENS}; send fewer prompts, or lower n",
        )
    if body.prompt_logprobs is None:
        return
    if body.stream:
        raise invalid("prompt_logprobs", "cannot be streamed; omit stream or prompt_logprobs")
    logprobs = prompt_tokens * (body.prompt_logprobs + 1)
    if logprobs > MAX_PROMPT_LOGPROBS:
        raise invalid(
            "prompt_logprobs",
            f"the answer would contain {logprobs} log probabilities of prompt tokens, more than the "
            f"limit of {MAX_PROMPT_LOGPROBS}; send shorter prompts, or request fewer alternatives or "
            "answers",
        )


def _check_sent_numbers(sampling: SamplingParams, prompts: int) -> None:
    """Raise a 400 if the token lists copied to the replica are too long in total."""
    numbers = len(sampling.allowed_tokens) // 8 + sum(map(len, sampling.bad_words))
    if prompts * numbers > MAX_SENT_NUMBERS:
        raise invalid(
            "allowed_token_ids" if sampling.allowed_tokens else "bad_words",
            f"is too long for {prompts} prompts; send fewer prompts per request",
        )
