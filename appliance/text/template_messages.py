"""Messages between a front process and the process that renders a model's chat templates. This module is
separate because the front process must not load Jinja2, and the rendering process must not load asyncio. A
frame consists of a length (4 bytes, little-endian) and one struct in msgpack format, as in `engine.wire`.
"""

from __future__ import annotations

import msgspec

MAX_RENDERED_CHARACTERS = 8 << 20
"""Maximum number of characters in one rendered conversation."""


class ChatTemplateError(ValueError):
    """Raised if messages cannot be rendered with a chat template. The error message is sent to the client."""


class TemplateBoundError(ChatTemplateError):
    """Raised if rendering would exceed a limit on time, memory or output characters."""


class Compile(msgspec.Struct, tag="compile", frozen=True):
    """The first message to the rendering process, with the templates to compile. The reply is an empty
    `Rendered`, or `Failed`."""

    sources: dict[str, str]
    """Template texts by name."""
    special_tokens: dict[str, str]
    """The special tokens' texts, keyed by their names in templates, such as `bos_token`."""
    max_cpu_s: float
    """The process is killed if it needs more CPU time than this, in seconds."""


class Render(msgspec.Struct, tag="render", frozen=True):
    """A request to render a conversation. The reply is `Rendered` or `Failed`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    variables: bytes
    """Additional template variables as a JSON object. Unlike msgpack, JSON does not limit the size of
    integers."""
    max_cpu_s: float
    """As in `Compile`."""


class Rendered(msgspec.Struct, tag="rendered", frozen=True):
    """The text of the rendered prompt."""

    text: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """An error. `message` is written for the client or, in a reply to `Compile`, for the operator."""

    message: str
    is_bound: bool = False
    """Whether the exception to raise is a `TemplateBoundError`."""


ToWorker = Compile | Render
FromWorker = Rendered | Failed
