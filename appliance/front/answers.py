"""Builds non-streamed answers, and the fields shared by streamed and non-streamed answers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from appliance.front.generation import Generation
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.logprobs import logprobs_steps, prompt_logprobs_steps
from appliance.front.sample import Sample

_encode = msgspec.json.Encoder().encode


def answer_head(generation: Generation, chunk: bool) -> dict[str, Any]:
    """Return the JSON fields that precede an answer's `choices`."""
    task, context = generation.task, generation.context
    kind = "chat.completion" if task.chat else "text_completion"
    return {
        "id": ("chatcmpl-" if task.chat else "cmpl-") + context.request_id,
        "object": kind + ".chunk" if chunk and task.chat else kind,
        "created": int(context.arrived_at),
        "model": context.model,
        "system_fingerprint": "fp_" + task.model.served.version,
    }


def usage(generation: Generation) -> dict[str, Any]:
    """Return the answer's token counts so far. A stream may send them with every event."""
    prompt_tokens, completion_tokens = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def answer_steps(generation: Generation) -> Generator[None, None, bytes]:
    """Build a finished answer's JSON in steps, so that other work can run in between."""
    task = generation.task
    of_prompts: dict[int, bytes] = {}
    for prompt in task.prompts:
        of_prompts[prompt.index] = yield from _prompt_fields(task, prompt)
    choices = []
    for number, sample in enumerate(generation.answers):
        of_prompt = b"" if task.chat else of_prompts[sample.prompt.index]
        choices.append((yield from _choice(generation, sample, number, of_prompt)))
        yield
    return b'%b,"choices":[%b],"usage":%b%b}' % (
        _encode(answer_head(generation, chunk=False))[:-1],
        b",".join(choices),
        _encode(usage(generation)),
        of_prompts[0] if task.chat else b"",
    )


def _choice(
    generation: Generation, sample: Sample, number: int, of_prompt: bytes
) -> Generator[None, None, bytes]:
    task = generation.task
    text = "".join(sample.pieces)
    logprobs = yield from logprobs_steps(task, sample.entries, sample.prompt if task.echo else None)
    if task.chat:
        content = b'"message":' + _encode({"role": "assistant", "content": text, "refusal": None})
    else:
        content = b'"text":' + _encode(sample.prompt.echo_text + text)
    token_ids = b""
    if task.return_token_ids:
        token_ids = b',"token_ids":' + _encode(sample.token_ids[: sample.delivered])
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b%b}' % (
        number,
        content,
        logprobs,
        _encode(sample.finish_reason),
        of_prompt,
        token_ids,
    )


def _prompt_fields(task: GenerationTask, prompt: Prompt) -> Generator[None, None, bytes]:
    """Return the JSON fields that all of a prompt's `choices` have in common, encoded only once."""
    fields = b""
    if task.prompt_logprobs is not None:
        logprobs = yield from prompt_logprobs_steps(task.model.tokenizer, prompt, task.prompt_logprobs)
        fields += b',"prompt_logprobs":' + logprobs
    if task.return_token_ids:
        fields += b',"prompt_token_ids":' + _encode(prompt.token_ids)
    return fields
