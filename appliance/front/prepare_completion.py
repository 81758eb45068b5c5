"""Builds the generation task for a completion, which can have many prompts."""

from __future__ import annotations

from appliance.front.app_state import AppState
from appliance.front.errors import invalid
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.length_limits import answer_limit, length_limit, max_answer_tokens, truncated
from appliance.front.models import LoadedModel
from appliance.front.prepare_task import count_prompt_tokens, encoding_limit, make_task
from appliance.front.request_context import RequestContext
from appliance.front.sampling import check_token_ids
from appliance.front.schemas import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from appliance.front.tokenization import decode, prompt_param, text_tokens

MAX_SEQUENCES = 1024
"""Maximum total number of samples for all of a request's prompts."""
MAX_SENT_BIASES = 65_536
"""Maximum value of prompts × `logit_bias` entries. Each prompt is sent to the replica with its own copy of
the biases."""
MAX_ECHOED = 131_072
"""Maximum value of answers × prompt tokens × (1 + `logprobs`) for one response with `echo`."""


async def completion_task(
    state: AppState, model: LoadedModel, context: RequestContext, body: CompletionRequest
) -> GenerationTask:
    """Return the task for a completion. Raises `ApiError` if the request is invalid."""
    n = body.n or 1
    best_of = body.best_of or n
    _check_fields(body, n, best_of)
    limit = length_limit(context.identity, model, 0 if body.max_tokens == 0 else 1)
    texts = [text for text in body.prompt if isinstance(text, str)]
    if texts:
        whole = await text_tokens(state, model, context, texts, limit=encoding_limit(body, limit))
    else:
        whole = [check_token_ids(model, ids, "prompt") for ids in body.prompt if isinstance(ids, list)]
    count_prompt_tokens(context, sum(map(len, whole)))
    answer = answer_limit(context.identity, body.max_tokens, DEFAULT_COMPLETION_TOKENS, "max_tokens")
    keeps_bos = bool(texts) and model.tokenizer.adds_bos
    tokens = [truncated(body, limit, ids, answer, keeps_bos) for ids in whole]
    context.prompt_tokens = sum(map(len, tokens))
    if body.echo:
        _check_echo(tokens, body.logprobs, n)
    prompts = []
    for index, token_ids in enumerate(tokens):
        param = prompt_param(index, tokens)
        prompt = Prompt(index, token_ids, max_answer_tokens(limit, token_ids, answer, param))
        if body.echo:
            if texts and len(token_ids) == len(whole[index]):
                prompt.echo_text = texts[index]
            else:
                skips = body.skip_special_tokens is not False
                # Omit an incomplete character at the end of the prompt, because the answer begins with the
                # complete character. Keep it if only the prompt is returned.
                complete = body.max_tokens == 0
                prompt.echo_text = await decode(state, model, context, token_ids, skips, complete)
        prompts.append(prompt)
    return await make_task(
        state,
        context,
        body,
        model,
        prompts,
        chat=False,
        may_lower=answer.requested is None,
        asked=list(body.prompt),
        logprobs=body.logprobs,
        best_of=best_of,
        continues_text=True,
        echo=bool(body.echo),
        discard_output=body.max_tokens == 0,
    )


def _check_fields(body: CompletionRequest, n: int, best_of: int) -> None:
    """Check fields that depend on each other. Raises a 400 if their values conflict."""
    if best_of < n:
        raise invalid("best_of", f"is {best_of}, but must be at least n = {n}; raise best_of, or omit it")
    if best_of > n and body.stream:
        raise invalid(
            "best_of",
            f"best_of = {best_of} with n = {n} cannot be streamed; omit stream or best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "must be at least 1 unless echo is true")
    prompts = len(body.prompt)
    if prompts * best_of > MAX_SEQUENCES:
        field = "best_of" if body.best_of else "n"
        raise invalid(
            field,
            f"{prompts} prompts × {field} exceeds the limit of {MAX_SEQUENCES} answers; send fewer "
            "prompts per request",
        )
    biases = len(body.logit_bias or ())
    if prompts * biases > MAX_SENT_BIASES:
        raise invalid(
            "logit_bias",
            f"has {biases} tokens for {prompts} prompts, but tokens × prompts must be at most "
            f"{MAX_SENT_BIASES}; send fewer prompts per request",
        )


def _check_echo(tokens: list[list[int]], logprobs: int | None, n: int) -> None:
    """Raise a 400 if the answer would repeat too many prompt tokens. There is a limit because the engine
    sends all of a prompt's log probabilities in one message."""
    count = n * sum(map(len, tokens)) * (1 + (logprobs or 0))
    if count > MAX_ECHOED:
        raise invalid(
            "echo",
            f"n × prompt tokens × (1 + logprobs) is {count}, but with echo it may be at most {MAX_ECHOED}; "
            "request fewer alternatives, or send fewer prompts per request",
        )
