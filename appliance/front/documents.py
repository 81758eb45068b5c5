"""The JSON response bodies, as declared in the OpenAPI document. Tests decode responses with these structs.
For speed, the front itself does not use them to build responses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class _Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class ErrorDetail(_Document):
    """OpenAI's error object."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="Name of the invalid field.")]
    code: str | None


class ErrorDocument(_Document):
    """The body of every error response, and the data of stream error events."""

    error: ErrorDetail


class HealthDocument(_Document):
    """A readiness report. If the service is not ready, `reason` explains why."""

    status: Literal["live", "ready", "not_ready"]
    reason: str | None = None


class ModelDocument(_Document):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Maximum context length. Null if the model is loaded on demand and has not been loaded yet."""


class ModelListDocument(_Document):
    """The served models."""

    object: Literal["list"]
    data: list[ModelDocument]


class CachedTokens(_Document):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class PromptTokenDocument(_Document):
    """A prompt token or an alternative to it."""

    logprob: float
    rank: Annotated[
        int | None,
        Meta(
            description="The token's rank by probability, starting at 1. Null if the token is not among "
            "the returned alternatives."
        ),
    ]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptTokenDocument] | None],
    Meta(description="Log probabilities of the prompt, if the request sets `prompt_logprobs`."),
]
ReturnedTokenIds = Annotated[
    list[int], Meta(description="Token ids, if the request sets `return_token_ids`.")
]


class _ChoiceDocument(_Document):
    token_ids: ReturnedTokenIds = []


class UsageDocument(_Document):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatTokenDocument(_Document):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatChosenTokenDocument(ChatTokenDocument):
    """A token of the answer, and the most likely alternatives to it."""

    top_logprobs: list[ChatTokenDocument]


class ChatLogprobsDocument(_Document):
    """Log probabilities of the answer's tokens."""

    content: list[ChatChosenTokenDocument]
    refusal: None


class ChatMessageDocument(_Document):
    """An answer's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoiceDocument(_ChoiceDocument, kw_only=True):
    """One of the answers to a conversation."""

    index: int
    message: ChatMessageDocument
    logprobs: ChatLogprobsDocument | None
    finish_reason: Literal["stop", "length"]


class ChatCompletionDocument(_Document):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceDocument]
    usage: UsageDocument
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: ReturnedTokenIds = []


class CompletionLogprobsDocument(_Document):
    """Log probabilities of the answer's tokens, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoiceDocument(_ChoiceDocument, kw_only=True):
    """One of the answers to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobsDocument | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: ReturnedTokenIds = []


class CompletionDocument(_Document):
    """Response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceDocument]
    usage: UsageDocument


class TokenizeDocument(_Document):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeDocument(_Document):
    """Response of /detokenize."""

    prompt: str
