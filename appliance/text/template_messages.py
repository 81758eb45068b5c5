"""What a front and the process that renders a model's chat templates say to each other.

Apart from both, so that the front loads no Jinja2 and the process no asyncio. Frames are a 4-byte
little-endian length and the msgpack of one struct, as in `engine.wire`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_RENDERED_CHARACTERS = 8 << 20
"""Of one rendered conversation."""


class ChatTemplateError(ValueError):
    """These messages cannot be rendered with this template; the message is meant for the client."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""


class TemplateBoundError(ChatTemplateError):
    """Rendering would exceed a bound on time, memory or characters."""


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """First to the process: compile these templates. Answered by `Rendered` (of nothing) or `Failed`."""

    sources: dict[str, str]
    """Template text by name."""
    special_tokens: dict[str, str]
    """Name to text, as templates use them (`bos_token`)."""


class Render(msgspec.Struct, tag="render", frozen=True):
    """Render a conversation. Answered by `Rendered` or `Failed`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    variables: bytes
    """Further variables of the template: a JSON object, since its integers may be of any size."""


class Rendered(msgspec.Struct, tag="rendered", frozen=True):
    """The prompt's text."""

    text: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """There is no text. `message` is meant for the client, or of `Compile` for the operator."""

    kind: Literal["messages", "none", "bound"]
    """What to raise: `ChatTemplateError`, `NoChatTemplateError` or `TemplateBoundError`."""
    message: str


ToWorker = Compile | Render
FromWorker = Rendered | Failed
