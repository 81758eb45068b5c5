"""Whole answers, and what whole and streamed ones have in common."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.front.generation import Generation
from appliance.front.logprobs import sample_logprobs
from appliance.front.sample import Sample


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


def whole_answer(generation: Generation) -> bytes:
    """The JSON of an answer all of whose samples have ended."""
    answer = answer_head(generation, chunk=False)
    answer["choices"] = [_choice(generation, sample) for sample in generation.samples]
    answer["usage"] = usage(generation)
    return msgspec.json.encode(answer)


def _choice(generation: Generation, sample: Sample) -> dict[str, Any]:
    job = generation.job
    text = "".join(sample.pieces)
    logprobs = sample_logprobs(job, sample.entries, sample.prompt if job.echo else None)
    if job.chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": sample.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
        }
    return {
        "index": sample.index,
        "text": sample.prompt.echo_text + text,
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
    }
