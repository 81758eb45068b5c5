"""Whole answers, and what whole and streamed ones have in common."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.front.generation import Generation
from appliance.front.job import Job, Prompt
from appliance.front.logprobs import prompt_logprobs, sample_logprobs
from appliance.front.sample import Sample

_MAX_INLINE_LOGPROBS = 4096
"""Log probabilities in an answer that is made on the event loop: about 1 µs each."""


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
    """Token counts of the answer as it is now."""
    prompt_tokens = generation.job.prompt_tokens
    completion_tokens = sum(sample.delivered for sample in generation.samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(prompt.cached_tokens or 0 for prompt in generation.job.prompts)
        },
    }


def is_long(generation: Generation) -> bool:
    """Whether making the answer takes long enough to be felt by others on the event loop: tens of
    milliseconds."""
    job, entries = generation.job, 0
    if job.logprobs is not None:
        tokens = sum(sample.delivered for sample in generation.samples)
        tokens += job.n * job.prompt_tokens if job.echo else 0
        entries += tokens * (job.logprobs + 1)
    if job.prompt_logprobs is not None:
        entries += job.prompt_tokens * (job.prompt_logprobs + 1)
    return entries > _MAX_INLINE_LOGPROBS


def whole_answer(generation: Generation) -> bytes:
    """The JSON of an answer all of whose samples have ended. Any thread may call it."""
    job = generation.job
    answer = answer_head(generation, chunk=False)
    of_prompts = {prompt.index: _prompt_fields(job, prompt) for prompt in job.prompts}
    answer["choices"] = [
        _choice(generation, sample, number, {} if job.chat else of_prompts[sample.prompt.index])
        for number, sample in enumerate(generation.answers)
    ]
    answer["usage"] = usage(generation)
    if job.chat:
        answer |= of_prompts[0]
    return msgspec.json.encode(answer)


def _choice(generation: Generation, sample: Sample, number: int, of_prompt: dict[str, Any]) -> dict[str, Any]:
    job = generation.job
    text = "".join(sample.pieces)
    logprobs = sample_logprobs(job, sample.entries, sample.prompt if job.echo else None)
    choice: dict[str, Any] = {"index": number}
    if job.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = sample.prompt.echo_text + text
    choice |= {"logprobs": logprobs, "finish_reason": sample.finish_reason, **of_prompt}
    if job.return_token_ids:
        choice["token_ids"] = sample.token_ids[: sample.delivered]
    return choice


def _prompt_fields(job: Job, prompt: Prompt) -> dict[str, Any]:
    """What the answer says about a prompt, encoded once however many choices have it."""
    fields: dict[str, Any] = {}
    if job.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs(job.model.tokenizer, prompt, job.prompt_logprobs)
    if job.return_token_ids:
        fields["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(prompt.token_ids))
    return fields
