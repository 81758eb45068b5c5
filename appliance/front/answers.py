"""Whole answers, and what whole and streamed ones have in common."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from appliance.front.generation import Generation
from appliance.front.job import Job, Prompt
from appliance.front.logprobs import logprobs_steps, prompt_logprobs_steps
from appliance.front.sample import Sample

_encode = msgspec.json.Encoder().encode


def answer_head(generation: Generation, chunk: bool) -> dict[str, Any]:
    """The fields that say which answer this is, without choices."""
    job, call = generation.job, generation.call
    kind = "chat.completion" if job.chat else "text_completion"
    return {
        "id": ("chatcmpl-" if job.chat else "cmpl-") + call.request_id,
        "object": kind + ".chunk" if chunk and job.chat else kind,
        "created": int(call.arrived_at),
        "model": job.model.name,
        "system_fingerprint": "fp_" + job.model.served.version,
    }


def usage(generation: Generation) -> dict[str, Any]:
    """Return the token counts of the answer as it is now. A stream may have them in each of its events, so
    they are not counted here."""
    prompt_tokens, completion_tokens = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def answer_steps(generation: Generation) -> Generator[None, None, bytes]:
    """The JSON of an answer all of whose samples have ended, as work in steps."""
    job = generation.job
    of_prompts: dict[int, bytes] = {}
    for prompt in job.prompts:
        of_prompts[prompt.index] = yield from _prompt_fields(job, prompt)
    choices = []
    for number, sample in enumerate(generation.answers):
        of_prompt = b"" if job.chat else of_prompts[sample.prompt.index]
        choices.append((yield from _choice(generation, sample, number, of_prompt)))
        yield
    return b'%b,"choices":[%b],"usage":%b%b}' % (
        _encode(answer_head(generation, chunk=False))[:-1],
        b",".join(choices),
        _encode(usage(generation)),
        of_prompts[0] if job.chat else b"",
    )


def _choice(
    generation: Generation, sample: Sample, number: int, of_prompt: bytes
) -> Generator[None, None, bytes]:
    job = generation.job
    text = "".join(sample.pieces)
    logprobs = yield from logprobs_steps(job, sample.entries, sample.prompt if job.echo else None)
    if job.chat:
        content = b'"message":' + _encode({"role": "assistant", "content": text, "refusal": None})
    else:
        content = b'"text":' + _encode(sample.prompt.echo_text + text)
    token_ids = b""
    if job.return_token_ids:
        token_ids = b',"token_ids":' + _encode(sample.token_ids[: sample.delivered])
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b%b}' % (
        number,
        content,
        logprobs,
        _encode(sample.finish_reason),
        of_prompt,
        token_ids,
    )


def _prompt_fields(job: Job, prompt: Prompt) -> Generator[None, None, bytes]:
    """The fields that say something about a prompt, encoded once however many choices have them."""
    fields = b""
    if job.prompt_logprobs is not None:
        logprobs = yield from prompt_logprobs_steps(job.model.tokenizer, prompt, job.prompt_logprobs)
        fields += b',"prompt_logprobs":' + logprobs
    if job.return_token_ids:
        fields += b',"prompt_token_ids":' + _encode(prompt.token_ids)
    return fields
