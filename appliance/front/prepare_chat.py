"""Builds the generation task for a chat completion."""

from __future__ import annotations

from appliance.front.app_state import AppState
from appliance.front.errors import invalid
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.length_limits import answer_limit, length_limit, max_answer_tokens, truncated
from appliance.front.models import LoadedModel
from appliance.front.prepare_task import count_prompt_tokens, encoding_limit, make_task
from appliance.front.request_context import RequestContext
from appliance.front.schemas import ChatRequest
from appliance.front.tokenization import chat_tokens, conversation


async def chat_task(
    state: AppState, model: LoadedModel, context: RequestContext, body: ChatRequest
) -> GenerationTask:
    """Return the task for a chat completion. Raises `ApiError` if the request is invalid."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "cannot be true together with add_generation_prompt")
    limit = length_limit(context.identity, model)
    token_ids = await chat_tokens(
        state,
        model,
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
        continue_final_message=continues,
        limit=encoding_limit(body, limit),
    )
    if body.max_completion_tokens is None:
        answer = answer_limit(context.identity, body.max_tokens, None, "max_tokens")
    else:
        answer = answer_limit(context.identity, body.max_completion_tokens, None, "max_completion_tokens")
    count_prompt_tokens(context, len(token_ids))
    token_ids = truncated(body, limit, token_ids, answer)
    context.prompt_tokens = len(token_ids)
    prompt = Prompt(0, token_ids, max_answer_tokens(limit, token_ids, answer, "messages"))
    return await make_task(
        state,
        context,
        body,
        model,
        [prompt],
        chat=True,
        may_lower=answer.requested is None,
        asked=[conversation(body.messages)],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        continues_text=continues,
    )
