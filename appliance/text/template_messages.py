"""The messages between a front and the process that renders a model's chat templates.

This module is separate from both sides, so that the front loads no Jinja2 and the process no asyncio. A frame
is a 4-byte little-endian length and one struct as msgpack, as in `engine.wire`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_RENDERED_CHARACTERS = 8 << 20
"""Characters of one rendered conversation."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered with this template; the message is meant for the client."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""


class TemplateBoundError(ChatTemplateError):
    """Rendering would exceed a bound on time, memory or characters."""


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """The first message to the process: compile these templates. The answer is an empty `Rendered`, or
    `Failed`."""

    sources: dict[str, str]
    """Template text by name."""
    special_tokens: dict[str, str]
    """Text by name, as templates use them (`bos_token`)."""


class Render(msgspec.Struct, tag="render", frozen=True):
    """Render a conversation. The answer is `Rendered` or `Failed`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    variables: bytes
    """Further template variables, as a JSON object: msgpack would limit the size of integers."""


class Rendered(msgspec.Struct, tag="rendered", frozen=True):
    """The prompt's text."""

    text: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """An error. `message` is for the client, or for the operator if the error answers `Compile`."""

    kind: Literal["messages", "none", "bound"]
    """The exception to raise: `ChatTemplateError`, `NoChatTemplateError` or `TemplateBoundError`."""
    message: str


ToWorker = Compile | Render
FromWorker = Rendered | Failed
