"""Hooks that schemathesis loads. They make most generated requests valid: the requests name the served model,
and their fields are compatible."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Make most bodies valid. The schema cannot express which model names exist and which combinations of
    fields are permitted."""
    if not (isinstance(body, dict) and isinstance(body.get("model"), str)) or len(body["model"]) == 3:
        return body
    excluded = set()
    if body.get("stream"):
        excluded |= {"best_of", "prompt_logprobs"}
    if (body.get("best_of") or 128) < (body.get("n") or 1):
        excluded.add("best_of")
    if body.get("continue_final_message"):
        excluded.add("add_generation_prompt")
    if len(body["model"]) % 2:
        # Most of these numbers are not token ids of the model.
        excluded |= {"allowed_token_ids", "stop_token_ids", "logit_bias"}
    fields = {name: value for name, value in body.items() if name not in excluded} | {"model": "demo"}
    if isinstance(fields.get("messages"), list):
        # Only messages from the assistant may have no content.
        fields["messages"] = [
            {**message, "content": "x"}
            if isinstance(message, dict) and message.get("content") is None
            else message
            for message in fields["messages"]
        ]
    return fields


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Replace the model's name in a path with the served model."""
    if isinstance(path_parameters, dict) and path_parameters:
        return dict.fromkeys(path_parameters, "demo")
    return path_parameters
