"""Requests as bytes: random prompts of token ids, none of which the server has seen before."""

from __future__ import annotations

import json
import random

from appliance.bench.messages import Prompting, Target


def head(target: Target, method: str, path: str, body_bytes: int) -> bytes:
    """A request's header, up to and with its blank line."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {target.authority}",
        "User-Agent: appliance-bench",
        "Accept: text/event-stream, application/json",
    ]
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {body_bytes}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def completion(target: Target, prompting: Prompting, number: int) -> bytes:
    """Request `number` of a run. The same seed and number give the same prompt; different ones share no
    prefix worth caching."""
    draw = random.Random(f"{prompting.seed}/{number}")
    body: dict[str, object] = {
        "model": prompting.model,
        "prompt": draw.choices(range(prompting.vocabulary), k=prompting.prompt_tokens),
        "max_tokens": prompting.output_tokens,
        "temperature": prompting.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompting.top_p != 1.0:
        body["top_p"] = prompting.top_p
    encoded = json.dumps(body, separators=(",", ":")).encode()
    return head(target, "POST", f"{target.prefix}/completions", len(encoded)) + encoded
